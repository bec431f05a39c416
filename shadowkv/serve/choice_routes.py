"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from shadowkv.serve.answers import ChatCompletion, Completion
from shadowkv.serve.completions import ChatCompletions, Completions
from shadowkv.serve.endpoint import Responder
from shadowkv.serve.protocol import ChatRequest, CompletionRequest
from shadowkv.serve.routing import EVENT_STREAM, FOR_EVERY_TEXT, BodyRoute, responses
from shadowkv.serve.settings import ServerSettings

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def choice_routes(engine: AsyncEngine, settings: ServerSettings, respond: Responder) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=BodyRoute)
    completions, chats = Completions(engine.tokenizer), ChatCompletions(engine.tokenizer, settings)

    @router.post(
        Completions.url, response_model=None, responses=responses(Completion, *FOR_EVERY_TEXT, text=EVENT_STREAM)
    )
    async def post_completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(completions, body, request)

    @router.post(
        ChatCompletions.url,
        response_model=None,
        responses=responses(ChatCompletion, *FOR_EVERY_TEXT, text=EVENT_STREAM),
    )
    async def post_chat_completions(body: ChatRequest, request: Request) -> Response:
        return await respond(chats, body, request)

    return router
