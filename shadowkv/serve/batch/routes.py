"""Routes of ``/v1/batches``, as in the OpenAI API: files of requests that the server answers beside its other requests,
within a day."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field

from shadowkv.serve.batch.lines import URLS
from shadowkv.serve.batch.queries import listed, of_record
from shadowkv.serve.batch.runner import BATCH_SECONDS, new_batch
from shadowkv.serve.bodies.body import Body, Name, wrong
from shadowkv.serve.http.owners import owner_of
from shadowkv.serve.http.routing import FOR_EVERY_BODY, FOR_EVERY_RECORD, Answer, BodyRoute, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.responses.protocol import Metadata
from shadowkv.serve.storage.store import Record, RecordStore

URL = "/v1/batches"

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]


class BatchFault(Answer):
    """Why a batch failed."""

    code: str
    message: str
    param: None
    line: None


class BatchFaults(Answer):
    """List of reasons why a batch failed."""

    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(Answer):
    """Number of requests, in all and by outcome."""

    total: int
    completed: int
    failed: int


class Batch(Answer):
    """A batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]


class BatchList(Answer):
    """Batches, newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _url(value: str) -> str:
    if value not in URLS:
        raise wrong(f"must be {' or '.join(URLS)}")
    return value


class BatchRequest(Body):
    """Body of ``/v1/batches``."""

    input_file_id: Name
    endpoint: Annotated[str, AfterValidator(_url)]
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata = Field({})


def batch_routes(settings: ServerSettings, store: RecordStore) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=BodyRoute)

    @router.post(URL, **documented(Batch, *FOR_EVERY_BODY))
    async def post_batch(body: BatchRequest, request: Request) -> dict[str, Any]:
        await of_record(request, store, "file", body.input_file_id)
        value = new_batch(**body.model_dump())
        id = f"batch_{secrets.token_hex(16)}"
        return _shown(await asyncio.to_thread(store.put, owner_of(request), "batch", id, value, is_open=True))

    @router.get(URL, **documented(BatchList, 400, *FOR_EVERY_RECORD))
    async def get_batches(request: Request) -> dict[str, Any]:
        return await listed(request, store, "batch", _shown)

    @router.get(f"{URL}/{{id}}", **documented(Batch, 400, *FOR_EVERY_RECORD))
    async def get_batch(id: str, request: Request) -> dict[str, Any]:
        return _shown(await of_record(request, store, "batch", id))

    @router.post(f"{URL}/{{id}}/cancel", **documented(Batch, 400, *FOR_EVERY_RECORD))
    async def cancel_batch(id: str, request: Request) -> dict[str, Any]:
        record = await of_record(request, store, "batch", id)
        return _shown(await asyncio.to_thread(store.change, record, cancel))

    return router


def cancel(value: dict[str, Any]) -> bool:
    """Marks a batch of either API as cancelling, unless it has ended; returns whether it is still open."""
    if value["ended_at"] is None:
        value.update(status="cancelling", cancelling_at=value["cancelling_at"] or int(time.time()))
    return value["ended_at"] is None


def _shown(record: Record) -> dict[str, Any]:
    value = record.value
    ended = {
        f"{status}_at": value["ended_at"] if value["status"] == status else None
        for status in ("completed", "failed", "expired", "cancelled")
    }
    fault = value["error"] and {"object": "list", "data": [{**value["error"], "param": None, "line": None}]}
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": value["endpoint"],
        "errors": fault,
        "input_file_id": value["input_file_id"],
        "completion_window": value["completion_window"],
        "status": value["status"],
        "output_file_id": value["output"],
        "error_file_id": value["errors"],
        "created_at": int(record.created),
        "in_progress_at": value["started_at"],
        "expires_at": int(record.created) + BATCH_SECONDS,
        "finalizing_at": value["finalizing_at"],
        "cancelling_at": value["cancelling_at"],
        **ended,
        "request_counts": {name: value["counts"][name] for name in ("total", "completed", "failed")},
        "metadata": value["metadata"],
    }
