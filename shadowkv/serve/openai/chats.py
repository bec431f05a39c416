"""``Chat``: the base of chat endpoints in all APIs. It renders a chat's prompt, and chooses the parsers of tool calls
and reasoning. ``EventChat`` is the base for APIs that stream typed events. Their whole answers are built from the same
events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.owners import current_tenant
from shadowkv.serve.http.replies import Events, reply
from shadowkv.serve.openai.endpoint import Endpoint
from shadowkv.serve.openai.jobs import Job
from shadowkv.serve.openai.messages import Conversation, template_input
from shadowkv.serve.openai.protocol import ChatRequest, GenerationRequest
from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.tokenization import check_length, check_prompt, in_turn
from shadowkv.serve.text.tool_formats import Listed, Named, ToolFormat
from shadowkv.serve.text.tool_parser import ToolParser, call_id

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer

END_TOKENS = 16
"""Number of tokens at the end of a prompt in which parsers look for the beginning of the answer. Some chat templates
put such a beginning there, for instance ``<think>``."""


class Chat(Endpoint):
    """A chat endpoint: it gets a conversation, and answers with the assistant's next message."""

    def sizes(self, request: ChatRequest) -> list[int]:
        return [request.characters]

    def prompts(self, request: ChatRequest, limit: int) -> list[list[int]]:
        if request.remote_prompt is not None:
            check_prompt(self.tokenizer, request.remote_prompt, limit, "kv_transfer_params")
            return [request.remote_prompt.tolist()]
        flags = request.parse_special, request.add_special_tokens
        return [conversation_tokens(self.tokenizer, request, limit, *flags)]

    def predicted(self, request: ChatRequest) -> str:
        return "" if request.prediction is None else request.prediction.text

    def opening(self, request: ChatRequest, prompt: list[int]) -> list[int]:
        known = self.format_of(request)
        opening = None if known is None else known.opening
        if opening is None or request.output_schema is None or not request.has_next_turn:
            return []
        return self.tokenizer.encode(opening(self._end(prompt)), add_special_tokens=False)

    def format_of(self, request: ChatRequest) -> ToolFormat | None:
        """Returns the format in which the model writes tool calls in answer to this request; None if it is unknown."""
        if request.chat_template is not None:
            return self.settings.tool_format(request.chat_template)
        return self.tool_format

    def tool_parser(self, request: ChatRequest) -> ToolParser | None:
        """Returns the parser of tool calls; None if the answer is not parsed. Raises ApiError if the model's format of
        calls is needed and unknown, or if the server does not trust the request's template."""
        self.settings.check_trust(request.chat_template)
        chosen, known = request.chosen_tools, self.format_of(request)
        if chosen.is_forced:
            new_id = call_id if known is None else known.new_id
            return Listed(new_id) if chosen.name is None else Named(chosen.name, new_id)
        if not request.parses_calls:
            return known.parser(known.new_id) if known is not None and self._has_own_format(request) else None
        if known is None:
            reason = "tool_choice 'auto' needs the model's format of tool calls, which its chat template does not show"
            advice = "pass 'required', a function's name or 'none', or start the server with --tool-call-parser"
            raise ApiError(f"{reason}: {advice}", param="tool_choice")
        return known.parser(known.new_id, request.tools)

    def reasoning_parser(self, request: ChatRequest, prompt: list[int]) -> ReasoningParser | None:
        known = self.format_of(request)
        kind = None if known is None else known.reasoning
        if self.settings.reasoning_parser is not None:
            kind = kind or ReasoningParser
        if kind is None or request.output_schema is not None:  # a constrained output has no room for reasoning
            return None
        return kind(self._end(prompt))

    def reads_special_tokens(self, request: ChatRequest) -> bool:
        return request.parses_calls or self._has_own_format(request)

    def _end(self, prompt: list[int]) -> str:
        return self.tokenizer.decode(prompt[-END_TOKENS:], skip_special_tokens=False)

    def _has_own_format(self, request: ChatRequest) -> bool:
        """Whether answers have marks of the model's own format even without tool calls, such as those of reasoning."""
        known = self.format_of(request)
        return known is not None and known.reasoning is not None and request.output_schema is None


def conversation_tokens(
    tokenizer: Tokenizer,
    conversation: Conversation,
    limit: int,
    parse_special: bool | None = None,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """Returns the token ids of a conversation's prompt. The flags are those of ``encode_chat``. Raises ApiError if the
    template refuses the messages, or if the prompt has many more tokens than ``limit``. A prompt that is slightly
    longer than ``limit`` may pass."""
    try:
        turns, variables = template_input(conversation, tokenizer.chat_template)
        return tokenizer.encode_chat(
            turns,
            conversation.has_next_turn,
            continue_final_message=conversation.continue_final_message,
            check=partial(check_length, tokenizer, limit, "messages"),
            parse_special=bool(parse_special),
            add_special_tokens=bool(add_special_tokens),
            **variables,
        )
    except ValueError as error:  # no template, or one that refuses these messages
        raise ApiError(str(error), param="messages") from error


async def count_tokens(endpoint: Chat, chat: GenerationRequest, most: int, request: Request) -> Response:
    """Responds with the number of tokens of a chat's prompt. Refuses a prompt with many more than ``most`` tokens."""
    assert isinstance(chat, ChatRequest)

    async def count() -> Response:
        (prompt,) = await in_turn(current_tenant(), chat.characters, lambda: endpoint.prompts(chat, most))
        return JSONResponse({"input_tokens": len(prompt)})

    return await reply(request, count)


class EventOutput(Protocol):
    """One answer in the form of stream events.

    Attributes:
        answer: the answer, as far as ``events`` has built it.
    """

    answer: dict[str, Any]

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields events while the answer is generated."""
        ...

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Returns the event that reports an error."""
        ...


class EventChat(Chat):
    """A chat endpoint of another API, whose bodies are ``ConvertedChat``."""

    sign_of_life: ClassVar[bytes] = Events.sign_of_life

    @abstractmethod
    def output(self, job: Job) -> EventOutput:
        """Returns the object that builds the answer's events."""

    async def answer(self, job: Job) -> dict[str, Any]:
        output = self.output(job)
        async with aclosing(output.events()) as events:
            async for _ in events:
                pass
        return output.answer

    def stream(self, job: Job) -> Events:
        output = self.output(job)
        return Events(output.events(), output.failure, named=True, end=b"", sign_of_life=self.sign_of_life)
