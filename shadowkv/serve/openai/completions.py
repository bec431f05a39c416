"""``/v1/completions`` and ``/v1/chat/completions``: answers with a list of choices, whole or streamed."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from shadowkv import __version__
from shadowkv.serve.bodies.body import at_most, refusal
from shadowkv.serve.bodies.limits import MAX_MESSAGES, MAX_PROMPTS, MAX_TEXT_CHARS
from shadowkv.serve.http.replies import Events
from shadowkv.serve.openai.chats import Chat
from shadowkv.serve.openai.endpoint import Endpoint
from shadowkv.serve.openai.jobs import Job, Piece, progress_timings
from shadowkv.serve.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from shadowkv.serve.openai.messages import Turns
from shadowkv.serve.openai.protocol import ChatRequest, CompletionRequest, TextRequest
from shadowkv.serve.text.tokenization import check_prompt, encode
from shadowkv.serve.text.tool_parser import CallPart

NO_PARTS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Message fields that are always null, and ``reasoning``, which is null unless the answer has reasoning."""


class Choices(Endpoint):
    """An endpoint whose answers have a list of choices."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        """Returns a whole choice."""

    @abstractmethod
    def delta(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for one piece. The last chunk has the piece. Chunks before it, if any, only
        open the choice."""

    def about(self, job: Job) -> dict[str, Any]:
        """Returns the fields that stand beside the choices in a whole answer and in the first chunk of a stream."""
        return {}

    async def answer(self, job: Job) -> dict[str, Any]:
        pieces = await job.joined_pieces()

        def shape() -> dict[str, Any]:
            return {"choices": [self.choice(job, piece) for piece in pieces], **self.about(job)}

        # Formatting the log-probabilities of a long prompt takes a while, and must not block the event loop.
        shaped = await asyncio.to_thread(shape) if job.echo or job.prompt_scores else shape()
        nulls = {"service_tier": None, "kv_transfer_params": None}
        end = {"usage": job.usage(), "system_fingerprint": fingerprint(job), **job.remote_prefill.answer_field()}
        return {**job.head(self.kind), **nulls, **shaped, **end, **self._metrics(job), "timings": job.timings_of(0)}

    def _metrics(self, job: Job) -> dict[str, Any]:
        return {"metrics": job.metrics_of(0)} if self.settings.enable_per_request_metrics else {}

    def stream(self, job: Job) -> Events:
        return Events(self._chunks(job))

    async def _chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        options, forced = job.request.stream_options, self.settings.enable_force_include_usage
        with_usage = forced or (options is not None and options.include_usage)
        continuous = forced or (with_usage and options is not None and options.continuous_usage_stats)
        head = job.head(self.chunk_kind)
        first: dict[str, Any] = self.about(job)

        def timings(piece: Piece, is_last: bool) -> dict[str, Any]:
            if not (is_last or job.request.timings_per_token):
                return {}
            if piece.prompt_progress is not None:
                return {"timings": progress_timings(piece.prompt_progress)}
            return {"timings": job.timings_of(piece.index)}

        def usage(index: int, has_begun: bool = True) -> dict[str, Any]:
            if not with_usage:
                return {}
            return {"usage": job.usage_of(index, has_begun) if continuous else None}

        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                if piece.prompt_progress is not None:
                    choices, progress = self.delta(job, piece), piece.prompt_progress
                    more = {"prompt_progress": progress, **timings(piece, is_last=False)}
                    yield {**head, **usage(piece.index), "choices": choices, **more}
                    continue
                slow = piece.first and job.echo
                *begin, choice = await asyncio.to_thread(self.delta, job, piece) if slow else self.delta(job, piece)
                for empty in begin:
                    yield {**head, **usage(piece.index, has_begun=False), **first, "choices": [empty]}
                    first = {}
                is_last = piece.finish_reason is not None and not with_usage
                last = {"system_fingerprint": fingerprint(job)} if is_last else {}
                yield {**head, **usage(piece.index), **first, **last, "choices": [choice], **timings(piece, is_last)}
                first = {}
        if with_usage:
            end = {"usage": job.usage(), "system_fingerprint": fingerprint(job)}
            yield {**head, "choices": [], **end, **self._metrics(job), "timings": job.timings_of(0)}

    def as_ids(self, job: Job) -> bool:
        """Whether log-probabilities name tokens by their ids instead of their texts."""
        asked = job.request.return_tokens_as_token_ids
        return self.settings.return_tokens_as_token_ids if asked is None else asked


