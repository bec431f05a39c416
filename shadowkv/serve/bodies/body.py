"""JSON bodies, from bytes to checked fields. JSON is strict RFC 8259, types are strict, and no parameter that would
change the answer is dropped. Short bodies, long bodies and lines of batch files all take this path."""

from __future__ import annotations

import json
import math
import re
from contextvars import ContextVar
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shadowkv.serve.bodies.api_error import ApiError, from_validation
from shadowkv.serve.bodies.limits import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_NESTING,
    MAX_TEXT_CHARS,
    MAX_VALUES,
)
from shadowkv.serve.bodies.parameters import IGNORED, NEUTRAL, UNSUPPORTED, complete, unknown

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Dropped = Annotated[None, PlainValidator(lambda value: None, json_schema_input_type=Any)]
"""Type of fields that clients copy from earlier answers into a request. Such fields have no effect."""

PIECE = 2**20
"""Number of bytes of a body that ``_outside_strings`` splits at their quotes at a time. This limits the number of
strings that exist at once."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Body(BaseModel):
    """A JSON body. Types are strict; null is the same as omitted, as in the OpenAI API.

    Attributes:
        is_read_again: whether a route needs the body's bytes again after the body was parsed.
    """

    is_read_again: ClassVar[bool] = False

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=complete)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            # Types are compared too: in Python, True equals 1 and 0.0 equals False.
            neutral_values = NEUTRAL.get(name, ())
            if name in IGNORED or any(type(value) is type(neutral) and value == neutral for neutral in neutral_values):
                continue
            if name not in NEUTRAL and name not in UNSUPPORTED:
                unknown.record(name)
                continue
            text = "{param} is not supported" + ("; leave it out or pass {neutral}" if name in NEUTRAL else "")
            neutral = " or ".join(repr(value) for value in NEUTRAL.get(name, ()))
            raise PydanticCustomError("unsupported", text, {"param": name, "neutral": neutral})
        self.__pydantic_extra__ = {}  # frees the extra values, which are not used and can have any size and depth
        return self

    def finish(self) -> None:
        """Final checks once all fields are valid; raises ApiError."""


def refusal(param: str, message: str) -> PydanticCustomError:
    """The error for a parameter, to raise in a validator."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


def at_most(limit: int, things: str, count: int) -> None:
    """Raises the error of ``wrong`` if ``count`` exceeds ``limit``. ``things`` names what is counted."""
    if count > limit:
        raise wrong(f"{count} {things} are too many; at most {limit} are allowed")


def wrong(message: str) -> PydanticCustomError:
    """The error for a value, to raise in the validator of its field."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def bounded(chars: int, value: Any) -> Any:
    """Returns a JSON value unchanged. Raises the error of ``wrong`` if the value has too many parts, more than
    ``chars`` characters, or too many levels."""
    level, depth, values = [value], 0, 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise wrong(f"it is nested too deeply; at most {MAX_NESTING} levels are allowed")
        values += len(level)
        at_most(MAX_VALUES, "JSON values", values)
        level = [part for member in level for part in _parts(member)]
    at_most(chars, "characters of JSON", len(json.dumps(value, ensure_ascii=False)))
    return value


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class Attachments:
    """Permission to read a request's documents. Reading them can take a minute. ``folder`` has the files that the
    request names by id."""

    folder: Path | None = None


class HasDocuments(ApiError):
    """A body has documents, and this process does not read documents."""


_attachments: ContextVar[Attachments | None] = ContextVar("attachments", default=None)


def attachments() -> Attachments:
    """Returns where to find documents; raises HasDocuments if this process does not read documents."""
    if (here := _attachments.get()) is None:
        raise HasDocuments("documents are not read here; send their text")
    return here


def read_body(raw: bytes | bytearray, model: type[B], documents: Attachments | None = None) -> B:
    """Returns the request in a body. Raises ApiError, or its subclass HasDocuments if the body has documents and
    ``documents`` is None."""
    _check_counts(raw)
    try:
        value = parse_json(raw)
    except JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error.msg}") from error
    before = _attachments.set(documents)
    try:
        return validated(value, model)
    finally:
        _attachments.reset(before)


def _check_counts(raw: bytes | bytearray) -> None:
    """Refuses a body with more arrays, objects or items than any valid body has, before the parser creates them."""
    if _containers(raw) > MAX_CONTAINERS or raw.count(b",") > MAX_ITEMS:
        raw = _outside_strings(raw)  # a long text can have that many brackets and commas
    for count, limit, things in (
        (_containers(raw), MAX_CONTAINERS, "arrays and objects"),
        (raw.count(b","), MAX_ITEMS, "items"),
    ):
        if count > limit:
            reason = f"the body has {count} {things}, at most {limit} are allowed"
            raise ApiError(reason, status=413, code="body_too_large")


def _containers(raw: bytes | bytearray) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _outside_strings(raw: bytes | bytearray) -> bytes:
    """Returns a JSON text without the content of its strings."""
    raw, kept, within = raw.replace(rb"\\", b"").replace(rb"\"", b""), [], 0
    for start in range(0, len(raw), PIECE):
        parts = raw[start : start + PIECE].split(b'"')
        kept.append(b"".join(parts[within::2]))
        within ^= (len(parts) - 1) % 2
    return b"".join(kept)


def validated(value: Any, model: type[B]) -> B:
    """The request in a parsed JSON value; raises ApiError."""
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error
    body.finish()
    return body


def parse_json(raw: bytes | bytearray) -> Any:
    """The value of a JSON text as RFC 8259 defines it: UTF-8, without NaN, duplicate keys, halves of surrogate pairs or
    numbers beyond the range of floating point. Raises JSONDecodeError."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise JSONDecodeError(f"byte {error.start} is not UTF-8", "", 0) from error
    except UnicodeEncodeError as error:
        raise JSONDecodeError("a string has half of a surrogate pair", "", 0) from error
    except RecursionError as error:
        raise JSONDecodeError("it is nested too deeply", "", 0) from error
    except JSONDecodeError:
        raise
    except ValueError as error:
        raise JSONDecodeError("a number has too many digits", "", 0) from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise JSONDecodeError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are allowed", "", 0)
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JSONDecodeError(f"the key {key!r} occurs twice", "", 0)
            seen.add(key)
    return value


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise JSONDecodeError("a number is beyond the range of floating point", "", 0)
    return number


def _constant(name: str) -> NoReturn:
    raise JSONDecodeError(f"{name} is no JSON number", "", 0)
