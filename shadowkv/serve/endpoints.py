"""What is particular to completions and to chat completions: their prompts, and the shapes of their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from shadowkv.engine.request import TokenLogprobs
from shadowkv.serve.api_error import ApiError
from shadowkv.serve.logprobs import chat_logprobs, completion_logprobs, token_text
from shadowkv.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, characters
from shadowkv.serve.tokenization import check_length, encode, too_long

if TYPE_CHECKING:
    from shadowkv.models.tokenizer import Tokenizer


@dataclass
class Piece:
    """Part of a choice, or all of it: what one chunk of a stream, or one whole answer, holds."""

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    first: bool = True
    offset: int = 0
    """Characters of the tokens before; counted only where log-probabilities are asked for."""


class Endpoint(ABC):
    """One way to ask for text; instances hold nothing but the tokenizer."""

    url: ClassVar[str]
    request_type: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def sizes(self, request: Any) -> list[int]:
        """Characters or token ids of every prompt, before anything is done with them."""

    @abstractmethod
    def prompts(self, request: Any, limit: int) -> list[list[int]]:
        """Token ids of every prompt; raises ApiError, at the latest where one has many more than ``limit``."""

    def echo(self, request: Any, prompts: list[list[int]]) -> list[str] | None:
        """What each prompt's answers begin with, if the request asks for that."""
        return None

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice, in a stream: one or more chunks."""

    def width(self, steps: Sequence[TokenLogprobs]) -> int:
        """Characters of the steps' tokens."""
        return sum(len(token_text(self.tokenizer, step.token_id)) for step in steps)


class Completions(Endpoint):
    """Text in, text out."""

    url = "/v1/completions"
    request_type = CompletionRequest
    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def sizes(self, request: CompletionRequest) -> list[int]:
        return [len(prompt) for prompt in request.prompt]

    def prompts(self, request: CompletionRequest, limit: int) -> list[list[int]]:
        for prompt in request.prompt:
            if not isinstance(prompt, str) and len(prompt) > limit:
                reason = f"at most {limit} tokens are allowed, but the prompt has {len(prompt)}"
                raise too_long(reason, "prompt")
        try:
            return [
                encode(self.tokenizer, prompt, limit, "prompt") if isinstance(prompt, str) else prompt.tolist()
                for prompt in request.prompt
            ]
        except ValueError as error:  # text that is no UTF-8
            raise ApiError(str(error), param="prompt") from error

    def echo(self, request: CompletionRequest, prompts: list[list[int]]) -> list[str] | None:
        if not request.echo:
            return None
        pairs = zip(request.prompt, prompts, strict=True)
        return [
            text if isinstance(text, str) else self.tokenizer.decode(ids, skip_special_tokens=False)
            for text, ids in pairs
        ]

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None
            if piece.logprobs is None
            else completion_logprobs(self.tokenizer, piece.logprobs, piece.offset),
            "finish_reason": piece.finish_reason,
        }

    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece)]


class ChatCompletions(Endpoint):
    """A conversation in, the assistant's turn out."""

    url = "/v1/chat/completions"
    request_type = ChatRequest
    id_prefix = "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def sizes(self, request: ChatRequest) -> list[int]:
        return [characters(request.messages)]

    def prompts(self, request: ChatRequest, limit: int) -> list[list[int]]:
        try:
            check = partial(check_length, self.tokenizer, limit, "messages")
            return [self.tokenizer.encode_chat(request.messages, parse_special=request.parse_special, check=check)]
        except ValueError as error:  # no template, or one that refuses these messages
            raise ApiError(str(error), param="messages") from error

    def choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._with("message", message, piece)

    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.first:
            chunks.append(self._with("delta", {"role": "assistant", "content": ""}, Piece(piece.index)))
        chunks.append(self._with("delta", {"content": piece.text} if piece.text else {}, piece))
        return chunks

    def _with(self, key: str, value: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            key: value,
            "logprobs": None if piece.logprobs is None else chat_logprobs(self.tokenizer, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }


ENDPOINTS: dict[str, type[Endpoint]] = {endpoint.url: endpoint for endpoint in (ChatCompletions, Completions)}
