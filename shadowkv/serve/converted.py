"""Bodies of APIs that express a chat differently: each becomes a ``ChatRequest`` where it is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationError

from shadowkv.serve.api_error import from_validation
from shadowkv.serve.body import Body
from shadowkv.serve.messages import Variables
from shadowkv.serve.protocol import ChatRequest, Sampling

SHARED = (Sampling.model_fields.keys() | {"chat_template_kwargs"}) - {"model", "stream"}
"""Parameters that mean the same everywhere."""


class Converted(Body):
    """A body that is converted to a chat.

    Attributes:
        names: what a chat's parameters are called here, where that differs.
    """

    names: ClassVar[Mapping[str, str]]

    chat_template_kwargs: Variables = Field({})
    _chat: ChatRequest | None = PrivateAttr(None)

    @property
    def chat(self) -> ChatRequest:
        """The equivalent chat."""
        assert self._chat is not None, "finish was not called"
        return self._chat

    def finish(self) -> None:
        given = {name: getattr(self, name) for name in SHARED & self.model_fields_set}
        try:
            self._chat = ChatRequest.model_validate({**given, **self.as_chat()})
        except ValidationError as error:
            found = error.errors(include_url=False)
            raise from_validation(found).renamed(self.names) from error
        self.drop()

    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Body of the chat, without the shared parameters."""

    @abstractmethod
    def drop(self) -> None:
        """Drops the conversation, which the chat has now."""
