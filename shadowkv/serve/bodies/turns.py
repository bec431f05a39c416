"""Turns at work of which few things can be done at a time, shared out so that no tenant's many keep another's few
waiting."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """A semaphore shared by tenants.

    A free turn goes to the tenant with the fewest turns in use; of those with as many, to the one that has waited
    longest since it came or had a turn. The requests of one tenant have turns in the order in which they came. A tenant
    with a turn never gets the last free one, where there are several: whoever comes next can begin at once.

    Args:
        turns: how many there are.
    """

    def __init__(self, turns: int) -> None:
        self._several, self._free = turns > 1, turns
        self._in_use = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # who waited or had a turn last comes last

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Within, the tenant has a turn. Whoever is cancelled while it waits waits no more; raises what ``drop`` was
        given."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            elif turn.exception() is None:  # it was given at the same time
                self._take_back(tenant)
            raise
        try:
            yield
        finally:
            self._take_back(tenant)

    def drop(self, error: Exception) -> None:
        """Ends the waiting of all who wait, with an error."""
        waiting, self._waiting = self._waiting, {}
        for turn in (turn for turns in waiting.values() for turn in turns):
            if not turn.cancelled():
                turn.set_exception(error)

    def _hand_out(self) -> None:
        while able := [tenant for tenant in self._waiting if self._may_have_one(tenant)]:
            tenant = min(able, key=self._in_use.__getitem__)
            turns = self._waiting.pop(tenant)
            if not (turn := turns.popleft()).cancelled():
                self._free -= 1
                self._in_use[tenant] += 1
                turn.set_result(None)
            if turns:
                self._waiting[tenant] = turns

    def _may_have_one(self, tenant: str) -> bool:
        return self._free > (1 if self._several and self._in_use[tenant] else 0)

    def _take_back(self, tenant: str) -> None:
        self._free += 1
        self._in_use[tenant] -= 1
        if not self._in_use[tenant]:
            del self._in_use[tenant]
        self._hand_out()

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is None or turn not in turns:  # it has been taken from the queue, or all have been dropped
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]
