"""What all bodies have in common: strict types, nothing dropped that is known to change the answer, how to refuse."""

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
"""What answers have that clients send back, and is of no use."""


class Body(BaseModel):
    """Strict about types; null is the same as left out, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=complete)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            # By type too: true is 1 to Python, and 0.0 is false.
            neutral_values = NEUTRAL.get(name, ())
            if name in IGNORED or any(type(value) is type(one) and value == one for one in neutral_values):
                continue
            if name not in NEUTRAL and name not in UNSUPPORTED:
                unknown.tell(name)
                continue
            text = "{param} is not supported" + ("; leave it out or pass {neutral}" if name in NEUTRAL else "")
            neutral = " or ".join(repr(value) for value in NEUTRAL.get(name, ()))
            raise PydanticCustomError("unsupported", text, {"param": name, "neutral": neutral})
        self.__pydantic_extra__ = {}  # of any size and depth, and of no use
        return self

    def finish(self) -> None:
        """What is left to do once all fields are right; raises ApiError."""


def refusal(param: str, message: str) -> PydanticCustomError:
    """A parameter's refusal, to raise in a validator."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


def at_most(limit: int, things: str, count: int) -> None:
    """Refuses a value of more things than ``limit``."""
    if count > limit:
        raise wrong(f"{count} {things} are too many; at most {limit} are allowed")


def wrong(message: str) -> PydanticCustomError:
    """A value's refusal, to raise in the validator of its field."""
    return PydanticCustomError("wrong", "{message}", {"message": message})
