"""From a request to its answer: the code that the HTTP server and the batch mode share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shadowkv.engine.request import RequestError, RequestOutput, TokenLogprobs
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.serve.endpoints import Endpoint, Piece
from shadowkv.serve.errors import ApiError
from shadowkv.serve.logprobs import scored_prompt
from shadowkv.serve.merge import merge
from shadowkv.serve.protocol import GenerationRequest

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine
    from shadowkv.serve.metrics import Metrics


@dataclass
class Job:
    """A request that was found good: every prompt with every choice's parameters is one request to the engine."""

    engine: AsyncEngine
    endpoint: Endpoint
    request: GenerationRequest
    model: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    echo: list[str] | None = None
    deadline: float | None = None
    metrics: Metrics | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.endpoint.id_prefix}-{uuid.uuid4().hex}"
        self.counts: dict[int, RequestOutput] = {}

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says of each choice; raises ApiError where one fails."""
        pairs = [(prompt, params) for prompt in self.prompts for params in self.params]
        streams = [self.engine.generate(*pair, request_id=f"{self.id}-{i}") for i, pair in enumerate(pairs)]
        if self.metrics is not None:
            streams = [self.metrics.watch(stream) for stream in streams]
        timeout = None if self.deadline is None else self.deadline - time.monotonic()
        async with aclosing(merge(streams, timeout)) as merged:
            async for index, output in merged:
                if output.finish_reason in ("error", "abort"):
                    status = 500 if output.finish_reason == "error" else 503
                    raise ApiError(output.error or "the request was aborted", status=status, code="generation_failed")
                first = index not in self.counts
                self.counts[index] = output
                yield index, self._with_prompt(index, output) if first else output

    def _with_prompt(self, index: int, output: RequestOutput) -> RequestOutput:
        """A choice's first output, with the prompt in front if it is to be echoed."""
        if self.echo is None:
            return output
        which = index // len(self.params)
        steps = scored_prompt(self.prompts[which], output.prompt_logprobs)
        return replace(output, text=self.echo[which] + output.text, logprobs=[*steps, *(output.logprobs or ())])

    def usage(self) -> dict[str, Any]:
        """Token counts so far; the choices of one prompt share its tokens."""
        prompts = [output for index, output in self.counts.items() if index % len(self.params) == 0]
        prompt = sum(output.prompt_tokens for output in prompts)
        completion = sum(output.completion_tokens for output in self.counts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
        }

    def head(self, kind: str) -> dict[str, Any]:
        """What every answer and every chunk begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def check_model(asked: str | None, model: str) -> None:
    """Raises ApiError if another model is asked for than ``model``."""
    if asked not in (None, model):
        message = f"the model {asked!r} does not exist; this server has {model!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


async def prepare(engine: AsyncEngine, endpoint: Endpoint, request: GenerationRequest, model: str) -> Job:
    """The request's job, nothing of it started; raises ApiError. Long prompts take seconds to tokenise: in a thread."""
    check_model(request.model, model)
    if not engine.is_alive:
        raise ApiError("the engine is not running", status=503, code="engine_dead")
    params = request.sampling()

    def encode() -> Job:
        prompts = endpoint.prompts(request)
        for prompt in prompts:
            _validate(engine, prompt, params[0])
        return Job(engine, endpoint, request, model, prompts, params, endpoint.echo(request, prompts))

    return await asyncio.to_thread(encode)


def _validate(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> None:
    if not prompt:
        raise ApiError("the prompt is empty", param="prompt")
    try:
        engine.validate(prompt, params)
    except RequestError as error:
        too_long = len(prompt) + (1 if params.max_tokens is None else params.max_tokens) > engine.max_model_len
        code = "context_length_exceeded" if too_long else None
        raise ApiError(str(error), param=error.param, code=code) from error


async def answer(job: Job) -> dict[str, Any]:
    """The whole answer; raises ApiError or EngineDead."""
    count, asked = len(job.prompts) * len(job.params), job.params[0].logprobs is not None
    texts: list[list[str]] = [[] for _ in range(count)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
    async with aclosing(job.outputs()) as outputs:
        async for index, output in outputs:
            texts[index].append(output.text)
            logprobs[index] += output.logprobs or ()

    def shape() -> list[dict[str, Any]]:
        return [
            job.endpoint.choice(
                Piece(index, "".join(texts[index]), logprobs[index] if asked else None, job.counts[index].finish_reason)
            )
            for index in range(count)
        ]

    # The log-probabilities of a long prompt take a while to write down.
    choices = await asyncio.to_thread(shape) if job.echo else shape()
    return {**job.head(job.endpoint.kind), "choices": choices, "usage": job.usage()}


async def chunks(job: Job) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as it comes; raises ApiError or EngineDead."""
    head = job.head(job.endpoint.chunk_kind) | ({"usage": None} if job.request.include_usage else {})
    asked = job.params[0].logprobs is not None
    offsets: dict[int, int] = {}
    async with aclosing(job.outputs()) as outputs:
        async for index, output in outputs:
            logprobs = (output.logprobs or []) if asked else None
            if not (output.text or logprobs or output.finish_reason):
                continue
            first, offset = index not in offsets, offsets.get(index, 0)
            offsets[index] = offset + job.endpoint.width(logprobs or [])
            piece = Piece(index, output.text, logprobs, output.finish_reason, first, offset)
            delta = job.endpoint.delta
            pieces = await asyncio.to_thread(delta, piece) if first and job.echo else delta(piece)
            for choice in pieces:
                yield {**head, "choices": [choice]}
    if job.request.include_usage:
        yield {**head, "choices": [], "usage": job.usage()}
