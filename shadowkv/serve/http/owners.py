"""Ownership of a request: the API key that its stored data belongs to, and the tenant that it is scheduled as."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address

from fastapi import Request
from starlette.types import Scope

from shadowkv.prefix_cache.protocol import OWNER_DIGITS

OWNER = "shadowkv.owner"
"""Key in a request's ASGI scope for its owner."""

PROMPT_OWNER = "shadowkv.prompt_owner"
"""Key in a request's ASGI scope for the owner of its cached prompts. Only set if another process has checked the API
key."""

TENANT = "shadowkv.tenant"
"""Key in a request's ASGI scope for its tenant. Only set if another process has chosen the tenant."""

IPV6_NETWORK_BITS = 64
"""Number of bits in the network part of an IPv6 address; a client can choose the rest (RFC 4291, 2.5.1)."""

_prompt_owner: ContextVar[str | None] = ContextVar("prompt_owner", default=None)
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def digest(key: bytes) -> str:
    """Returns the digest that stands for an API key in everything that can outlive the server."""
    return hashlib.sha256(b"shadowkv key" + key).hexdigest()[:OWNER_DIGITS]


def set_owner(scope: Scope, owner: str) -> None:
    """Sets a request's owner, the digest of its API key."""
    scope[OWNER] = owner


def owner_of(request: Request) -> str:
    """The owner of the data that a request stores; "" without API keys: all clients then share their data."""
    return str(request.scope.get(OWNER, ""))


def set_prompt_owner(owner: str | None) -> None:
    """Sets the owner of cached and saved prompts in this task and in those that it starts."""
    _prompt_owner.set(owner)


def prompt_owner() -> str | None:
    """The owner of the current request's cached and saved prompts; None if all requests share them."""
    return _prompt_owner.get()


def tenant_of_address(scope: Scope) -> str:
    """The tenant of a request without a key: its client's address, or the network of an IPv6 address."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a Unix socket has no address
        return str(host)
    if not isinstance(address, IPv6Address):
        return str(address)
    host_bits = 128 - IPV6_NETWORK_BITS
    return str(address.ipv4_mapped or IPv6Address(int(address) >> host_bits << host_bits))


def set_tenant(tenant: str) -> None:
    """Sets the tenant of this task and of those that it starts."""
    _tenant.set(tenant)


def current_tenant() -> str:
    """The tenant that the current request is scheduled as; "" outside of a request, as in batch mode."""
    return _tenant.get()
