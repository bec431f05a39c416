"""``/cache/save`` and ``/cache/restore``: prompts that are kept on the disk by name, and brought back from there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.prefix_cache.protocol import Saved
from shadowkv.serve.answers import RestoredPrompt, SavedPrompt
from shadowkv.serve.body_route import BodyRoute
from shadowkv.serve.cache_protocol import RestoreRequest, SaveRequest
from shadowkv.serve.chats import ChatCompletions
from shadowkv.serve.completions import Completions
from shadowkv.serve.disconnect import CLIENT_CLOSED_REQUEST, unless_disconnected
from shadowkv.serve.endpoints import Endpoint
from shadowkv.serve.errors import as_api_error, error_response
from shadowkv.serve.merge import DeadlineExceeded
from shadowkv.serve.metrics import Metrics
from shadowkv.serve.openapi import FOR_EVERY_BODY, responses
from shadowkv.serve.prepare import check_model, engine_request
from shadowkv.serve.settings import ServerSettings
from shadowkv.serve.tokenization import in_turn

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def cache_routes(engine: AsyncEngine, served_name: str, settings: ServerSettings, metrics: Metrics) -> APIRouter:
    """The routes; their work is done off the event loop, and abandoned when the client hangs up."""
    router, statuses = APIRouter(route_class=BodyRoute), (*FOR_EVERY_BODY, 409, 504)
    completions, chat_completions = Completions(engine.tokenizer), ChatCompletions(engine.tokenizer)

    async def save(body: SaveRequest) -> Saved:
        endpoint: Endpoint = completions if body.messages is None else chat_completions
        params = SamplingParams(max_tokens=1, temperature=0.0, cache_salt=body.cache_salt)

        def encode() -> list[int]:
            return endpoint.prompts(body, engine.max_model_len)[0]

        prompt = await in_turn(sum(endpoint.sizes(body)), encode)
        request = await in_turn(len(prompt), lambda: engine_request(engine, prompt, params))
        return await engine.save(body.name, request, metrics.watch)

    async def respond(body: RestoreRequest, request: Request, work: Callable[[], Awaitable[Saved]]) -> Response:
        async def answer() -> Response:
            began = time.monotonic()
            try:
                check_model(body.model, served_name)
                saved = await _within(settings.request_timeout, work())
            except Exception as error:
                return error_response(as_api_error(error), request.url.path)
            seconds = time.monotonic() - began
            return JSONResponse({"name": body.name, "tokens": saved.tokens, "bytes": saved.nbytes, "seconds": seconds})

        return await unless_disconnected(request.receive, answer()) or Response(status_code=CLIENT_CLOSED_REQUEST)

    @router.post("/cache/save", response_model=None, responses=responses(SavedPrompt, *statuses))
    async def post_save(body: SaveRequest, request: Request) -> Response:
        return await respond(body, request, lambda: save(body))

    @router.post("/cache/restore", response_model=None, responses=responses(RestoredPrompt, *statuses))
    async def post_restore(body: RestoreRequest, request: Request) -> Response:
        return await respond(body, request, lambda: engine.restore(body.name))

    return router


async def _within(seconds: float, work: Awaitable[Saved]) -> Saved:
    """What ``work`` returns; raises DeadlineExceeded after ``seconds``, if not 0."""
    try:
        return await asyncio.wait_for(work, seconds or None)
    except asyncio.TimeoutError:
        raise DeadlineExceeded("the request took longer than this server allows") from None
