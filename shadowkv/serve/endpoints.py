"""What is particular to each way to ask for text: its prompts, and the shapes of its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from shadowkv.serve.event_stream import Events
from shadowkv.serve.jobs import Job
from shadowkv.serve.protocol import GenerationRequest, Sampling
from shadowkv.serve.reasoning import ReasoningParser
from shadowkv.serve.settings import ServerSettings
from shadowkv.serve.tool_formats import tool_format
from shadowkv.serve.tool_parser import ToolParser

if TYPE_CHECKING:
    from shadowkv.models.tokenizer import Tokenizer


class Endpoint(ABC):
    """One way to ask for text; instances hold nothing but the tokenizer and how answers are read.

    Args:
        tokenizer: the served model's.
        settings: say which calls of tools and thoughts there are in answers.

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
        """What a body asks for."""
        assert isinstance(body, GenerationRequest)
        return body

    @abstractmethod
    def sizes(self, request: Any) -> list[int]:
        """Characters or token ids of every prompt, before anything is done with them."""

    @abstractmethod
    def prompts(self, request: Any, limit: int) -> list[list[int]]:
        """Token ids of every prompt; raises ApiError, at the latest where one has many more than ``limit``."""

    def echo(self, request: Any, prompts: list[list[int]]) -> list[str] | None:
        """What each prompt's answers begin with, if the request asks for that."""
        return None

    def tool_parser(self, request: Any) -> ToolParser | None:
        """What reads the calls of tools in a choice's text; None if there are none to read."""
        return None

    def reasoning_parser(self, request: Any, prompt: list[int]) -> ReasoningParser | None:
        """What reads the thoughts in a choice's text; None if they are part of it."""
        return None

    @abstractmethod
    async def answer(self, job: Job) -> dict[str, Any]:
        """The whole answer; raises ApiError or EngineDead."""

    @abstractmethod
    def stream(self, job: Job) -> Events:
        """The answer as it comes."""
