"""Routes of ``/v1/responses``: one for chats, whose answer is a list of items, and others for stored responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse
from fastapi.responses import JSONResponse

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.owners import owner_of
from shadowkv.serve.http.replies import reply
from shadowkv.serve.http.routing import (
    EVENT_STREAM,
    FOR_EVERY_RECORD,
    FOR_EVERY_TEXT,
    BodyRoute,
    documented,
    read_request,
)
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.chats import EventChat
from shadowkv.serve.openai.endpoint import Responder
from shadowkv.serve.openai.jobs import Job
from shadowkv.serve.responses.answers import DeletedResponse, ItemList, Response
from shadowkv.serve.responses.background import Background
from shadowkv.serve.responses.history import History, input_items
from shadowkv.serve.responses.output import ResponseOutput
from shadowkv.serve.responses.protocol import NAMES, ResponsesRequest
from shadowkv.serve.storage.store import RecordStore

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer


class Responses(EventChat):
    """The endpoint ``/v1/responses``."""

    url = "/v1/responses"
    request_type = ResponsesRequest
    id_prefix = "resp_"
    names = NAMES

    def new_id(self, body: ResponsesRequest, request_id: str | None) -> str:
        # A client may use a request id again, and a later response must not replace a stored one.
        return super().new_id(body, request_id if body.keep is None else None)

    def output(self, job: Job) -> ResponseOutput:
        return ResponseOutput(job)


def responses_routes(
    tokenizer: Tokenizer, settings: ServerSettings, respond: Responder, store: RecordStore, background: Background
) -> APIRouter:
    """Returns the routes. Answers are stored in ``store`` if that is on. ``background`` generates the background
    responses."""
    router, endpoint = APIRouter(route_class=BodyRoute), Responses(tokenizer, settings)

    @router.post(Responses.url, **documented(Response, *FOR_EVERY_TEXT, text=EVENT_STREAM))
    async def post_responses(body: ResponsesRequest, request: Request) -> HTTPResponse:
        raw, previous = await request.body(), body.previous_response_id
        history = History(store, owner_of(request), settings.max_body_bytes)
        if previous is not None:
            whole = await asyncio.to_thread(history.continued, raw, previous)
            body = await read_request(request, whole, ResponsesRequest)
        if store.is_on:
            body.kept_by(partial(history.add, raw))
        if not body.background:
            return await respond(endpoint, body, request)
        if not store.is_on:
            text = "background needs stored responses, and this server stores nothing (--storage-mib 0)"
            raise ApiError(text, param="background", code="not_kept")

        async def begin() -> HTTPResponse:
            output = ResponseOutput(await respond.job(endpoint, body))
            items = await asyncio.to_thread(input_items, raw)
            return JSONResponse(await background.begin(owner_of(request), items, output))

        return await reply(request, begin)

    @router.get(f"{Responses.url}/{{id}}", **documented(Response, 400, *FOR_EVERY_RECORD))
    async def get_response(id: str, request: Request, stream: bool = False) -> dict[str, Any]:
        if stream:
            text = "stream=true is not supported for a stored response; leave it out"
            raise ApiError(text, param="stream")
        return await background.get(owner_of(request), id)

    @router.post(f"{Responses.url}/{{id}}/cancel", **documented(Response, 400, *FOR_EVERY_RECORD))
    async def post_cancel(id: str, request: Request) -> dict[str, Any]:
        return await background.cancel(owner_of(request), id)

    @router.get(f"{Responses.url}/{{id}}/input_items", **documented(ItemList, *FOR_EVERY_RECORD))
    async def get_input_items(id: str, request: Request, order: Literal["asc", "desc"] = "desc") -> dict[str, Any]:
        value: dict[str, Any] = (await asyncio.to_thread(store.get, owner_of(request), "response", id)).value
        items = [{"type": "message", "id": f"item_{number}", **item} for number, item in enumerate(value["input"])]
        items = items if order == "asc" else items[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return {"object": "list", "data": items, **ends, "has_more": False}

    @router.delete(f"{Responses.url}/{{id}}", **documented(DeletedResponse, *FOR_EVERY_RECORD))
    async def delete_response(id: str, request: Request) -> dict[str, Any]:
        await asyncio.to_thread(store.remove, owner_of(request), "response", id)
        return {"id": id, "object": "response.deleted", "deleted": True}

    return router
