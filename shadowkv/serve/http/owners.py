"""Whom what is kept for a request belongs to: its API key."""

from __future__ import annotations

import hashlib

from fastapi import Request
from starlette.types import Scope

OWNER = "shadowkv.owner"
"""Where a request's scope has its owner."""


def set_owner(scope: Scope, key: bytes) -> None:
    """Notes the API key that a request has come with: by its digest, as what is kept may outlive the server."""
    scope[OWNER] = hashlib.blake2b(key, digest_size=16, person=b"shadowkv-owner").hexdigest()


def owner_of(request: Request) -> str:
    """The owner of what a request has kept; without keys all share."""
    return str(request.scope.get(OWNER, ""))
