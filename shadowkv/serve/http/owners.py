"""Whom what is kept for a request belongs to: its API key."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from fastapi import Request
from starlette.types import Scope

from shadowkv.prefix_cache.protocol import OWNER_DIGITS

OWNER = "shadowkv.owner"
"""Where a request's scope has its owner."""

PROMPT_OWNER = "shadowkv.prompt_owner"
"""Where the scope of a request has whom its cached prompts belong to, if another process has checked its key."""

_prompt_owner: ContextVar[str | None] = ContextVar("prompt_owner", default=None)


def digest(key: bytes) -> str:
    """What stands for an API key in all that may outlive the server."""
    return hashlib.sha256(b"shadowkv key" + key).hexdigest()[:OWNER_DIGITS]


def set_owner(scope: Scope, owner: str) -> None:
    """Notes the API key that a request has come with, by its digest."""
    scope[OWNER] = owner


def owner_of(request: Request) -> str:
    """The owner of what a request has kept; without keys all share."""
    return str(request.scope.get(OWNER, ""))


def set_prompt_owner(owner: str | None) -> None:
    """Makes cached prompts and saves of this task, and of those that it starts, belong to an owner alone."""
    _prompt_owner.set(owner)


def prompt_owner() -> str | None:
    """Whom cached prompts and saves of the request that is being served belong to; None where all share them."""
    return _prompt_owner.get()