def fingerprint(job: Job) -> str:
    """Returns the ``system_fingerprint``, which differs between versions, models and settings."""
    return f"shadowkv-{__version__}-{job.engine.fingerprint}"


def token_ids_of(job: Job, piece: Piece) -> dict[str, Any]:
    """Returns a field with a piece's token ids if they are requested; otherwise no field."""
    return {"token_ids": list(piece.token_ids)} if job.request.return_token_ids else {}


def end_of(piece: Piece) -> dict[str, Any]:
    """Returns the field ``finish_reason`` and, at the end of a choice, ``stop_reason`` and ``matched_stop``."""
    end: dict[str, Any] = {"finish_reason": piece.finish_reason}
    if piece.finish_reason is None:
        return end
    return {**end, "stop_reason": piece.stop_reason, "matched_stop": piece.matched_stop}


def selections_of(piece: Piece) -> dict[str, Any]:
    """Returns a field with the tokens that each token of a piece attended to, if they are requested; otherwise no
    field."""
    if piece.selections is None:
        return {}
    return {"selections": [None if selection is None else asdict(selection) for selection in piece.selections]}


class Completions(Choices):
    """``/v1/completions``, which continues texts."""

    url = "/v1/completions"
    request_type: ClassVar[type[TextRequest]] = CompletionRequest
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def sizes(self, request: CompletionRequest) -> list[int]:
        return [len(prompt) for prompt in request.prompt]

    def prompts(self, request: CompletionRequest, limit: int) -> list[list[int]]:
        for prompt in request.prompt:
            if not isinstance(prompt, str):
                check_prompt(self.tokenizer, prompt, limit, "prompt")
        special = request.add_special_tokens is not False
        return [
            encode(self.tokenizer, prompt, limit, "prompt", special) if isinstance(prompt, str) else prompt.tolist()
            for prompt in request.prompt
        ]

    def echo(self, request: CompletionRequest, prompts: list[list[int]]) -> list[str] | None:
        if not request.echo:
            return None
        is_cut = request.truncate_prompt_tokens is not None
        pairs = zip(request.prompt, prompts, strict=True)
        return [
            text
            if isinstance(text, str) and not is_cut
            else self.tokenizer.decode(ids, skip_special_tokens=isinstance(text, str))
            for text, ids in pairs
        ]

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        scores = job.prompt_scores.get(piece.index) if job.request.prompt_logprobs is not None else None
        prompt = job.choices[piece.index].prompt_token_ids if job.request.return_token_ids else None
        return {
            **self._part(job, piece),
            "token_ids": None,
            **token_ids_of(job, piece),
            "prompt_logprobs": None if scores is None else prompt_logprobs(self.tokenizer, scores),
            "prompt_token_ids": prompt,
        }

    def delta(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        with_prompt = piece.first and job.request.return_token_ids and piece.prompt_progress is None
        prompt = {"prompt_token_ids": job.choices[piece.index].prompt_token_ids} if with_prompt else {}
        return [{**self._part(job, piece), **token_ids_of(job, piece), **prompt}]

    def _part(self, job: Job, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = completion_logprobs(self.tokenizer, piece.logprobs, piece.offset, self.as_ids(job))
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            **end_of(piece),
            **selections_of(piece),
        }


class ChatCompletions(Chat, Choices):
    """``/v1/chat/completions``."""

    url = "/v1/chat/completions"
    request_type: ClassVar[type[ChatRequest]] = ChatRequest
    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    names = MappingProxyType({"logprobs": "top_logprobs"})

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        request = _chat(job)
        text = request.echoed + piece.text
        message: dict[str, Any] = {"role": "assistant", "content": text, **NO_PARTS}
        if piece.thought:
            message |= {"content": text or None, **_thoughts(request, piece)}
        if piece.calls:
            message |= {"content": text or None, "tool_calls": [_call(part) for part in piece.calls]}
        return {**self._with(job, "message", message, piece), "token_ids": None, **token_ids_of(job, piece)}

    def about(self, job: Job) -> dict[str, Any]:
        request, scores = _chat(job), job.prompt_scores.get(0)
        names = () if request.stream else ("prompt_logprobs", "prompt_token_ids")
        whole: dict[str, Any] = dict.fromkeys(names)
        if request.prompt_logprobs is not None and scores is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self.tokenizer, scores)
        if request.return_token_ids:
            whole["prompt_token_ids"] = job.choices[0].prompt_token_ids
        if request.verbose:
            prompt = self.tokenizer.decode(job.choices[0].prompt_token_ids, skip_special_tokens=False)
            whole["__verbose"] = {"prompt": prompt}
        return whole

    def delta(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        chunks, request = [], _chat(job)
        if piece.first:
            for begun in ("", request.echoed)[: 2 if request.echoed else 1]:
                chunks.append(self._with(job, "delta", {"role": "assistant", "content": begun}, Piece(piece.index)))
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.thought:
            delta |= _thoughts(request, piece)
        if piece.calls:
            delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in piece.calls]
        chunks.append({**self._with(job, "delta", delta, piece), **token_ids_of(job, piece)})
        return chunks

    def _with(self, job: Job, key: str, value: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = chat_logprobs(self.tokenizer, piece.logprobs, self.as_ids(job))
        return {
            "index": piece.index,
            key: value,
            "logprobs": logprobs,
            **end_of(piece),
            **selections_of(piece),
        }


def _chat(job: Job) -> ChatRequest:
    assert isinstance(job.request, ChatRequest)
    return job.request


def _thoughts(request: ChatRequest, piece: Piece) -> dict[str, str]:
    """Returns a piece's reasoning, under DeepSeek's name and vLLM's. If the request excludes reasoning, returns no
    field."""
    return {"reasoning_content": piece.thought, "reasoning": piece.thought} if request.include_reasoning else {}


def _few_messages(value: Any) -> Any:
    if isinstance(value, list):
        at_most(MAX_MESSAGES, "messages", sum(len(chat) for chat in value if isinstance(chat, list)))
    return value


class ChatBatchRequest(ChatRequest):
    """Body of ``/v1/chat/completions/batch``: like that of a chat, but ``messages`` is a list of conversations."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[Turns, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        BeforeValidator(_few_messages),
    ]

    @model_validator(mode="after")
    def _check_batch(self) -> ChatBatchRequest:
        at_most(MAX_TEXT_CHARS, "characters", sum(chat.characters for chat in self.chats))
        absent = {name: not getattr(self, name) for name in ("stream", "tools", "echo")}
        one_prompt = {"kv_transfer_params.prompt_token_ids": self.remote_prompt is None}
        for name, fine in {"n": self.n == 1, **absent, **one_prompt}.items():
            if not fine:
                reason = "each conversation of a batch gets one choice, without streaming and tools"
                raise refusal(name, f"{name} is not supported here: {reason}")
        return self

    def _check_continued(self) -> None:
        for chat in self.chats:
            ChatRequest._check_continued(chat)

    @property
    def chats(self) -> list[ChatRequest]:
        """One request for each conversation. All have this request's other parameters."""
        others = {name: getattr(self, name) for name in ChatRequest.model_fields if name != "messages"}
        return [
            ChatRequest.model_construct(self.model_fields_set, messages=chat, **others)  # already validated with self
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
    """Returns a tool call in the API's form. The later parts of a streamed call have only arguments."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
