"""Sequences join, decode, finish, come back and leave in any order: no page is lost, no answer changes."""

import pytest
import torch
from driver import Stream, decode, make_cache, prefill
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shadowkv.kvcache.memory import OutOfPages
from shadowkv.kvcache.presets import preset

SPECS = {
    "full": preset("full"),
    "shadowkv": preset("shadowkv", rank=16, budget=32, outliers=3),
    "quest": preset("quest", budget=32),
}


class Lifetimes(RuleBasedStateMachine):
    """Every rule keeps a log per sequence, so that at the end each can be run again alone."""

    name = "full"

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(SPECS[self.name], slots=5, blocks=40)
        self.running: list[Stream] = []
        self.finished: list[Stream] = []
        self.logs: dict[Stream, list[tuple[str, int, int]]] = {}
        self.seed = 0

    @rule(length=st.integers(1, 400), room=st.integers(0, 200))
    def join(self, length: int, room: int) -> None:
        pool = self.cache.pool
        fits = pool.demand(length, length + room).within(pool.free) and pool.free_slots > 0
        before = pool.free
        if not fits:
            with pytest.raises(OutOfPages):
                pool.allocate(length, length + room)
            assert pool.free == before
            return
        stream = Stream(self.seed, pool.allocate(length, length + room))
        self.seed += 1
        prefill(self.cache, [(stream, length)], block=150)
        self.running.append(stream)
        self.logs[stream] = [("allocate", length, room)]

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 70))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            ready = [s for s in self.running if s.length < s.sequence.capacity]
            if not ready:
                return
            decode(self.cache, ready)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        stream = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.logs[stream].append(("turn ends", stream.length, 0))
        self.cache.pool.trim(stream.sequence)
        self.finished.append(stream)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), new=st.integers(1, 150), room=st.integers(0, 100))
    def come_back(self, data: st.DataObject, new: int, room: int) -> None:
        stream = self.finished[data.draw(st.integers(0, len(self.finished) - 1))]
        start, pool = stream.length + new, self.cache.pool
        before = pool.free
        if not pool.growth(stream.sequence, start, start + room).within(pool.free):
            with pytest.raises(OutOfPages):
                pool.extend(stream.sequence, start, start + room)
            assert pool.free == before
            return
        pool.extend(stream.sequence, start, start + room)
        self.finished.remove(stream)
        prefill(self.cache, [(stream, new)], block=40)
        self.running.append(stream)
        self.logs[stream].append(("extend", new, room))

    @precondition(lambda self: self.running or self.finished)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        everyone = self.running + self.finished
        stream = everyone[data.draw(st.integers(0, len(everyone) - 1))]
        (self.running if stream in self.running else self.finished).remove(stream)
        self.cache.pool.release(stream.sequence)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        held = [s.sequence for s in self.running + self.finished]
        device = [g for s in held for kind in (s.dense_blocks, s.exact_blocks, s.sealed_blocks) for g in kind]
        host = [g for s in held for g in s.host]
        assert len(set(device)) == len(device) and len(set(host)) == len(host)
        used = self.cache.pool.total - self.cache.pool.free
        assert (used.device, used.host) == (len(device), len(host))

    def teardown(self) -> None:
        for stream in self.running + self.finished:
            self.cache.pool.release(stream.sequence)
        assert self.cache.pool.free == self.cache.pool.total
        assert self.cache.pool.free_slots == 5
        for seed, (stream, log) in enumerate(self.logs.items()):
            torch.testing.assert_close(stream.output(), self.alone(seed, stream, log), atol=1e-4, rtol=1e-3)

    def alone(self, seed: int, stream: Stream, log: list[tuple[str, int, int]]) -> torch.Tensor:
        cache = make_cache(SPECS[self.name], slots=1, blocks=60)
        twin, ends = Stream(seed), [n for what, n, _ in log if what == "turn ends"] + [stream.length]
        for what, n, room in log:
            if what == "turn ends":
                cache.pool.trim(twin.sequence)
                continue
            if what == "allocate":
                twin.sequence = cache.pool.allocate(n, n + room)
            else:
                cache.pool.extend(twin.sequence, twin.length + n, twin.length + n + room)
            prefill(cache, [(twin, n)])
            stop = ends.pop(0)
            while twin.length < stop:
                decode(cache, [twin])
        return twin.output()


@pytest.mark.parametrize("name", SPECS)
def test_lifetimes(name: str) -> None:
    machine = type("Lifetimes", (Lifetimes,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=15, deadline=None))
