"""The waiting queue: the order in which the scheduler tries to admit requests. There are three orders: fair between
tenants; first come, first served; and by priority.

The fair order is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
arXiv:2401.00588). Each tenant has a counter of the tokens computed for it, and the tenant with the lowest counter is
next. A tenant that comes, or comes back, starts at least at the lowest counter of the active tenants, so that no tenant
saves up credit. Unlike in the paper, newcomers are first. A newcomer is a tenant with a waiting request but none that
runs or is prefilled. Its counter must be at most ``AHEAD`` above the lowest.

Within a tenant the shortest prompt is first, with ageing: a request's rank is its arrival time plus a multiple of its
prefill time. Requests without a tenant, which come from ``LLM`` and not from a server, keep their order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from shadowkv.engine.request import Request

PROMPT_COST, OUTPUT_COST = 1, 2
"""Costs of a prompt token and of an output token, as in the paper. An output token costs more, because a step of few
sequences reads all weights for each token."""

AHEAD = 1_024
"""A tenant is a newcomer only if its counter is at most this much above the lowest counter. Without a limit, a tenant
that asks one short question after another would always be first."""

PATIENCE = 4.0
"""A shorter request of the same tenant can overtake a longer one if it arrives within this many times the longer one's
prefill time."""


class WaitingQueue:
    """Waiting requests, and the counter of each tenant.

    Args:
        policy: ``fair``, ``fcfs`` (first come, first served), or ``priority``: lower numbers first, and ``fair`` among
            equal numbers.

    Attributes:
        newcomers: the tenants that were newcomers at the last call of ``ordered``.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._ranks: dict[Request, float] = {}
        self._waiting: Counter[str] = Counter()
        self._in_flight: dict[str, set[Request]] = {}
        self._had: dict[str, float] = {}
        self.newcomers: set[str] = set()
        self._order: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of arrival."""
        return iter([*self._ranks])

    def add(self, request: Request, prompt_seconds: float) -> None:
        """Adds a request whose prefill takes about ``prompt_seconds``."""
        self._come(request.tenant)
        self._ranks[request] = request.times.arrival + (PATIENCE * prompt_seconds if request.tenant else 0.0)
        self._waiting[request.tenant] += 1
        self._order = None

    def remove(self, request: Request) -> None:
        """Removes a request that is not started."""
        del self._ranks[request]
        _take_one(self._waiting, request.tenant)
        self._order = None

    def start(self, request: Request, tokens: int) -> None:
        """Removes a request that starts now, and charges its tenant for ``tokens`` prompt tokens."""
        self.remove(request)
        self._in_flight.setdefault(request.tenant, set()).add(request)
        self._had[request.tenant] += PROMPT_COST * tokens

    def start_elsewhere(self, request: Request) -> None:
        """Counts a request as started although it was never in the queue, because its prompt was computed elsewhere."""
        self._come(request.tenant)
        self._in_flight.setdefault(request.tenant, set()).add(request)

    def end(self, request: Request) -> None:
        """Ends a started request, and charges its tenant for the output tokens."""
        self._had[request.tenant] += OUTPUT_COST * len(request.output_token_ids)
        self._in_flight[request.tenant].remove(request)
        if not self._in_flight[request.tenant]:
            del self._in_flight[request.tenant]
        self._order = None

    def _come(self, tenant: str) -> None:
        if self._is_active(tenant):
            return
        had = {one: had for one, had in self._had.items() if self._is_active(one)}
        least = min(map(self._had_by_now, had), default=0.0)
        ahead = {one: more for one, more in self._had.items() if had and more > least}
        self._had = {tenant: least, **had, **ahead}

    def _is_active(self, tenant: str) -> bool:
        return bool(self._waiting[tenant] or tenant in self._in_flight)

    def _had_by_now(self, tenant: str) -> float:
        """Returns a tenant's counter plus the cost of the output tokens of its requests in flight."""
        tokens = sum(len(request.output_token_ids) for request in self._in_flight.get(tenant, ()))
        return self._had[tenant] + OUTPUT_COST * tokens

    def _newcomers(self) -> set[str]:
        if self._policy == "fcfs":
            return set()
        new = {tenant for tenant in self._waiting if tenant and tenant not in self._in_flight}
        if not new:
            return new
        least = min(self._had_by_now(tenant) for tenant in self._had if self._is_active(tenant))
        return {tenant for tenant in new if self._had[tenant] - least <= AHEAD}

    def is_shared(self, request: Request) -> bool:
        """Whether the fair order applies to a request."""
        return self._policy != "fcfs" and bool(request.tenant)

    @property
    def has_newcomers(self) -> bool:
        """Whether the first request of the order is a newcomer's."""
        return any(request.tenant in self.newcomers for request in self.ordered()[:1])

    def ordered(self) -> list[Request]:
        """The requests in the order of admission."""
        newcomers = self._newcomers()  # they change as answers grow
        if self._order is None or newcomers != self.newcomers:
            self.newcomers = newcomers
            self._order = [*self._ranks] if self._policy == "fcfs" else [*self._fairly()]
        return self._order

    def _fairly(self) -> Iterator[Request]:
        of_priority: dict[int, list[Request]] = {}
        for request in sorted(self._ranks, key=self._ranks.__getitem__):
            of_priority.setdefault(request.priority if self._policy == "priority" else 0, []).append(request)
        had = {tenant: self._had_by_now(tenant) for tenant in self._had}
        newcomers = self.newcomers.copy()
        for priority in sorted(of_priority):
            yield from self._merged(of_priority[priority], had, newcomers)

    def _merged(self, requests: list[Request], had: dict[str, float], newcomers: set[str]) -> Iterator[Request]:
        """Merges the requests of several tenants into the order in which they would start one after another. The order
        within each tenant stays as in ``requests``."""
        of_tenant: dict[str, list[Request]] = {}
        for request in reversed(requests):
            of_tenant.setdefault(request.tenant, []).append(request)

        def place(tenant: str) -> tuple[bool, float, float, str]:
            return tenant not in newcomers, had[tenant], self._ranks[of_tenant[tenant][-1]], tenant

        heap = [place(tenant) for tenant in of_tenant]
        heapq.heapify(heap)
        while heap:
            *_, tenant = heap[0]
            yield (request := of_tenant[tenant].pop())
            had[tenant] += PROMPT_COST * len(request.prompt_token_ids)
            newcomers.discard(tenant)
            if of_tenant[tenant]:
                heapq.heapreplace(heap, place(tenant))
            else:
                heapq.heappop(heap)


def _take_one(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
