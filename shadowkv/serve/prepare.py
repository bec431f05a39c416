"""From a request to its job: it is validated, and turned into requests to the engine."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from shadowkv.engine.request import Request, RequestError
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.serve.api_error import ApiError
from shadowkv.serve.endpoints import Endpoint
from shadowkv.serve.errors import as_api_error
from shadowkv.serve.jobs import Job
from shadowkv.serve.protocol import Sampling
from shadowkv.serve.request_record import current_record
from shadowkv.serve.tokenization import in_turn
from shadowkv.wording import counted

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def check_model(asked: str | None, model: str) -> None:
    """Raises ApiError if the request names a model other than ``model``."""
    if asked not in (None, model):
        message = f"the model {asked!r} does not exist; this server has {model!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


async def prepare(engine: AsyncEngine, endpoint: Endpoint, body: Sampling, model: str) -> Job:
    """The request's job, not yet started; raises ApiError."""
    check_model(body.model, model)
    try:
        return await _prepare(engine, endpoint, body, model)
    except (ApiError, RequestError) as error:
        raise as_api_error(error).renamed(endpoint.names) from error


async def _prepare(engine: AsyncEngine, endpoint: Endpoint, body: Sampling, model: str) -> Job:
    request = endpoint.request(body)
    if not engine.is_alive:
        raise ApiError("the engine is not running", status=503, code="engine_dead")
    sizes = endpoint.sizes(request)
    if len(sizes) * request.n > engine.max_queued_seqs:
        counts = (
            f"{counted(len(sizes), 'prompt')} with n={request.n} make {counted(len(sizes) * request.n, 'sequence')}"
        )
        text = f"{counts}, but this server queues {engine.max_queued_seqs} at the most (--max-queued-seqs)"
        raise ApiError(text, param="prompt" if len(sizes) > 1 else "n")
    parsers = [endpoint.tool_parser(request) for _ in range(len(sizes) * request.n)]
    if request.output_schema is not None:
        try:
            await engine.compile_grammar(request.output_schema, request.calls_are_forced)
        except RequestError as error:
            if not request.calls_are_forced:
                raise
            raise ApiError(f"tools: {error}", param="tools") from error

    record = current_record()
    name = f"{endpoint.id_prefix}-{uuid.uuid4().hex if record is None else record.id}"

    def encode() -> Job:
        prompts = endpoint.prompts(request, engine.max_model_len)
        choices = [
            engine_request(engine, prompt, one)
            for prompt in prompts
            for one in request.sampling(engine.sampling_defaults, engine.max_model_len - len(prompt))
        ]
        reasoning = [endpoint.reasoning_parser(request, prompt) for prompt in prompts for _ in range(request.n)]
        echo = endpoint.echo(request, prompts)
        return Job(engine, endpoint.tokenizer, name, request, body, model, choices, reasoning, parsers, echo)

    job = await in_turn(sum(sizes), encode)
    if record is not None:
        record.generation = job
    return job


def engine_request(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Request:
    """A request to the engine; raises ApiError if it could never be served."""
    try:
        return engine.request(prompt, params)
    except RequestError as error:
        too_long = len(prompt) + (1 if params.max_tokens is None else params.max_tokens) > engine.max_model_len
        code = "context_length_exceeded" if too_long else None
        raise ApiError(str(error), param=error.param, code=code) from error
