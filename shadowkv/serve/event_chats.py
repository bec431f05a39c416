"""Chats whose streams are typed events, from which the whole answer is assembled as well."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.chats import Chat
from shadowkv.serve.jobs import Job
from shadowkv.serve.protocol import ChatRequest
from shadowkv.serve.replies import Events


class EventOutput(Protocol):
    """One answer.

    Attributes:
        whole: what ``events`` have assembled so far.
    """

    whole: dict[str, Any]

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it is generated."""
        ...

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The event for an error."""
        ...


class EventChat(Chat):
    """A chat requested through an API of another shape: its bodies have a ``chat``."""

    sign_of_life: ClassVar[str] = Events.sign_of_life

    @abstractmethod
    def output(self, job: Job) -> EventOutput:
        """The object that makes the answer."""

    def request(self, body: Any) -> ChatRequest:
        chat = body.chat
        assert isinstance(chat, ChatRequest)
        return chat

    async def answer(self, job: Job) -> dict[str, Any]:
        output = self.output(job)
        async with aclosing(output.events()) as events:
            async for _ in events:
                pass
        return output.whole

    def stream(self, job: Job) -> Events:
        output = self.output(job)
        return Events(output.events(), output.failure, named=True, end="", sign_of_life=self.sign_of_life)
