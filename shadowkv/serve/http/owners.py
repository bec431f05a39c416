"""Whom a request is for: the API key that what it has kept belongs to, and the tenant that it takes turns as."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address

from fastapi import Request
from starlette.types import Scope

from shadowkv.prefix_cache.protocol import OWNER_DIGITS

OWNER = "shadowkv.owner"
"""Where a request's scope has its owner."""

PROMPT_OWNER = "shadowkv.prompt_owner"
"""Where the scope of a request has whom its cached prompts belong to, if another process has checked its key."""

TENANT = "shadowkv.tenant"
"""Where the scope of a request has its tenant, if another process has named it."""

IPV6_NETWORK_BITS = 64
"""Of an address: the rest is a client's own to choose (RFC 4291, 2.5.1)."""

_prompt_owner: ContextVar[str | None] = ContextVar("prompt_owner", default=None)
_tenant: ContextVar[str] = ContextVar("tenant", default="")


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


def tenant_of_address(scope: Scope) -> str:
    """The tenant of a request without a key: the address that it comes from, of IPv6 the network."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # of a Unix socket, which has none
        return str(host)
    if not isinstance(address, IPv6Address):
        return str(address)
    own = 128 - IPV6_NETWORK_BITS
    return str(address.ipv4_mapped or IPv6Address(int(address) >> own << own))


def set_tenant(tenant: str) -> None:
    """Makes this task, and those that it starts, take turns as this tenant."""
    _tenant.set(tenant)


def current_tenant() -> str:
    """Who the request that is being served takes turns as; "" outside of one, as in batch mode."""
    return _tenant.get()
