"""What all bodies share: strict types, refusals, and that nothing known to change the answer is dropped."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from shadowkv.serve.limits import MAX_NAME_CHARS, MAX_TEXT_CHARS
from shadowkv.serve.request_schema import IGNORED, NEUTRAL, UNSUPPORTED, complete
from shadowkv.serve.unknown import unknown

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Dropped = Annotated[None, PlainValidator(lambda value: None, json_schema_input_type=Any)]
"""Fields of answers that clients send back, without any effect."""


class Body(BaseModel):
    """Strict about types; null is the same as omitted, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=complete)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            # Compared by type too: to Python, true equals 1 and 0.0 equals false.
            neutral_values = NEUTRAL.get(name, ())
            if name in IGNORED or any(type(value) is type(one) and value == one for one in neutral_values):
                continue
            if name not in NEUTRAL and name not in UNSUPPORTED:
                unknown.tell(name)
                continue
            text = "{param} is not supported" + ("; leave it out or pass {neutral}" if name in NEUTRAL else "")
            neutral = " or ".join(repr(value) for value in NEUTRAL.get(name, ()))
            raise PydanticCustomError("unsupported", text, {"param": name, "neutral": neutral})
        self.__pydantic_extra__ = {}  # of any size and depth, and unused
        return self

    def finish(self) -> None:
        """Final checks once all fields are valid; raises ApiError."""


def refusal(param: str, message: str) -> PydanticCustomError:
    """The error for a parameter, to raise in a validator."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


def at_most(limit: int, things: str, count: int) -> None:
    """Refuses a value with more than ``limit`` things."""
    if count > limit:
        raise wrong(f"{count} {things} are too many; at most {limit} are allowed")


def wrong(message: str) -> PydanticCustomError:
    """The error for a value, to raise in the validator of its field."""
    return PydanticCustomError("wrong", "{message}", {"message": message})
