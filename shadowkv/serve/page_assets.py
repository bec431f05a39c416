"""The page at ``/``: its files, which contain no data, and the headers that keep anything else out of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Only the page's own files, no script in markup, no frames; answers are inserted as text only."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FOLDER = files("shadowkv.serve") / "page"
ASSETS = {"/" if one.name == "index.html" else f"/page/{one.name}": one for one in FOLDER.iterdir()}

PAGE_PATHS = frozenset(ASSETS)
"""They are served without a key: the page asks for the key."""


def page_assets() -> APIRouter:
    """The routes of the page's files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for path, file in ASSETS.items():
        media_type = f"{MEDIA_TYPES[file.name.rsplit('.')[-1]]}; charset=utf-8"
        router.add_api_route(path, _endpoint(file.read_bytes(), media_type), methods=["GET"], response_model=None)
    return router


def _endpoint(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def get() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": media_type})

    return get
