"""Unions of bodies. The field ``type`` tells which of the bodies a value is, so errors are those of that body alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from shadowkv.serve.bodies.api_error import TAG
from shadowkv.serve.bodies.body import Body


@dataclass(frozen=True)
class ByType:
    """Annotation of a union of bodies. In each body, ``type`` is a ``Literal``. A value is read as the body whose
    ``type`` it has.

    Attributes:
        unsupported: the unsupported types in words, for the error message.
        default: the type of a value without the field ``type``.
    """

    unsupported: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bodies: tuple[type[Body], ...] = get_args(source) or (source,)
        kinds = {kind: body for body in bodies for kind in get_args(body.model_fields["type"].annotation)}

        def tag(value: Any) -> str | None:
            kind = value.get("type", self.default) if isinstance(value, dict) else getattr(value, "type", None)
            return f"{TAG}{kinds[kind].__name__}" if isinstance(kind, str) and kind in kinds else None

        members = [Annotated[body, Tag(f"{TAG}{body.__name__}")] for body in bodies]
        message = f"type must be {' or '.join(map(repr, kinds))}; {self.unsupported} are not supported"
        discriminator = Discriminator(tag, custom_error_type="type", custom_error_message=message)
        return handler.generate_schema(Annotated[reduce(or_, members), discriminator])
