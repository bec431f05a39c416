"""Routes of ``/v1/files``: input and output of batches, and documents that messages refer to by id."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException

from shadowkv.serve.batch.queries import listed, of_record
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.limits import MAX_NAME_CHARS
from shadowkv.serve.http.owners import owner_of
from shadowkv.serve.http.routing import FOR_EVERY_RECORD, Answer, documented
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.storage.store import OUTPUT, Record, RecordStore, storage_failed

URL = "/v1/files"
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
"""Purposes of the OpenAI API; they do not limit what a file can be used for."""

FIELDS = 16
"""Maximum number of fields of an upload. Only ``file`` and ``purpose`` have an effect."""


class StoredFile(Answer):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Answer):
    """Files, newest first."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Answer):
    """Answer of ``DELETE``."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


def file_routes(settings: ServerSettings, store: RecordStore) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post(URL, **documented(StoredFile, 400, *FOR_EVERY_RECORD, 408, 413), openapi_extra=UPLOAD)
    async def post_file(request: Request) -> dict[str, Any]:
        _check_origin(request, settings)
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "multipart/form-data":
            raise ApiError("send the file as multipart/form-data, with the fields file and purpose")
        try:
            form = await request.form(max_files=1, max_fields=FIELDS)
        except MultiPartException as error:
            raise ApiError(f"the form cannot be read: {error.message}") from error
        except OSError as error:  # long files are written to a temporary file while they are read
            raise storage_failed(Path(tempfile.gettempdir()), error) from error
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str) or not purpose:
                raise ApiError("pass two fields: file, which holds a file, and purpose", param="file")
            _check_purpose(purpose, PURPOSES)
            name = (file.filename or "file")[:MAX_NAME_CHARS]
            record = await asyncio.to_thread(_keep, store, owner_of(request), file, name, purpose)
        finally:
            await form.close()
        return _shown(record)

    @router.get(URL, **documented(FileList, 400, *FOR_EVERY_RECORD))
    async def get_files(request: Request) -> dict[str, Any]:
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            _check_purpose(purpose, (*PURPOSES, OUTPUT))
        return await listed(request, store, "file", _shown, purpose=purpose)

    @router.get(f"{URL}/{{id}}", **documented(StoredFile, 400, *FOR_EVERY_RECORD))
    async def get_file(id: str, request: Request) -> dict[str, Any]:
        return _shown(await of_record(request, store, "file", id))

    @router.get(f"{URL}/{{id}}/content", **documented(None, 400, *FOR_EVERY_RECORD))
    async def get_content(id: str, request: Request) -> Response:
        record = await of_record(request, store, "file", id)
        # Whatever the content is, no browser may show it as a page of this server.
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(
            store.file(record.owner, id),
            media_type="application/octet-stream",
            filename=record.value["filename"],
            headers=headers,
        )

    @router.delete(f"{URL}/{{id}}", **documented(DeletedFile, 400, *FOR_EVERY_RECORD))
    async def delete_file(id: str, request: Request) -> dict[str, Any]:
        await asyncio.to_thread(store.remove, owner_of(request), "file", id)
        return {"id": id, "object": "file", "deleted": True}

    return router


def _check_purpose(purpose: str, allowed: Sequence[str]) -> None:
    if purpose not in allowed:
        raise ApiError(f"purpose is {purpose[:80]!r}, and must be one of {', '.join(allowed)}", param="purpose")


def _check_origin(request: Request, settings: ServerSettings) -> None:
    """Refuses forms from pages of another origin: a browser sends these without a preflight request, unlike JSON."""
    origin = request.headers.get("origin")
    own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not own and not {*settings.allowed_origins} & {origin, "*"}:
        raise ApiError(f"pages of {origin} may not send files here (--allowed-origins)", code="origin_not_allowed")


def _keep(store: RecordStore, owner: str, file: UploadFile, name: str, purpose: str) -> Record:
    with store.new_file() as path:
        with path.open("wb") as target:
            shutil.copyfileobj(file.file, target)
        return store.add_file(owner, path, name, purpose)


def _shown(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.value["bytes"],
        "created_at": int(record.created),
        "filename": record.value["filename"],
        "purpose": record.value["purpose"],
        "status": "processed",
    }
