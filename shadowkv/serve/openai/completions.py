"""``/v1/completions`` and ``/v1/chat/completions``: answers that are a list of choices, whole or in chunks."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import at_most, refusal
from shadowkv.serve.bodies.limits import MAX_MESSAGES, MAX_PROMPTS, MAX_TEXT_CHARS
from shadowkv.serve.http.replies import Events
from shadowkv.serve.openai.chats import Chat
from shadowkv.serve.openai.endpoint import Endpoint
from shadowkv.serve.openai.jobs import Job, Piece
from shadowkv.serve.openai.logprobs import chat_logprobs, completion_logprobs
from shadowkv.serve.openai.messages import Turns
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest
from shadowkv.serve.text.tokenization import encode, too_long
from shadowkv.serve.text.tool_parser import CallPart


class Choices(Endpoint):
    """An endpoint whose answers have choices."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice, in a stream: one or more chunks."""

    async def answer(self, job: Job) -> dict[str, Any]:
        pieces = await job.joined_pieces()

        def shape() -> list[dict[str, Any]]:
            return [self.choice(piece) for piece in pieces]

        # Writing down the log-probabilities of a long prompt takes a while.
        choices = await asyncio.to_thread(shape) if job.echo else shape()
        return {**job.head(self.kind), "choices": choices, "usage": job.usage(), **job.remote_prefill.answer_field()}

    def stream(self, job: Job) -> Events:
        return Events(self._chunks(job))

    async def _chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        head = job.head(self.chunk_kind) | ({"usage": None} if job.request.include_usage else {})
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                if piece.prompt_progress is not None:
                    yield {**head, "choices": self.delta(piece), "prompt_progress": piece.prompt_progress}
                    continue
                slow = piece.first and job.echo
                for choice in await asyncio.to_thread(self.delta, piece) if slow else self.delta(piece):
                    yield {**head, "choices": [choice]}
        if job.request.include_usage:
            yield {**head, "choices": [], "usage": job.usage()}


def selections_of(piece: Piece) -> dict[str, Any]:
    """What each of a piece's tokens attended to, where requested."""
    if piece.selections is None:
        return {}
    return {"selections": [None if selection is None else asdict(selection) for selection in piece.selections]}


class Completions(Choices):
    """Text in, text out."""

    url = "/v1/completions"
    request_type = CompletionRequest
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def sizes(self, request: CompletionRequest) -> list[int]:
        return [len(prompt) for prompt in request.prompt]

    def prompts(self, request: CompletionRequest, limit: int) -> list[list[int]]:
        for prompt in request.prompt:
            if not isinstance(prompt, str) and len(prompt) > limit:
                raise too_long(f"the prompt has {len(prompt)}", "prompt", len(prompt), limit)
        try:
            return [
                encode(self.tokenizer, prompt, limit, "prompt") if isinstance(prompt, str) else prompt.tolist()
                for prompt in request.prompt
            ]
        except ValueError as error:  # text that is not valid UTF-8
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
            **selections_of(piece),
        }

    def delta(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece)]


class ChatCompletions(Chat, Choices):
    """The OpenAI API's chats."""

    url = "/v1/chat/completions"
    request_type: ClassVar[type[ChatRequest]] = ChatRequest
    id_prefix = "chatcmpl-"
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


def _few_messages(value: Any) -> Any:
    if isinstance(value, list):
        at_most(MAX_MESSAGES, "messages", sum(len(chat) for chat in value if isinstance(chat, list)))
    return value


class ChatBatchRequest(ChatRequest):
    """Body of ``/v1/chat/completions/batch``: a chat's, but ``messages`` is a list of conversations."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[Turns, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        BeforeValidator(_few_messages),
    ]

    @model_validator(mode="after")
    def _check_batch(self) -> ChatBatchRequest:
        at_most(MAX_TEXT_CHARS, "characters", sum(chat.characters for chat in self.chats))
        for name, fine in (("n", self.n == 1), ("stream", not self.stream), ("tools", not self.tools)):
            if not fine:
                reason = "a batch of chats has one choice for each conversation, whole, without tools"
                raise refusal(name, f"{name} is not supported here: {reason}")
        return self

    def _check_continued(self) -> None:
        for chat in self.chats:
            ChatRequest._check_continued(chat)

    @property
    def chats(self) -> list[ChatRequest]:
        """Each conversation with the parameters of all."""
        others = {name: getattr(self, name) for name in ChatRequest.model_fields if name != "messages"}
        return [
            ChatRequest.model_construct(self.model_fields_set, messages=chat, **others)  # checked as part of this
            for chat in self.messages
        ]


class ChatBatches(ChatCompletions):
    """vLLM's batches of chats: one choice for each conversation."""

    url = "/v1/chat/completions/batch"
    request_type = ChatBatchRequest

    def sizes(self, request: ChatRequest) -> list[int]:
        assert isinstance(request, ChatBatchRequest)
        return [chat.characters for chat in request.chats]

    def prompts(self, request: ChatRequest, limit: int) -> list[list[int]]:
        assert isinstance(request, ChatBatchRequest)
        return [prompt for chat in request.chats for prompt in super(ChatBatches, self).prompts(chat, limit)]


def _call(part: CallPart) -> dict[str, Any]:
    """A call in the API's form, or the part of one that comes after its name."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
