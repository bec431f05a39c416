"""A semaphore that is fair between tenants, and a thread pool behind it. Serving processes use both."""

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
    """A semaphore that tenants share. They wait in a ``TenantQueue``.

    Args:
        turns: how many holders the semaphore can have at once.
    """

    def __init__(self, turns: int) -> None:
        self._in_use = Counter[str]()
        self._waiting = TenantQueue[tuple[str, "asyncio.Future[None]"]](turns)

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """A context in which the tenant has a turn. A task that is cancelled while it waits leaves the queue. If
        ``drop`` is called while the task waits, the error of ``drop`` is raised."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(tenant, (tenant, turn))
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(tenant, (tenant, turn))
            elif turn.exception() is None:  # the turn came at the moment of the cancellation
                self._take_back(tenant)
            raise
        try:
            yield
        finally:
            self._take_back(tenant)

    def drop(self, error: Exception) -> None:
        """Raises an error in all waiting tasks."""
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
        self._in_use -= Counter((tenant,))  # subtraction drops zero counts, so old tenants use no memory
        self._waiting.had(tenant)
        self._hand_out()


_threads = FairTurns(min(32, (os.cpu_count() or 1) + 4))
"""One turn for each thread of ``asyncio.to_thread``. Without turns, the threads would serve work in the order of
arrival."""


async def in_thread(tenant: str, work: Callable[[], T]) -> T:
    """Runs ``work`` on one of the threads that tenants share, and returns its result. Work cannot be interrupted."""
    async with _threads.of(tenant):
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait((working,))  # the turn ends with the work
            raise
