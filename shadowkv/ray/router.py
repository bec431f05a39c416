"""The requests that the front (``front.py``) sends to replicas, and the router that Ray Serve uses for them. The router
chooses a replica by prefix, then by load (``PrefixTable``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Scope

from shadowkv.engine.process.prefix_table import PrefixTable
from shadowkv.serve.http.owners import PROMPT_OWNER, TENANT

FIELDS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path") + (
    ("headers", "client", "server")
)
"""Fields of an ASGI scope that are plain values."""


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that the front forwards to a replica.

    Attributes:
        scope: its ASGI scope, as far as it can be sent.
        body: the whole body.
        prefix: hashes of its prompt's blocks, for the router.
        avoid: id of a replica that has failed to answer the request; None if none has.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: tuple[int, ...]
    avoid: str | None = None


def sendable(scope: Scope, request_id: str, owner: str | None, tenant: str) -> dict[str, Any]:
    """The part of a scope that a replica gets, with the request's id, owner and tenant."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    fields = {name: scope[name] for name in FIELDS if name in scope}
    headers.append((b"x-request-id", request_id.encode()))
    return {**fields, PROMPT_OWNER: owner, TENANT: tenant, "headers": headers}


class PrefixRouter(RequestRouter):
    """Chooses replicas for the front's requests. A replica's load is the number of its requests in flight. The front
    sends all requests, so this router counts them all."""

    @classmethod
    def config(cls, margin: int) -> RequestRouterConfig:
        """The config that makes this class a deployment's router; ``margin`` as for ``PrefixTable``."""
        path = f"{cls.__module__}.{cls.__qualname__}"
        return RequestRouterConfig(request_router_class=path, request_router_kwargs={"margin": margin})

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray Serve with the options of the deployment's config."""
        self._table = PrefixTable(**options)
        self._in_flight: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the chosen replica, then the others, for the case that the chosen one cannot be reached."""
        args = [] if pending_request is None else pending_request.args
        request = args[0] if args else ForwardedRequest({}, b"", ())
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if len(replicas) > 1 and request.avoid is not None:
            replicas.pop(request.avoid, None)
        chosen = self._table.choose(request.prefix, {name: self._in_flight[name] for name in replicas})
        return [[replicas.pop(chosen)], [*replicas.values()]]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve for every request that is sent."""
        super().on_send_request(replica_id)
        self._in_flight[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a request is over, for whatever reason."""
        super().on_request_completed(replica_id, internal_request_id)
        name = replica_id.unique_id
        self._in_flight[name] -= 1
        if self._in_flight[name] <= 0:  # negative if a request failed before it was sent
            del self._in_flight[name]
