"""Turns are shared by tenant: many requests of one keep no other waiting, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from shadowkv.engine.process.fair_turns import FairTurns


class Crowd:
    """Requests that take turns, and end when they are told to."""

    def __init__(self, turns: int) -> None:
        self.turns = FairTurns(turns)
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *names: str) -> None:
        """One more request each; the first letter is its tenant."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(name))
        await self.settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await self.settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        for event in self.ends.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _work(self, name: str) -> None:
        async with self.turns.of(name[0]):
            self.began.append(name)
            await self.ends[name].wait()


def test_a_newcomer_begins_at_once_whatever_others_have_in_the_queue():
    async def run() -> None:
        crowd = Crowd(3)
        await crowd.add("a1", "a2", "a3", "a4")
        assert crowd.began == ["a1", "a2"]  # the last turn is kept
        await crowd.add("b1")
        assert crowd.began[2:] == ["b1"]
        await crowd.end("b1")
        assert crowd.began[3:] == []  # it is kept again
        await crowd.finish()
        assert crowd.began[3:] == ["a3", "a4"]

    asyncio.run(run())


def test_a_free_turn_goes_to_who_has_fewest_and_then_to_who_waited_longest():
    async def run() -> None:
        crowd = Crowd(1)
        await crowd.add("a1", "a2", "a3", "b1", "b2", "c1")
        for _ in range(6):
            await crowd.end(crowd.began[-1])
        assert crowd.began == ["a1", "b1", "c1", "a2", "b2", "a3"]
        crowd = Crowd(2)
        await crowd.add("a1", "b1", "a2", "b2", "c1")
        assert crowd.began == ["a1", "b1"]
        await crowd.end("a1")
        assert crowd.began[2:] == ["c1"]  # a had one just now
        await crowd.end("b1")
        assert crowd.began[3:] == ["a2"]
        await crowd.end("c1")
        assert crowd.began[4:] == ["b2"]

    asyncio.run(run())


def test_with_one_turn_a_tenant_can_have_it():
    async def run() -> None:
        crowd = Crowd(1)
        await crowd.add("a1")
        assert crowd.began == ["a1"]
        await crowd.finish()

    asyncio.run(run())


def test_who_is_cancelled_waits_no_more_and_keeps_nothing():
    async def run() -> None:
        crowd = Crowd(1)
        await crowd.add("a1", "a2", "a3", "b1")
        await crowd.cancel("a2", "b1")
        assert crowd.tasks["a2"].cancelled() and crowd.tasks["b1"].cancelled()
        crowd.ends["a1"].set()
        await asyncio.sleep(0)
        crowd.tasks["a3"].cancel()  # as it is given the turn
        await crowd.settle()
        await crowd.add("c1")
        assert crowd.began[-1] == "c1"  # the turn is free
        await crowd.cancel("c1")
        await crowd.add("d1")
        assert crowd.began[-1] == "d1"
        await crowd.finish()

    asyncio.run(run())


def test_all_who_wait_are_told_when_they_are_dropped():
    async def run() -> None:
        crowd = Crowd(1)
        await crowd.add("a1", "a2", "b1")
        crowd.turns.drop(ValueError("no more"))
        await crowd.settle()
        for name in ("a2", "b1"):
            with pytest.raises(ValueError, match="no more"):
                await crowd.tasks[name]
        await crowd.finish()
        assert crowd.began == ["a1"]

    asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_never_more_at_work_than_there_are_turns_and_all_have_one(turns, drawn):
    async def run() -> None:
        fair, in_flight, most, done = FairTurns(turns), 0, 0, Counter[str]()
        chance = random.Random(drawn)

        async def work(tenant: str) -> None:
            nonlocal in_flight, most
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            async with fair.of(tenant):
                in_flight += 1
                most = max(most, in_flight)
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    in_flight -= 1
                done[tenant] += 1

        tasks = [asyncio.create_task(work(chance.choice("abcd"))) for _ in range(200)]
        await asyncio.sleep(0)
        cancelled = chance.sample(tasks, 40)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == turns and not in_flight
        assert sum(done.values()) == sum(not task.cancelled() for task in tasks)
        async with fair.of("e"):
            assert True  # nothing has kept a turn

    asyncio.run(asyncio.wait_for(run(), 300))
