"""Unions of bodies that are discriminated by ``type``; errors come from the matching body alone."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from shadowkv.serve.bodies.api_error import TAG
from shadowkv.serve.bodies.body import Body


def union_by_type(kinds: dict[str, type[Body]], what: str, default: str | None = None) -> Any:
    """Returns the union as a type, for annotations.

    Args:
        kinds: bodies by their ``type``.
        what: the unsupported types in words, for the error message.
        default: the type of a body that names none.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"{TAG}{kind}" if isinstance(kind, str) and kind in kinds else None

    members = [Annotated[body, Tag(f"{TAG}{kind}")] for kind, body in kinds.items()]
    message = f"type must be {' or '.join(map(repr, kinds))}; {what} are not supported"
    discriminator = Discriminator(tag, custom_error_type="type", custom_error_message=message)
    return Annotated[reduce(or_, members), discriminator]
