"""What is specific to each way to ask for text: its prompts, and the shapes of its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from shadowkv.serve.jobs import Job
from shadowkv.serve.protocol import GenerationRequest, Sampling
from shadowkv.serve.reasoning import ReasoningParser
from shadowkv.serve.replies import Events
from shadowkv.serve.settings import ServerSettings
from shadowkv.serve.tool_formats import tool_format
from shadowkv.serve.tool_parser import ToolParser

if TYPE_CHECKING:
    from shadowkv.models.tokenizer import Tokenizer


class Endpoint(ABC):
    """One way to ask for text; instances hold only the tokenizer and how to read answers.

    Args:
        tokenizer: the served model's.
        settings: say which tool calls and thoughts answers may have.

    Attributes:
        names: what parameters of a ``GenerationRequest`` are called here, where that differs.
    """

    url: ClassVar[str]
    request_type: ClassVar[type[Sampling]]
    id_prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings | None = None) -> None:
        self.tokenizer, self.settings = tokenizer, settings or ServerSettings()
        self.tool_format = tool_format(self.settings.tool_call_parser, tokenizer.chat_template)

    def request(self, body: Any) -> GenerationRequest:
        """The request in a body."""
        assert isinstance(body, GenerationRequest)
        return body

    @abstractmethod
    def sizes(self, request: Any) -> list[int]:
        """Characters or token ids of every prompt, before any processing."""

    @abstractmethod
    def prompts(self, request: Any, limit: int) -> list[list[int]]:
        """Token ids of every prompt; raises ApiError, at the latest for one with many more than ``limit``."""

    def echo(self, request: Any, prompts: list[list[int]]) -> list[str] | None:
        """What each prompt's answers begin with, if the request asks for an echo."""
        return None

    def tool_parser(self, request: Any) -> ToolParser | None:
        """The reader of tool calls in a choice's text; None if there are none to read."""
        return None

    def reasoning_parser(self, request: Any, prompt: list[int]) -> ReasoningParser | None:
        """The reader of thoughts in a choice's text; None if they are part of the text."""
        return None

    @abstractmethod
    async def answer(self, job: Job) -> dict[str, Any]:
        """The whole answer; raises ApiError or EngineDead."""

    @abstractmethod
    def stream(self, job: Job) -> Events:
        """The answer as it is generated."""
