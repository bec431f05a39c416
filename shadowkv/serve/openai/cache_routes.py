"""Routes ``/cache/save``, which saves a prompt's cached keys and values to disk under a name, and ``/cache/restore``,
which loads them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.prefix_cache.protocol import Saved, SaveError
from shadowkv.serve.http.errors import TOO_LONG, DeadlineExceeded
from shadowkv.serve.http.metrics import Metrics
from shadowkv.serve.http.owners import current_tenant, prompt_owner
from shadowkv.serve.http.replies import reply
from shadowkv.serve.http.routing import FOR_EVERY_BODY, BodyRoute, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.answers import RestoredPrompt, SavedPrompt
from shadowkv.serve.openai.completions import ChatCompletions, Completions
from shadowkv.serve.openai.endpoint import Endpoint, check_model, engine_request
from shadowkv.serve.openai.protocol import RestoreRequest, SaveRequest
from shadowkv.serve.text.tokenization import in_turn

if TYPE_CHECKING:
    from shadowkv.engine.process.client import ClientRequest, EngineClient


def cache_routes(engine: EngineClient, served_name: str, settings: ServerSettings, metrics: Metrics) -> APIRouter:
    """Returns the routes. Their work does not block the event loop, and is abandoned when the client disconnects."""
    router, statuses = APIRouter(route_class=BodyRoute), (*FOR_EVERY_BODY, 409, 504)
    completions, chat_completions = Completions(engine.tokenizer), ChatCompletions(engine.tokenizer, settings)

    async def save(body: SaveRequest) -> Saved:
        settings.check_trust(body.chat_template)
        endpoint: Endpoint = completions if body.messages is None else chat_completions
        params = SamplingParams(max_tokens=1, temperature=0.0, cache_salt=body.cache_salt)

        owner, tenant = prompt_owner(), current_tenant()

        def encode() -> list[int]:
            return endpoint.prompts(body, engine.max_model_len)[0]

        def made() -> ClientRequest:
            return engine_request(engine, prompt, params, owner, tenant)

        prompt = await in_turn(tenant, sum(endpoint.sizes(body)), encode)
        request = await in_turn(tenant, len(prompt), made)
        return await engine.save(_own(body.name), request, metrics.observe)

    async def respond(body: RestoreRequest, request: Request, work: Callable[[], Awaitable[Saved]]) -> Response:
        async def answer() -> Response:
            began = time.monotonic()
            check_model(body.model, served_name)
            try:
                saved = await _within(settings.request_timeout, work())
            except SaveError as error:
                raise type(error)(str(error).replace(_own(body.name), body.name)) from error
            seconds = time.monotonic() - began
            return JSONResponse({"name": body.name, "tokens": saved.tokens, "bytes": saved.nbytes, "seconds": seconds})

        return await reply(request, answer)

    @router.post("/cache/save", **documented(SavedPrompt, *statuses))
    async def post_save(body: SaveRequest, request: Request) -> Response:
        return await respond(body, request, lambda: save(body))

    @router.post("/cache/restore", **documented(RestoredPrompt, *statuses))
    async def post_restore(body: RestoreRequest, request: Request) -> Response:
        return await respond(body, request, lambda: engine.restore(_own(body.name)))

    return router


def _own(name: str) -> str:
    """Returns the name under which a prompt is stored. It includes the prompt's owner, so that several owners can use
    the same ``name``."""
    owner = prompt_owner()
    return name if owner is None else f"{owner}.{name}"


async def _within(seconds: float, work: Awaitable[Saved]) -> Saved:
    """Returns the result of ``work``. Raises DeadlineExceeded after ``seconds``; 0 sets no limit."""
    try:
        return await asyncio.wait_for(work, seconds or None)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(TOO_LONG) from None
