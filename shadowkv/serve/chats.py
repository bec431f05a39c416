"""``/v1/chat/completions``, and what all conversation APIs share: a chat's prompt, its calls and its thoughts."""

from __future__ import annotations

from functools import partial
from typing import Any

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.choices import Choices, selections_of
from shadowkv.serve.endpoint import Endpoint
from shadowkv.serve.jobs import Piece
from shadowkv.serve.logprobs import chat_logprobs
from shadowkv.serve.messages import template_input
from shadowkv.serve.protocol import ChatRequest
from shadowkv.serve.reasoning import ReasoningParser
from shadowkv.serve.tokenization import check_length
from shadowkv.serve.tool_formats import Listed, Named
from shadowkv.serve.tool_parser import CallPart, ToolParser, call_id

END_TOKENS = 16
"""Final tokens of a prompt that are searched for the beginning of the thoughts, which some templates write."""


class Chat(Endpoint):
    """A conversation in, the assistant's turn out."""

    def sizes(self, request: ChatRequest) -> list[int]:
        return [request.characters]

    def prompts(self, request: ChatRequest, limit: int) -> list[list[int]]:
        try:
            check = partial(check_length, self.tokenizer, limit, "messages")
            turns, variables = template_input(request, self.tokenizer.chat_template)
            return [self.tokenizer.encode_chat(turns, parse_special=request.parse_special, check=check, **variables)]
        except ValueError as error:  # no template, or one that refuses these messages
            raise ApiError(str(error), param="messages") from error

    def tool_parser(self, request: ChatRequest) -> ToolParser | None:
        """As for any endpoint; raises ApiError where the model's format for calls is unknown."""
        choice, known = request.choice, self.tool_format
        if choice.is_forced:
            new_id = call_id if known is None else known.new_id
            return Listed(new_id) if choice.name is None else Named(choice.name, new_id)
        if not request.parses_calls:
            return None
        if known is None:
            reason = (
                "tool_choice 'auto' needs to know how the model writes calls, which its chat template does not tell"
            )
            advice = "pass 'required', a function's name or 'none', or start the server with --tool-call-parser"
            raise ApiError(f"{reason}: {advice}", param="tool_choice")
        return known.parser(known.new_id)

    def reasoning_parser(self, request: ChatRequest, prompt: list[int]) -> ReasoningParser | None:
        if self.settings.reasoning_parser is None or request.output_schema is not None:  # JSON has no room for thoughts
            return None
        return ReasoningParser(self.tokenizer.decode(prompt[-END_TOKENS:], skip_special_tokens=False))


class ChatCompletions(Chat, Choices):
    """The OpenAI API's chats."""

    url = "/v1/chat/completions"
    request_type = ChatRequest
    id_prefix = "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.thought:
            message |= {"content": piece.text or None, "reasoning_content": piece.thought}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [_call(part) for part in piece.calls]}
        return self._with("message", message, piece)

    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.first:
            chunks.append(self._with("delta", {"role": "assistant", "content": ""}, Piece(piece.index)))
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.thought:
            delta["reasoning_content"] = piece.thought
        if piece.calls:
            delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in piece.calls]
        chunks.append(self._with("delta", delta, piece))
        return chunks

    def _with(self, key: str, value: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            key: value,
            "logprobs": None if piece.logprobs is None else chat_logprobs(self.tokenizer, piece.logprobs),
            "finish_reason": piece.finish_reason,
            **selections_of(piece),
        }


def _call(part: CallPart) -> dict[str, Any]:
    """A call in the API's form, or the part of one that comes after its name."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
