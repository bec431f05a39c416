"""Endpoints that generate text. A subclass of ``Endpoint`` makes one API's prompts and answers. ``Responder`` does the
work that all endpoints share: it makes a job for the engine from a checked body, and a response from the job."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import Request, Response

from shadowkv.engine.request import RequestError
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.errors import TOO_LONG, DeadlineExceeded, as_api_error
from shadowkv.serve.http.metrics import Metrics
from shadowkv.serve.http.owners import current_tenant, prompt_owner
from shadowkv.serve.http.replies import Events, EventStream, encode_json, reply
from shadowkv.serve.http.request_record import current_record
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.converted import Converted
from shadowkv.serve.openai.jobs import Job
from shadowkv.serve.openai.protocol import GenerationRequest, TextRequest
from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.tokenization import in_turn, tokenize_limit
from shadowkv.serve.text.tool_parser import ToolParser
from shadowkv.wording import counted

if TYPE_CHECKING:
    from shadowkv.engine.process.client import ClientRequest, EngineClient
    from shadowkv.models.tokenization.tokenizer import Tokenizer

LOAD_ASKED, LOAD_REPORTED = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""Header with which a request asks for the server's load, and header with which the response reports it, as in vLLM.
They are for load balancers."""


class Endpoint(ABC):
    """One API endpoint that generates text. Instances hold only the tokenizer and the settings of parsers.

    Args:
        tokenizer: the served model's tokenizer.
        settings: the server's settings, which name the parsers of tool calls and reasoning.

    Attributes:
        url: the endpoint's path.
        request_type: class of the bodies.
        id_prefix: prefix of the answers' ids.
        names: maps parameters of ``GenerationRequest`` to their names in this API, where these differ.
    """

    url: ClassVar[str]
    request_type: ClassVar[type[TextRequest]]
    id_prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings | None = None) -> None:
        self.tokenizer, self.settings = tokenizer, settings or ServerSettings()
        self.tool_format = self.settings.tool_format(tokenizer.chat_template)

    def request(self, body: TextRequest) -> GenerationRequest:
        """Returns a body as a completion or a chat, to which bodies of other APIs are converted."""
        request = body.generation if isinstance(body, Converted) else body
        assert isinstance(request, GenerationRequest)
        return request

    def new_id(self, body: Any, request_id: str | None) -> str:
        """Returns the id of an answer: the endpoint's prefix and ``request_id``, or a random id if that is None."""
        return f"{self.id_prefix}{request_id or uuid.uuid4().hex}"

    @abstractmethod
    def sizes(self, request: Any) -> list[int]:
        """Returns the size of every prompt in characters or token ids, before any processing."""

    @abstractmethod
    def prompts(self, request: Any, limit: int) -> list[list[int]]:
        """Returns the token ids of every prompt. Raises ApiError for a prompt with many more tokens than ``limit``. A
        prompt that is slightly longer than ``limit`` may pass."""

    def opening(self, request: Any, prompt: list[int]) -> list[int]:
        """Returns token ids to append to a prompt. They are a beginning of the answer that the model expects, but that
        it cannot write itself because the grammar does not allow it."""
        return []

    def predicted(self, request: Any) -> str:
        """Returns text that the answers may contain. Drafted tokens can be taken from it."""
        return ""

    def echo(self, request: Any, prompts: list[list[int]]) -> list[str] | None:
        """Returns the text with which each prompt's answers begin, if the request asks for an echo; otherwise None."""
        return None

    def tool_parser(self, request: Any) -> ToolParser | None:
        """Returns a parser of tool calls in a choice's text; None if no calls are parsed."""
        return None

    def reasoning_parser(self, request: Any, prompt: list[int]) -> ReasoningParser | None:
        """Returns a parser of reasoning in a choice's text; None if reasoning is not separated from the text."""
        return None

    def reads_special_tokens(self, request: Any) -> bool:
        """Whether the parsers need the special tokens in a choice's text."""
        return False

    @abstractmethod
    async def answer(self, job: Job) -> dict[str, Any]:
        """Returns the whole answer. Raises ApiError or EngineDead."""

    @abstractmethod
    def stream(self, job: Job) -> Events:
        """Returns the answer as a stream."""


@dataclass(frozen=True)
class Responder:
    """Answers requests within the server's limits, and aborts them when the client disconnects.

    Attributes:
        engines: maps the model names that clients use to engines.
        served_name: name of the model that answers if a request names no model.
        metrics: the metrics, in which only requests to the model ``served_name`` are counted.
    """

    engines: Mapping[str, EngineClient]
    served_name: str
    settings: ServerSettings
    metrics: Metrics

    async def __call__(self, endpoint: Endpoint, body: TextRequest, request: Request) -> Response:
        """Returns the response to a request: the whole answer, a stream, or an error."""

        async def answer() -> Response:
            job = await self.job(endpoint, body)
            if body.stream:
                return EventStream(endpoint.stream(job), self.settings.keep_alive_interval)
            # Log-probabilities of a long prompt take megabytes. The json module would encode them ten times slower.
            content = encode_json(await endpoint.answer(job))
            return Response(content, headers=await load_report(request, job.engine), media_type="application/json")

        return await reply(request, answer)

    async def job(self, endpoint: Endpoint, body: TextRequest) -> Job:
        """Returns the request's job, which has not started yet. Raises what ``prepare`` raises."""
        seconds = self.settings.request_timeout
        name = body.model or self.served_name
        if name not in self.engines:
            name = self.served_name
        deadline = time.monotonic() + seconds if seconds else None
        job = await prepare(self.engines[name], endpoint, body, name, deadline)
        job.metrics = self.metrics if name == self.served_name else None
        return job


