"""Routes of ``/v1/messages/batches``, as in Anthropic's API: batches of messages that the server answers beside its
other requests, within a day."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import AfterValidator, Field

from shadowkv.serve.anthropic.answers import MessagesError
from shadowkv.serve.batch.queries import listed, of_record
from shadowkv.serve.batch.routes import cancel
from shadowkv.serve.batch.runner import BATCH_SECONDS, REQUESTS, RESULTS, new_batch
from shadowkv.serve.bodies.api_error import MESSAGES_URL, ApiError
from shadowkv.serve.bodies.body import Body, wrong
from shadowkv.serve.http.owners import owner_of
from shadowkv.serve.http.routing import FOR_EVERY_BODY, FOR_EVERY_RECORD, Answer, BodyRoute, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.storage.store import Record, RecordStore, storage_failed

URL = f"{MESSAGES_URL}/batches"
MAX_REQUESTS = 10_000
"""Maximum number of requests in a batch (Anthropic: 100,000). The maximum size of a body limits the number, too."""


class MessageCounts(Answer):
    """Number of requests by outcome."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Answer):
    """A batch; times are in RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchList(Answer):
    """Batches, newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(Answer):
    """Answer of ``DELETE``."""

    id: str
    type: Literal["message_batch_deleted"]


class MessageRequest(Body):
    """One request of a batch: ``params`` is a body of ``/v1/messages``, which is checked when the batch runs."""

    custom_id: Annotated[str, Field(min_length=1, max_length=64)]
    params: dict[str, Any]


def _different(requests: list[MessageRequest]) -> list[MessageRequest]:
    if len({request.custom_id for request in requests}) < len(requests):
        raise wrong("custom_ids must differ")
    return requests


class MessageBatchRequest(Body):
    """Body of ``/v1/messages/batches``."""

    requests: Annotated[
        list[MessageRequest],
        Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True),
        AfterValidator(_different),
    ]


def message_batch_routes(settings: ServerSettings, store: RecordStore) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=BodyRoute)

    def answers(answer: type[Answer] | None, *statuses: int) -> dict[str, Any]:
        return documented(answer, *statuses, error=MessagesError)

    @router.post(URL, **answers(MessageBatch, *FOR_EVERY_BODY))
    async def post_batch(body: MessageBatchRequest, request: Request) -> dict[str, Any]:
        record = await asyncio.to_thread(_keep, store, owner_of(request), body.requests)
        return _shown(record, request)

    @router.get(URL, **answers(MessageBatchList, 400, *FOR_EVERY_RECORD))
    async def get_batches(request: Request) -> dict[str, Any]:
        one = partial(_shown, request=request)
        page = await listed(request, store, "message_batch", one, "after_id", "before_id")
        return {name: value for name, value in page.items() if name != "object"}

    @router.get(f"{URL}/{{id}}", **answers(MessageBatch, 400, *FOR_EVERY_RECORD))
    async def get_batch(id: str, request: Request) -> dict[str, Any]:
        return _shown(await of_record(request, store, "message_batch", id), request)

    @router.get(f"{URL}/{{id}}/results", **answers(None, 400, *FOR_EVERY_RECORD))
    async def get_results(id: str, request: Request) -> Response:
        record = await _ended(request, store, id)
        path = store.work_folder(id) / RESULTS
        if not path.exists():
            raise ApiError(f"this batch has no results: {record.value['error']['message']}", code="batch_failed")
        return FileResponse(path, media_type="application/x-jsonl")

    @router.post(f"{URL}/{{id}}/cancel", **answers(MessageBatch, 400, *FOR_EVERY_RECORD))
    async def cancel_batch(id: str, request: Request) -> dict[str, Any]:
        record = await of_record(request, store, "message_batch", id)
        return _shown(await asyncio.to_thread(store.change, record, cancel), request)

    @router.delete(f"{URL}/{{id}}", **answers(DeletedMessageBatch, 400, *FOR_EVERY_RECORD))
    async def delete_batch(id: str, request: Request) -> dict[str, Any]:
        await _ended(request, store, id)
        await asyncio.to_thread(store.remove, owner_of(request), "message_batch", id)
        return {"id": id, "type": "message_batch_deleted"}

    return router


async def _ended(request: Request, store: RecordStore, id: str) -> Record:
    record = await of_record(request, store, "message_batch", id)
    if record.value["ended_at"] is None:
        raise ApiError("this batch has not ended: wait for it, or cancel it", code="not_ended")
    return record


def _keep(store: RecordStore, owner: str, requests: list[MessageRequest]) -> Record:
    """Stores a batch, and its requests as a batch file."""
    id = f"msgbatch_{secrets.token_hex(16)}"
    lines = [
        msgspec.json.encode(
            {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_URL, "body": request.params}
        )
        for request in requests
    ]
    size = sum(map(len, lines)) + len(lines)
    value = new_batch(endpoint=MESSAGES_URL, counts={**new_batch()["counts"], "total": len(lines)})
    folder = store.work_folder(id)
    try:
        folder.mkdir(mode=0o700, parents=True)
        (folder / REQUESTS).write_bytes(b"\n".join(lines) + b"\n")
        return store.put(owner, "message_batch", id, value, content=size, is_open=True)
    except (ApiError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise error if isinstance(error, ApiError) else storage_failed(folder, error) from error


def _shown(record: Record, request: Request) -> dict[str, Any]:
    value, counts = record.value, record.value["counts"]
    has_ended = value["ended_at"] is not None
    status = "ended" if has_ended else "canceling" if value["status"] == "cancelling" else "in_progress"
    done = counts["completed"] + counts["failed"] + counts["canceled"] + counts["expired"]
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if has_ended else max(0, counts["total"] - done),
            "succeeded": counts["completed"],
            "errored": counts["failed"],
            "canceled": counts["canceled"],
            "expired": counts["expired"],
        },
        "created_at": _time(record.created),
        "expires_at": _time(record.created + BATCH_SECONDS),
        "ended_at": _time(value["ended_at"]),
        "cancel_initiated_at": _time(value["cancelling_at"]),
        "archived_at": None,
        "results_url": f"{request.base_url}v1/messages/batches/{record.id}/results" if has_ended else None,
    }


def _time(seconds: float | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat()
