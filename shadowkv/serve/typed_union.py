"""Unions of bodies discriminated by ``type``, with errors from the matching one alone; and lists of them."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from shadowkv.serve.api_error import TAG
from shadowkv.serve.body import Body, at_most
from shadowkv.serve.limits import MAX_MESSAGES

PART_LISTS = ("content", "output", "summary")
"""Fields of items, messages and blocks that have parts of their own."""


def union_by_type(kinds: dict[str, type[Body]], what: str, default: str | None = None) -> Any:
    """The union, as a type.

    Args:
        kinds: bodies by their ``type``.
        what: the others in words, for the refusal that says they are not supported.
        default: type of a body that has none.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"{TAG}{kind}" if isinstance(kind, str) and kind in kinds else None

    members = [Annotated[body, Tag(f"{TAG}{kind}")] for kind, body in kinds.items()]
    message = f"type must be {' or '.join(map(repr, kinds))}; {what} are not supported"
    discriminator = Discriminator(tag, custom_error_type="type", custom_error_message=message)
    return Annotated[reduce(or_, members), discriminator]


def few_parts(value: Any) -> Any:
    """A list of items, messages or blocks, if together they do not have too many parts: checked before any is looked at
    individually."""
    level, count = value if isinstance(value, list) else [], 0
    while level:
        found = [one.get(name) for one in level if isinstance(one, dict) for name in PART_LISTS]
        level = [part for parts in found if isinstance(parts, list) for part in parts]
        count += len(level)
        at_most(MAX_MESSAGES, "content parts", count)
    return value
