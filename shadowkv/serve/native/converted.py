"""Bodies of APIs that express a completion differently: each converts itself to a ``CompletionRequest`` when it is
read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, PrivateAttr, ValidationError

from shadowkv.serve.bodies.api_error import from_validation
from shadowkv.serve.bodies.parameters import complete
from shadowkv.serve.openai.completions import Completions
from shadowkv.serve.openai.protocol import CompletionRequest, GenerationRequest, TextRequest


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


class NativeRequest(TextRequest):
    """A body that is converted to a completion.

    Attributes:
        names: this API's names of a completion's parameters, where they differ.
    """

    names: ClassVar[Mapping[str, str]]

    model_config = ConfigDict(json_schema_extra=_described)

    _completion: CompletionRequest | None = PrivateAttr(None)

    @property
    def completion(self) -> CompletionRequest:
        """The equivalent completion."""
        assert self._completion is not None, "finish was not called"
        return self._completion

    def finish(self) -> None:
        try:
            fields = {name: value for name, value in self.as_completion().items() if value is not None}
            self._completion = NativeCompletion.model_validate({**fields, "stream": self.stream})
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)).renamed(self.names) from error

    @abstractmethod
    def as_completion(self) -> dict[str, Any]:
        """Body of the completion; fields that are None are left out."""


class NativeCompletions(Completions):
    """Base of endpoints whose bodies are ``NativeRequest``, with their own form of answers."""

    def request(self, body: NativeRequest) -> GenerationRequest:
        return body.completion

    def new_id(self, body: NativeRequest, request_id: str | None) -> str:
        return super().new_id(body.completion, request_id)
