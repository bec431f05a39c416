"""The HTTP API: completions, chat completions, models and health, as in the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shadowkv.serve.disconnect import EventStream, unless_disconnected
from shadowkv.serve.endpoints import ChatCompletions, Completions, Endpoint
from shadowkv.serve.errors import ApiError, as_api_error, from_validation
from shadowkv.serve.jobs import Job, answer, chunks, prepare
from shadowkv.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499


def build_app(engine: AsyncEngine, served_name: str) -> FastAPI:
    """The application; ``served_name`` is the model's name to clients."""
    app = FastAPI(title="shadowkv", docs_url="/docs", redoc_url=None)
    completions, chat_completions = Completions(engine.tokenizer), ChatCompletions(engine.tokenizer)
    model = {
        "id": served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "shadowkv",
        "max_model_len": engine.max_model_len,
    }

    async def respond(endpoint: Endpoint, body: GenerationRequest, request: Request) -> Response:
        async def work() -> Response:
            try:
                job = await prepare(engine, endpoint, body, served_name)
                return EventStream(events(job)) if body.stream else JSONResponse(await answer(job))
            except Exception as error:
                return _error_response(as_api_error(error))

        return await unless_disconnected(request.receive, work()) or Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.post(Completions.url, response_model=None)
    async def post_completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(completions, body, request)

    @app.post(ChatCompletions.url, response_model=None)
    async def post_chat_completions(body: ChatRequest, request: Request) -> Response:
        return await respond(chat_completions, body, request)

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        if name != served_name:
            raise ApiError(f"the model {name!r} does not exist", status=404, param="model", code="model_not_found")
        return model

    @app.get("/health", response_model=None)
    async def get_health() -> Response:
        alive = engine.is_alive
        return JSONResponse({"status": "ok" if alive else "dead"}, status_code=200 if alive else 503)

    _handle_errors(app)
    return app


async def events(job: Job) -> AsyncGenerator[str, None]:
    """The answer as server-sent events; an error is the last but one, since the status has long been sent."""
    try:
        async with aclosing(chunks(job)) as stream:
            async for chunk in stream:
                yield _event(chunk)
    except Exception as error:
        yield _event(as_api_error(error).body())
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        # Refused on purpose: a web page may post any other type to a local server without the browser asking first.
        if "json" not in request.headers.get("content-type", ""):
            return _error_response(ApiError("the request needs the header Content-Type: application/json"))
        found = error.errors()
        if found[0]["type"] == "json_invalid":
            return _error_response(ApiError(f"the body is not valid JSON: {found[0]['ctx']['error']}"))
        return _error_response(from_validation(found))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _error_response(ApiError(message, status=error.status_code))

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return _error_response(error)
