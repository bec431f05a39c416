"""A request on its way from the front to a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

FIELDS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path") + (
    ("headers", "client", "server")
)
"""The fields of an ASGI scope that are plain values."""


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request.

    Attributes:
        scope: its ASGI scope, as far as it can be sent.
        body: all of it.
        prefix: names of its prompt's blocks, for the router.
        avoid: a replica that has failed it; None if none has.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: tuple[int, ...]
    avoid: str | None = None


def sendable(scope: Scope, request_id: str) -> dict[str, Any]:
    """The part of a scope that a replica gets, where the request keeps its id."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    fields = {name: scope[name] for name in FIELDS if name in scope}
    return {**fields, "headers": [*headers, (b"x-request-id", request_id.encode())]}
