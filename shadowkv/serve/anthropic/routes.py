"""Routes ``/v1/messages``, a chat whose answer is a list of blocks, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from shadowkv.serve.anthropic.answers import MessagesAnswer, MessagesError, TokenCount
from shadowkv.serve.anthropic.output import PING, MessageOutput
from shadowkv.serve.anthropic.protocol import NAMES, MessagesRequest, Prompt
from shadowkv.serve.bodies.api_error import MESSAGES_URL
from shadowkv.serve.http.replies import encoded_event
from shadowkv.serve.http.routing import EVENT_STREAM, FOR_EVERY_BODY, FOR_EVERY_TEXT, BodyRoute, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.chats import EventChat, count_tokens
from shadowkv.serve.openai.endpoint import Responder, check_model
from shadowkv.serve.openai.jobs import Job
from shadowkv.serve.text.tokenization import tokenize_limit

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient


class Messages(EventChat):
    """The endpoint ``/v1/messages``."""

    url = MESSAGES_URL
    request_type = MessagesRequest
    id_prefix = "msg_"
    names = NAMES
    sign_of_life = encoded_event(PING, named=True)

    def output(self, job: Job) -> MessageOutput:
        return MessageOutput(job)


def messages_routes(engine: EngineClient, settings: ServerSettings, respond: Responder) -> APIRouter:
    """Returns the two routes."""
    router, endpoint = APIRouter(route_class=BodyRoute), Messages(engine.tokenizer, settings)

    @router.post(Messages.url, **documented(MessagesAnswer, *FOR_EVERY_TEXT, text=EVENT_STREAM, error=MessagesError))
    async def post_messages(body: MessagesRequest, request: Request) -> Response:
        return await respond(endpoint, body, request)

    @router.post(f"{Messages.url}/count_tokens", **documented(TokenCount, *FOR_EVERY_BODY, error=MessagesError))
    async def post_count_tokens(body: Prompt, request: Request) -> Response:
        check_model(body.model, respond.served_name)
        return await count_tokens(endpoint, body.generation, tokenize_limit(engine.max_model_len), request)

    return router
