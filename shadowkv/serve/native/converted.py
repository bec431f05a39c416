"""Bodies that express a completion differently: each is converted to a ``NativeCompletion`` when it is read."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from shadowkv.serve.bodies.parameters import complete
from shadowkv.serve.openai.converted import Converted
from shadowkv.serve.openai.protocol import CompletionRequest, TextRequest


class NativeCompletion(CompletionRequest):
    """A completion whose default length is the number of tokens that the server reserves.

    Attributes:
        pieces: for each prompt, how many items of ``prompt`` are joined to it; empty if each item is a prompt.
    """

    pieces: tuple[int, ...] = ()

    def limit(self, room: int | None) -> int | None:
        return self.max_tokens


def _described(schema: dict[str, Any]) -> None:
    """pydantic's ``json_schema_extra``: fields that are passed on to a completion get the completion's description."""
    known = CompletionRequest.model_json_schema()["properties"]
    for name, value in schema["properties"].items():
        if name in known and not value.keys() & {"type", "anyOf", "$ref"}:
            value.update({key: part for key, part in known[name].items() if key not in ("title", "default")})
    complete(schema)


class NativeRequest(Converted, TextRequest):
    """A body that is converted to a completion."""

    target = NativeCompletion

    model_config = ConfigDict(json_schema_extra=_described)
