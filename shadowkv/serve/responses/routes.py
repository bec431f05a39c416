"""``/v1/responses``: a chat whose answer is a list of items."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from shadowkv.serve.http.routing import EVENT_STREAM, FOR_EVERY_TEXT, BodyRoute, responses
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.chats import EventChat
from shadowkv.serve.openai.endpoint import Responder
from shadowkv.serve.openai.jobs import Job
from shadowkv.serve.responses.answers import Response
from shadowkv.serve.responses.output import ResponseOutput
from shadowkv.serve.responses.protocol import NAMES, ResponsesRequest

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient


class Responses(EventChat):
    """``/v1/responses``."""

    url = "/v1/responses"
    request_type = ResponsesRequest
    id_prefix = "resp"
    names = NAMES

    def output(self, job: Job) -> ResponseOutput:
        return ResponseOutput(job)


def responses_routes(engine: EngineClient, settings: ServerSettings, respond: Responder) -> APIRouter:
    """The route."""
    router, endpoint = APIRouter(route_class=BodyRoute), Responses(engine.tokenizer, settings)

    @router.post(Responses.url, response_model=None, responses=responses(Response, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_responses(body: ResponsesRequest, request: Request) -> HTTPResponse:
        return await respond(endpoint, body, request)

    return router
