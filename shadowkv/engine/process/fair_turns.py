"""Turns at work of which few things can be done at a time, and on the threads of asyncio."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from shadowkv.engine.tenant_queue import TenantQueue

T = TypeVar("T")


class FairTurns:
    """A semaphore shared by tenants, who wait in a ``TenantQueue``.

    Args:
        turns: how many there are.
    """

    def __init__(self, turns: int) -> None:
        self._in_use = Counter[str]()
        self._waiting = TenantQueue[tuple[str, "asyncio.Future[None]"]](turns)

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Within, the tenant has a turn. Whoever is cancelled while it waits waits no more; raises what ``drop`` was
        given."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(tenant, (tenant, turn))
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(tenant, (tenant, turn))
            elif turn.exception() is None:  # it was given at the same time
                self._take_back(tenant)
            raise
        try:
            yield
        finally:
            self._take_back(tenant)

    def drop(self, error: Exception) -> None:
        """Ends the waiting of all who wait, with an error."""
        for _, turn in self._waiting.clear():
            if not turn.cancelled():
                turn.set_exception(error)

    def _hand_out(self) -> None:
        while (waiting := self._waiting.pop(self._in_use)) is not None:
            tenant, turn = waiting
            if not turn.cancelled():
                self._in_use[tenant] += 1
                turn.set_result(None)

    def _take_back(self, tenant: str) -> None:
        self._in_use -= Counter((tenant,))  # which keeps no zeros: tenants may be many
        self._waiting.had(tenant)
        self._hand_out()


_threads = FairTurns(min(32, (os.cpu_count() or 1) + 4))
"""As many as ``asyncio.to_thread`` has, where they would be given to those who came first."""


async def in_thread(tenant: str, work: Callable[[], T]) -> T:
    """What ``work`` returns, on one of the threads that tenants share. It cannot be interrupted."""
    async with _threads.of(tenant):
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait((working,))  # the turn is free when its work has ended
            raise
