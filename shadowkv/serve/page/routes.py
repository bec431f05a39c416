"""Routes of the chat page at ``/``. They serve the page's static files, extract the text of a document, and return the
server's statistics. With the headers of the static files, browsers block content from elsewhere. For everything else,
the page uses the public APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.reader import BodyReader
from shadowkv.serve.http.errors import too_large
from shadowkv.serve.http.metrics import Metrics
from shadowkv.serve.http.middleware import STATS_PATH
from shadowkv.serve.http.owners import current_tenant, prompt_owner
from shadowkv.serve.http.replies import reply
from shadowkv.serve.http.routing import Answer, documented
from shadowkv.serve.page.documents import MAX_DOCUMENT_BYTES, read_document

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from shadowkv.engine.process.client import EngineClient

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Content security policy: only the page's own files, no inline scripts, no frames. Text becomes HTML only through the
library DOMPurify."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FOLDER = files("shadowkv.serve.page") / "static"


def _assets(folder: Traversable, path: str = "/page/") -> dict[str, Traversable]:
    """The files to serve, by path. Other files in the folder are licenses of libraries."""
    found: dict[str, Traversable] = {}
    for file in folder.iterdir():
        if file.is_dir():
            found |= _assets(file, f"{path}{file.name}/")
        elif file.name.rsplit(".")[-1] in MEDIA_TYPES:
            found["/" if file.name == "index.html" else path + file.name] = file
    return found


ASSETS = _assets(FOLDER)

PAGE_PATHS = frozenset(ASSETS)
"""Paths that need no API key, because the page asks the user for it."""

MAX_SEGMENTS = 256
"""Maximum number of reported segments: the page draws each of them."""

BINARY = "application/octet-stream"
"""The only content type that is accepted for documents. As with JSON, a browser does not send it for a web page of
another origin without a preflight request."""
DOCUMENT = {"requestBody": {"required": True, "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}}


def page_assets() -> APIRouter:
    """Routes of the page's static files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for path, file in ASSETS.items():
        media_type = f"{MEDIA_TYPES[file.name.rsplit('.')[-1]]}; charset=utf-8"
        router.add_api_route(path, _endpoint(file.read_bytes(), media_type), methods=["GET"], response_model=None)
    return router


def _endpoint(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def get() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": media_type})

    return get


class DocumentText(Answer):
    """Answer of ``/page/document``: the document's text and number of pages, which is 0 for plain text."""

    text: str
    pages: int


class TierBytes(Answer):
    """Bytes of a tier of the KV cache or the prefix cache."""

    used_bytes: int
    total_bytes: int


class Segment(Answer):
    """A segment of a prompt, and the tiers that hold it: device, host, disk."""

    uid: str
    first: int
    tokens: int
    compressed: bool
    running: bool
    tiers: list[str]


class ServerStats(Answer):
    """Answer of ``/page/stats``: counts since the start, current memory use, and the tiers of cached prompts."""

    policy: str
    compared: str | None
    advice: str | None
    running: int
    waiting: int
    prompt_tokens: float
    generated_tokens: float
    looked_up_tokens: float
    hit_tokens: float
    first_tokens: float
    first_token_seconds: float
    tiers: dict[str, TierBytes]
    segments: list[Segment]
    segment_count: int


def page_routes(engine: EngineClient, metrics: Metrics, documents: BodyReader, compared: str | None) -> APIRouter:
    """The routes.

    Args:
        documents: reads documents in separate processes.
        compared: name of the model that answers are compared with; None if there is none.
    """
    router, statuses = APIRouter(), (400, 401, 408, 413, 429, 500, 503)

    @router.post("/page/document", **documented(DocumentText, *statuses), openapi_extra=DOCUMENT)
    async def post_document(request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != BINARY:
            raise ApiError(f"the request needs the file as its body, and the header Content-Type: {BINARY}")
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > MAX_DOCUMENT_BYTES:
                text = f"the document is longer than the limit of {MAX_DOCUMENT_BYTES // 2**20} MiB"
                return too_large(text, request.url.path)

        async def read() -> Response:
            return JSONResponse(asdict(await documents.apart(raw, read_document, current_tenant())))

        return await reply(request, read)

    @router.get(STATS_PATH, **documented(ServerStats, 401, 500, 503))
    async def get_stats() -> Response:
        # A segment's id does not show its owner, so no segments are listed if API keys have separate caches.
        segments, count = ([], 0) if prompt_owner() else await engine.segments(MAX_SEGMENTS)
        stats = await engine.stats()
        tiers: dict[str, Any] = {name: asdict(use) for name, use in stats.tiers.items()}
        for name, tier in stats.prefixes.items():
            # The KV cache has no disk tier. It has no host tier, either, if only the prefix cache uses host memory.
            if name == "disk" or (name == "host" and not tiers.get(name, {}).get("total_bytes")):
                tiers[name] = {"used_bytes": tier.used_bytes, "total_bytes": tier.total_bytes}
        answer = {
            "policy": engine.kv,
            "compared": compared,
            "advice": engine.advice,
            "running": stats.running,
            "waiting": stats.waiting,
            **metrics.figures(),
            "tiers": tiers,
            "segments": [asdict(segment) for segment in segments],
            "segment_count": count,
        }
        return JSONResponse(answer)

    return router
