"""Bodies of ``/cache/save`` and ``/cache/restore``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from shadowkv.prefix_cache.protocol import SAVE_NAME, check_save_name
from shadowkv.serve.body import Body, Name, Text, refusal, wrong
from shadowkv.serve.messages import Conversation, Turns
from shadowkv.serve.prompts import TokenPrompt, Tokens, prompts_of
from shadowkv.serve.protocol import Salt


def _save_name(value: Any) -> str:
    if not isinstance(value, str):
        raise wrong("must be a string")
    try:
        return check_save_name(value)
    except ValueError as error:
        raise wrong(str(error)) from error


SaveName = Annotated[
    str, PlainValidator(_save_name, json_schema_input_type=Annotated[str, Field(pattern=f"^{SAVE_NAME}$")])
]


def _one_prompt(value: Any) -> list[str | Tokens]:
    prompts = prompts_of(value)
    if len(prompts) > 1:
        raise wrong(f"{len(prompts)} prompts are too many; one is saved under a name")
    return prompts


class RestoreRequest(Body):
    """Body of ``/cache/restore``."""

    model: Name | None = None
    name: SaveName


class SaveRequest(RestoreRequest, Conversation):
    """Body of ``/cache/save``: a name, and a prompt or messages as in a completion or a chat completion."""

    prompt: Annotated[
        list[str | Tokens] | None, PlainValidator(_one_prompt, json_schema_input_type=Text | TokenPrompt)
    ] = None
    messages: Turns | None = Field(None, min_length=1)
    parse_special: bool = False
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> SaveRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "pass either prompt or messages")
        if self.parse_special and self.messages is None:
            raise refusal("parse_special", "parse_special is for messages; leave it out, a prompt's are always parsed")
        return self
