"""The order in which waiting requests are looked at: fair between tenants, or as they come, or by priority.

Fair is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
arXiv:2401.00588): each tenant has a counter of what was computed for it, and the tenant with the least is next. One who
comes anew, or again, begins with as much as the one with the least, so that nobody saves up. Beyond the paper, a tenant
for whom nothing is computed comes first, as a newcomer, unless it has had ``AHEAD`` more than the one with the least.

Of one tenant's requests the shortest prompt is first, with ageing: a request ranks as if it had come later than it did
by a multiple of what its prompt takes. Those without a tenant, which no server has taken, keep their order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from shadowkv.engine.request import Request

PROMPT_COST, OUTPUT_COST = 1, 2
"""Of a token, as in the paper: a step of few sequences reads all weights for each of them."""

AHEAD = 1_024
"""What a newcomer may have had beyond the tenant with the least. Without a limit one that asks a short question after
another, each of which ends at once, would come first forever."""

PATIENCE = 4.0
"""For how many times what a prompt takes a request lets shorter ones of its tenant pass."""


class WaitingQueue:
    """Waiting requests, and what each tenant has had.

    Args:
        policy: ``fair``, ``fcfs`` (first come, first served), or ``priority``: lower numbers first, and ``fair`` among
            equal ones.

    Attributes:
        newcomers: tenants that wait and for whom nothing is computed, but for those that have had much more than
            others, as of the last look at the order.
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
        """As they came."""
        return iter([*self._ranks])

    def add(self, request: Request, prompt_seconds: float) -> None:
        """Takes one whose prompt takes about so long."""
        self._come(request.tenant)
        self._ranks[request] = request.times.arrival + (PATIENCE * prompt_seconds if request.tenant else 0.0)
        self._waiting[request.tenant] += 1
        self._order = None

    def remove(self, request: Request) -> None:
        """Takes one out that is not to be started."""
        del self._ranks[request]
        _take_one(self._waiting, request.tenant)
        self._order = None

    def start(self, request: Request, tokens: int) -> None:
        """Takes one out of whose prompt so many tokens are computed from now on."""
        self.remove(request)
        self._in_flight.setdefault(request.tenant, set()).add(request)
        self._had[request.tenant] += PROMPT_COST * tokens

    def start_elsewhere(self, request: Request) -> None:
        """Counts one as started that has not waited here: its prompt was computed elsewhere."""
        self._come(request.tenant)
        self._in_flight.setdefault(request.tenant, set()).add(request)

    def end(self, request: Request) -> None:
        """Counts what one that was started has generated; until then that counts as it comes."""
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
        """Also for requests that are at work."""
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
        """Whether a request's tenant shares fairly with others."""
        return self._policy != "fcfs" and bool(request.tenant)

    @property
    def has_newcomers(self) -> bool:
        """Whether the request that is looked at first is a newcomer's."""
        return any(request.tenant in self.newcomers for request in self.ordered()[:1])

    def count(self, tenant: str) -> int:
        """A tenant's waiting requests; may be called from any thread."""
        return self._waiting[tenant]

    def ordered(self) -> list[Request]:
        """As they are to be looked at."""
        newcomers = self._newcomers()  # which change as answers grow
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
        """Requests of several tenants, each tenant's in their order, as they would be started one after another."""
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