async def load_report(request: Request, engine: EngineClient) -> dict[str, str]:
    """Returns the load as a header for load balancers (Open Request Cost Aggregation, ORCA) if the request asks for it
    in the format ``TEXT`` or ``JSON``, and no header otherwise. Raises EngineDead."""
    kind = request.headers.get(LOAD_ASKED, "").upper()
    if kind not in ("TEXT", "JSON"):
        return {}
    stats = await engine.stats()
    figures = {"num_requests_running": stats.running, "num_requests_waiting": stats.waiting}
    if kind == "JSON":
        return {LOAD_REPORTED: f"JSON {json.dumps({'named_metrics': figures})}"}
    return {LOAD_REPORTED: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}


def check_model(requested: str | None, model: str) -> None:
    """Raises ApiError if the request names a model other than ``model``."""
    if requested not in (None, model):
        message = f"the model {requested!r} does not exist; this server has {model!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


async def prepare(
    engine: EngineClient, endpoint: Endpoint, body: TextRequest, model: str, deadline: float | None = None
) -> Job:
    """Returns the request's job, which has not started yet. ``deadline`` is a time of ``time.monotonic``, in seconds.
    Raises ApiError, EngineDead, and DeadlineExceeded if the request's schema is not compiled by ``deadline``."""
    check_model(body.model, model)
    try:
        job = await _prepare(engine, endpoint, body, model, deadline)
    except (ApiError, RequestError) as error:
        raise as_api_error(error).renamed(endpoint.names) from error
    job.deadline = deadline
    return job


async def _prepare(
    engine: EngineClient, endpoint: Endpoint, body: TextRequest, model: str, deadline: float | None
) -> Job:
    request = endpoint.request(body)
    if not engine.is_alive:
        raise engine.end()
    sizes = endpoint.sizes(request)
    if len(sizes) * request.n > engine.max_queued_seqs:
        counts = (
            f"{counted(len(sizes), 'prompt')} with n={request.n} make {counted(len(sizes) * request.n, 'sequence')}"
        )
        text = f"{counts}, but this server queues {engine.max_queued_seqs} at most (--max-queued-seqs)"
        raise ApiError(text, param="prompt" if len(sizes) > 1 else "n")
    if body.priority and engine.scheduling_policy != "priority":
        text = f"priority={body.priority} needs a server with --scheduling-policy priority, this one has"
        raise ApiError(f"{text} {engine.scheduling_policy}", param="priority")
    if request.return_quality and not engine.quality_meter:
        raise ApiError("return_quality=true needs a server with --quality-meter", param="return_quality")
    parsers = [endpoint.tool_parser(request) for _ in range(len(sizes) * request.n)]
    if request.output_schema is not None:
        try:
            compiling = engine.compile_grammar(request.output_schema, request.on_one_line, current_tenant())
            await asyncio.wait_for(compiling, None if deadline is None else deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise DeadlineExceeded(TOO_LONG) from None
        except RequestError as error:
            if not request.calls_are_forced:
                raise
            refusal = as_api_error(error)
            raise ApiError(
                f"tools: {refusal.message}", status=refusal.status, param="tools", code=refusal.code
            ) from error

    record = current_record()
    owner, tenant = prompt_owner(), current_tenant()
    name = endpoint.new_id(body, request.request_id or (None if record is None else record.id))

    def encode() -> Job:
        is_cut = request.truncate_prompt_tokens is not None
        limit = tokenize_limit(engine.max_model_len) if is_cut else engine.max_model_len
        lengths = engine.max_model_len, engine.default_max_tokens
        prompts = [request.truncated(prompt, *lengths) for prompt in endpoint.prompts(request, limit)]
        for prompt in prompts:
            prompt.extend(endpoint.opening(request, prompt))
        own: dict[str, Any] = {
            "skip_special_tokens": request.skip_special_tokens and not endpoint.reads_special_tokens(request)
        }
        if engine.drafts and (predicted := endpoint.predicted(request)):
            tokens = endpoint.tokenizer.encode(predicted, add_special_tokens=False)
            own["predicted_token_ids"] = tuple(tokens[: engine.max_model_len])
        choices = [
            engine_request(engine, prompt, replace(params, **own), owner, tenant, body.priority)
            for prompt in prompts
            for params in request.sampling(engine.sampling_defaults, engine.max_model_len - len(prompt))
        ]
        reasoning = [endpoint.reasoning_parser(request, prompt) for prompt in prompts for _ in range(request.n)]
        echo = endpoint.echo(request, prompts)
        return Job(engine, endpoint.tokenizer, name, request, body, model, choices, reasoning, parsers, echo)

    job = await in_turn(current_tenant(), sum(sizes), encode)
    for choice in job.choices:
        choice.log_id = job.id if record is None else record.id
    if record is not None:
        record.generation = job
    return job


def engine_request(
    engine: EngineClient,
    prompt: list[int],
    params: SamplingParams,
    owner: str | None = None,
    tenant: str = "",
    priority: int = 0,
) -> ClientRequest:
    """Makes a request to the engine. The request is scheduled as one of ``tenant``, and shares cached prompts only with
    requests of the same ``owner``. Raises ApiError if the engine could never serve the request."""
    if owner is not None:
        params = replace(params, cache_salt=f"{owner}/{params.cache_salt or ''}")
    try:
        return engine.request(prompt, params, tenant, priority)
    except RequestError as error:
        too_long = len(prompt) + (1 if params.max_tokens is None else params.max_tokens) > engine.max_model_len
        if not too_long:
            raise ApiError(str(error), param=error.param) from error
        counts = {"n_prompt_tokens": len(prompt), "n_ctx": engine.max_model_len}
        raise ApiError(str(error), param=error.param, code="context_length_exceeded", counts=counts) from error
