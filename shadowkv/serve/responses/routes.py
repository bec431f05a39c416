"""``/v1/responses``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from shadowkv.serve.endpoint import Responder
from shadowkv.serve.responses.answers import Response
from shadowkv.serve.responses.endpoint import Responses
from shadowkv.serve.responses.protocol import ResponsesRequest
from shadowkv.serve.routing import EVENT_STREAM, FOR_EVERY_TEXT, BodyRoute, responses
from shadowkv.serve.settings import ServerSettings

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


def responses_routes(engine: AsyncEngine, settings: ServerSettings, respond: Responder) -> APIRouter:
    """The route."""
    router, endpoint = APIRouter(route_class=BodyRoute), Responses(engine.tokenizer, settings)

    @router.post(Responses.url, response_model=None, responses=responses(Response, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_responses(body: ResponsesRequest, request: Request) -> HTTPResponse:
        return await respond(endpoint, body, request)

    return router
