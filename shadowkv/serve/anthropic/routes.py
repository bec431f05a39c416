"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from shadowkv.serve.anthropic.answers import MessagesAnswer, MessagesError, TokenCount
from shadowkv.serve.anthropic.endpoint import Messages
from shadowkv.serve.anthropic.protocol import MessagesRequest, Prompt
from shadowkv.serve.endpoint import Responder, check_model
from shadowkv.serve.routing import EVENT_STREAM, FOR_EVERY_BODY, FOR_EVERY_TEXT, BodyRoute, responses
from shadowkv.serve.settings import ServerSettings
from shadowkv.serve.tokenization import in_turn, tokenize_limit

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def messages_routes(engine: AsyncEngine, settings: ServerSettings, respond: Responder) -> APIRouter:
    """The routes."""
    router, endpoint = APIRouter(route_class=BodyRoute), Messages(engine.tokenizer, settings)

    @router.post(
        Messages.url,
        response_model=None,
        responses=responses(MessagesAnswer, *FOR_EVERY_TEXT, text=EVENT_STREAM, error=MessagesError),
    )
    async def post_messages(body: MessagesRequest, request: Request) -> Response:
        return await respond(endpoint, body, request)

    @router.post(
        f"{Messages.url}/count_tokens",
        response_model=None,
        responses=responses(TokenCount, *FOR_EVERY_BODY, error=MessagesError),
    )
    async def post_count_tokens(body: Prompt) -> Response:
        check_model(body.model, respond.served_name)
        limit = tokenize_limit(engine.max_model_len)
        (prompt,) = await in_turn(sum(endpoint.sizes(body.chat)), lambda: endpoint.prompts(body.chat, limit))
        return JSONResponse({"input_tokens": len(prompt)})

    return router
