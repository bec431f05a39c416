"""Sequences join, decode, fork, finish, come back, move and leave in any order: no page is lost, no answer changes."""

import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from driver import DEVICE, Stream, decode, make_cache, prefill
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.snapshots.header import Link

SPECS = {
    "full": preset("full"),
    "turbo": preset("turbo", rank=16, budget=32, values="rotated-4bit"),  # 16 dimensions do not suit 3 bits
    "turbo-late": preset("turbo:dense_below=200", rank=16, budget=32, values="rotated-4bit"),
    "turbo-host": preset("turbo-host", rank=16, budget=32, values="rotated-4bit"),
    "shadowkv": preset("shadowkv", rank=16, budget=32, outliers=3),
    "quest": preset("quest", budget=32),
}


@dataclass
class Life:
    """What a stream went through, so that it can be run again alone: what happened, and how long it was then.

    Attributes:
        events: name, tokens of the stream before it, new tokens, room for more.
        parent: the life that it was forked from, and that stream, as they were then.
    """

    events: list[tuple[str, int, int, int]]
    parent: tuple[Stream, "Life"] | None = None

    def until_now(self, stream: Stream) -> "Life":
        return Life([*self.events, ("now", stream.length, 0, 0)], self.parent)


class Lifetimes(RuleBasedStateMachine):
    """Every rule keeps a log per sequence, so that at the end each can be run again alone."""

    name = "full"

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.other = (make_cache(SPECS[self.name], slots=6, blocks=60) for _ in range(2))
        self.running: list[Stream] = []
        self.finished: list[Stream] = []
        self.lives: dict[Stream, Life] = {}

    def go_on(self, stream: Stream, new: int, room: int, block: int) -> None:
        self.lives[stream].events.append(("extend", stream.length, new, room))
        prefill(self.cache, [(stream, new)], block=block)
        self.running.append(stream)

    @rule(length=st.integers(1, 700), room=st.integers(0, 200))
    def join(self, length: int, room: int) -> None:
        cache = self.cache
        before = cache.free
        if not cache.demand(length, length + room).within(before):
            with pytest.raises(OutOfBlocks):
                cache.allocate(length, length + room)
            assert cache.free == before
            return
        stream = Stream(len(self.lives), cache.allocate(length, length + room))
        self.lives[stream] = Life([])
        self.go_on(stream, length, room, 150)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 70))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            ready = [s for s in self.running if s.length < s.sequence.capacity]
            if not ready:
                return
            decode(self.cache, ready)

    @precondition(lambda self: self.running or self.finished)
    @rule(data=st.data(), new=st.integers(1, 200), room=st.integers(0, 100))
    def fork(self, data: st.DataObject, new: int, room: int) -> None:
        """Continues after a page that the parent has, with tokens of its own."""
        parent = data.draw(st.sampled_from(self.running + self.finished))
        at = self.cache.fork_point(parent.sequence, data.draw(st.integers(0, parent.length)))
        if not at:
            return
        before = self.cache.free
        try:
            sequence = self.cache.fork(parent.sequence, at, at + new, at + new + room)
        except OutOfBlocks:
            assert self.cache.free == before
            return
        assert sequence.pages == parent.sequence.pages[: len(sequence.pages)]
        stream = parent.going_on(sequence, at, Stream(len(self.lives)))
        self.lives[stream] = Life([], (parent, self.lives[parent].until_now(parent)))
        self.go_on(stream, new, room, 70)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        stream = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.lives[stream].events.append(("trim", stream.length, 0, 0))
        self.cache.trim(stream.sequence)
        self.finished.append(stream)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), new=st.integers(1, 700), room=st.integers(0, 100))
    def come_back(self, data: st.DataObject, new: int, room: int) -> None:
        stream = data.draw(st.sampled_from(self.finished))
        start, cache = stream.length + new, self.cache
        before = cache.free
        if not cache.growth(stream.sequence, start, start + room).within(before):
            with pytest.raises(OutOfBlocks):
                cache.extend(stream.sequence, start, start + room)
            assert cache.free == before
            return
        cache.extend(stream.sequence, start, start + room)
        self.finished.remove(stream)
        self.go_on(stream, new, room, 40)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """To another cache and back, in one piece or in two."""
        stream = data.draw(st.sampled_from(self.running))
        capacity, length = stream.sequence.capacity, stream.length
        cut = self.cache.fork_point(stream.sequence, data.draw(st.integers(0, length - 1)))
        pieces = [(self.cache.snapshots.export(stream.sequence, cut), length)]
        if cut:
            pieces.insert(0, (self.cache.snapshots.export(stream.sequence), cut))
        try:
            there = self.other.snapshots.load(pieces, capacity)
        except ValueError:  # it became longer than what stays dense after its prompt, and is dense yet
            assert not stream.sequence.path
            return
        self.cache.release(stream.sequence)
        stream.sequence = self.cache.snapshots.load(self.other.snapshots.export(there), capacity)
        self.other.release(there)
        assert self.other.free == self.other.total

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on_beside(self, data: st.DataObject) -> None:
        """Continues as a sequence that shares what it can with the one that it was, which leaves."""
        stream = data.draw(st.sampled_from(self.running))
        old, length = stream.sequence, stream.length
        cut = self.cache.fork_point(old, data.draw(st.integers(0, length - 1)))
        before = self.cache.free
        if not cut:
            return
        try:
            new = self.cache.snapshots.export(old, cut)
            chain = [Link(new.header, length)]
            restoring = self.cache.snapshots.restore(chain, length, old.capacity, old)
        except (ValueError, OutOfBlocks):  # the first as in ``move``
            assert self.cache.free == before
            return
        for layer, piece in enumerate(new.data):
            restoring.write_layer(0, layer, piece)
        stream.sequence = restoring.sequence
        self.cache.release(old)

    @precondition(lambda self: self.running or self.finished)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.running + self.finished))
        (self.running if stream in self.running else self.finished).remove(stream)
        self.cache.release(stream.sequence)

    @invariant()
    def blocks_have_as_many_references_as_owners(self) -> None:
        held = [stream.sequence for stream in self.running + self.finished]
        for tier, ids in (
            ("device", [list(s.device_pages()) for s in held]),
            ("host", [[*s.host_reserve, *(n for one in s.path for n in one.value_pages)] for s in held]),
            ("states", [[*s.state_reserve, *(one.state for one in s.path if one.state is not None)] for s in held]),
        ):
            if tier == "host" and not self.cache.layout.host_fields:
                continue
            pool = self.cache.groups[0].pool.pools[tier]
            owners = Counter(block for one in ids for block in pool.blocks_of(one))
            assert pool.num_blocks - pool.free_blocks == len(owners)
            assert all(pool.references(block) == count for block, count in owners.items())
        written = Counter(n for s in held for n in (*s.ring, *s.compressed_reserve, *s.static_reserve))
        assert max(written.values(), default=1) == 1, "what is written has one owner"
        assert self.cache.held(held) == self.cache.total - self.cache.free

    def teardown(self) -> None:
        for stream in self.running + self.finished:
            self.cache.release(stream.sequence)
        assert self.cache.free == self.cache.total
        for stream, life in self.lives.items():
            cache = make_cache(SPECS[self.name], slots=2, blocks=200)
            twin = self.alone(cache, stream, life.until_now(stream))
            torch.testing.assert_close(stream.output(), twin.output(), atol=1e-4, rtol=1e-3)

    def alone(self, cache: KVCache, stream: Stream, life: Life) -> Stream:
        """The stream again, in a cache that it shares only with the ancestor that it is forked from."""
        twin = stream.again()
        for what, length, new, room in life.events:
            while twin.length < length and twin.sequence is not None:
                decode(cache, [twin])
            start = length + new
            if what == "trim":
                cache.trim(twin.sequence)
            elif what == "extend" and twin.sequence is not None:
                cache.extend(twin.sequence, start, start + room)
            elif what == "extend" and life.parent is None:
                twin.sequence = cache.allocate(start, start + room)
            elif what == "extend":
                parent = self.alone(cache, *life.parent)
                twin = parent.going_on(cache.fork(parent.sequence, length, start, start + room), length, stream)
                cache.release(parent.sequence)
            if new:
                prefill(cache, [(twin, new)])
        return twin


@pytest.mark.parametrize("name", SPECS)
def test_lifetimes(name: str) -> None:
    machine = type("Lifetimes", (Lifetimes,), {"name": name})
    # A GPU adds kernels, not orders of events, and takes longer for sequences as small as these.
    examples = 12 if DEVICE == "cpu" else 8
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=15, deadline=None))


def test_new_keys_and_values_live_until_attention_has_read_them() -> None:
    """In a captured step another stream stores them, while queries are computed."""
    cache = make_cache(SPECS["turbo"])
    stream = Stream(0, cache.allocate(600, 700))
    prefill(cache, [(stream, 600)])
    batch = cache.decode_batch(cache.plan_decode([stream.sequence]))
    q, k, v = (torch.randn(1, heads, 16, device=DEVICE) for heads in (6, 2, 2))
    new = [weakref.ref(x) for x in (k, v)]
    cache.append(0, k, v, batch)
    del k, v
    assert all(x() is not None for x in new)
    cache.start(0, q, batch)()
    assert all(x() is None for x in new)
