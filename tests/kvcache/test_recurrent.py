"""Recurrent states: whatever becomes of sequences, each state is that of its tokens, and each row has one owner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.policy.shape import LayerKind, ModelShape, StateArray
from shadowkv.kvcache.recurrent import states as module
from shadowkv.kvcache.recurrent.layout import RING, RecurrentLayout, StateSettings
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentTokens, block
from shadowkv.kvcache.recurrent.states import Checkpoint, RecurrentSequence, RecurrentStates

CPU = torch.device("cpu")
KIND = LayerKind(state=(StateArray("x", (1,)),))
SHAPE = ModelShape(3, 1, 1, 8, kinds=(KIND, LayerKind(), KIND))
SEQUENCES = 4
EVERY = 128
DRAFTED = 5


def layout(checkpoints: int | None = None, drafted: int = 0) -> RecurrentLayout:
    found = RecurrentLayout.of(SHAPE, StateSettings(checkpoints, drafted=drafted))
    assert found is not None
    return found


def digest(tokens: list[int]) -> float:
    """The state after tokens: a number that tells prefixes apart."""
    return float(torch.tensor(hash(tuple(tokens)) % (1 << 24), dtype=torch.float32))


@dataclass
class Living:
    sequence: RecurrentSequence
    tokens: list[int] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    @initialize(checkpoints=st.sampled_from([None, 0, 1, 9]))
    def start(self, checkpoints: int | None) -> None:
        self.states = RecurrentStates(layout(checkpoints, DRAFTED), SEQUENCES, CPU)
        self.lives: list[Living] = []
        self.readings: list[tuple[Checkpoint, list[int]]] = []
        self.next = 0

    def write(self, row: int, tokens: list[int]) -> None:
        self.states.arrays["x"][:, row] = digest(tokens)

    def read(self, row: int) -> float:
        values = self.states.arrays["x"][:, row].unique()
        assert len(values) == 1, "the layers disagree"
        return float(values)

    def new_tokens(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def pick(self, data: st.DataObject, growing: bool) -> Living:
        return data.draw(st.sampled_from([one for one in self.lives if bool(one.sequence.ring) == growing]))

    def any(self, growing: bool) -> bool:
        return any(bool(one.sequence.ring) == growing for one in self.lives)

    @precondition(lambda self: len(self.lives) < SEQUENCES)
    @rule()
    def begin(self) -> None:
        one = Living(self.states.begin(None, 0, 0))
        assert self.read(one.sequence.row(0)) == 0
        self.write(one.sequence.row(0), [])
        self.lives.append(one)

    @precondition(lambda self: self.any(True))
    @rule(data=st.data(), count=st.integers(1, 400), cut=st.integers(1, 100), fails=st.booleans())
    def prefill(self, data: st.DataObject, count: int, cut: int, fails: bool) -> None:
        """In blocks of ``cut`` tokens, as the layers see them: each span continues a state that is right."""
        one, cached = self.pick(data, True), 0
        cached, tokens = len(one.tokens), one.tokens + self.new_tokens(count)
        planned = self.states.plan_checkpoints(one.sequence, cached, (len(tokens) - 1) // 64 * 64)
        prompt = RecurrentTokens(one.sequence, 0, count, cached, planned)
        for start in range(0, count, cut):
            part, at = block([prompt], start, min(count, start + cut), CPU), cached + start
            for _, spans in part.rounds:
                assert spans.lengths is not None
                assert self.read(int(spans.read)) == digest(tokens[:at])
                at += sum(spans.lengths)
                self.write(int(spans.write), tokens[:at])
            assert at == cached + min(count, start + cut)
        if fails:
            self.lives.remove(one)
            return self.states.release(one.sequence)
        one.tokens = tokens
        self.states.end_prefill(one.sequence, len(tokens))

    @precondition(lambda self: self.any(True))
    @rule(data=st.data(), steps=st.integers(1, 3), taken_back=st.integers(0, 1))
    def decode(self, data: st.DataObject, steps: int, taken_back: int) -> None:
        one = self.pick(data, True)
        self.plan()
        for _ in range(steps):
            self.step(one, 1)
        length = len(one.tokens) - taken_back
        if length >= one.sequence.fixed(len(one.tokens)):
            one.sequence.since = one.sequence.fixed(len(one.tokens))
            one.tokens = one.tokens[:length]
            if taken_back:
                assert one.sequence.fixed(length) == length, "the state before was written over"

    def plan(self) -> None:
        """Gives rows of drafted tokens back, as the next step's plan does."""
        for one in self.lives:
            if len(one.sequence.ring) > RING:
                self.states.resize(one.sequence, len(one.tokens))

    def step(self, one: Living, count: int) -> None:
        for _ in range(count):
            assert self.read(one.sequence.row(len(one.tokens))) == digest(one.tokens)
            one.tokens = one.tokens + self.new_tokens(1)
            self.write(one.sequence.row(len(one.tokens)), one.tokens)

    @precondition(lambda self: self.any(True))
    @rule(data=st.data(), drafted=st.lists(st.integers(1, DRAFTED), min_size=1, max_size=3), fails=st.booleans())
    def draft(self, data: st.DataObject, drafted: list[int], fails: bool) -> None:
        """Of several sequences together, of which each keeps any number of its new tokens, or none if the step
        fails."""
        self.plan()
        growing, left = [one for one in self.lives if one.sequence.ring], DRAFTED
        for one, wanted in zip(data.draw(st.permutations(growing)), drafted):
            before, count = one.tokens, min(wanted, left)
            left -= count
            self.states.resize(one.sequence, len(before), count + 2)
            one.sequence.since = len(before)
            self.step(one, count + 1)
            assert one.sequence.fixed(len(one.tokens)) == len(before)
            length = len(before) + (0 if fails else data.draw(st.integers(1, count + 1)))
            one.tokens = one.tokens[:length]

    @precondition(lambda self: self.any(True))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        one = self.pick(data, True)
        self.states.pause(one.sequence, len(one.tokens))
        assert one.sequence.fixed(len(one.tokens)) == len(one.tokens)

    @precondition(lambda self: self.any(False))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        one = self.pick(data, False)
        if one.sequence.fixed(len(one.tokens)) <= len(one.tokens):
            self.states.resume(one.sequence, len(one.tokens))

    @precondition(lambda self: 0 < len(self.lives) < SEQUENCES)
    @rule(data=st.data(), length=st.integers(0, 2000))
    def fork(self, data: st.DataObject, length: int) -> None:
        parent = data.draw(st.sampled_from(self.lives))
        if point := parent.sequence.fork_point(min(length, len(parent.tokens))):
            child = Living(self.states.begin(parent.sequence, point, point), parent.tokens[:point])
            self.lives.append(child)

    @precondition(lambda self: 0 < len(self.lives) < SEQUENCES)
    @rule(data=st.data(), length=st.integers(0, 2000), more=st.integers(1, 200), whole=st.booleans())
    def restore(self, data: st.DataObject, length: int, more: int, whole: bool) -> None:
        """Behind a parent that has only the first tokens."""
        parent = data.draw(st.sampled_from(self.lives))
        shared = min(length, len(parent.tokens)) // 64 * 64
        tokens = parent.tokens[:shared] + self.new_tokens(64 if whole else more)
        child = Living(self.states.begin(parent.sequence, shared, len(tokens)), tokens)
        for row in child.sequence.restored_rows:
            self.write(row, tokens)
        self.lives.append(child)

    @precondition(lambda self: any(one.sequence.checkpoints for one in self.lives))
    @rule(data=st.data())
    def open_reading(self, data: st.DataObject) -> None:
        """Of a state that stays, whatever becomes of its sequences."""
        kept = [(x, one) for one in self.lives for x in one.sequence.checkpoints if x.row is not None]
        if not kept:
            return
        checkpoint, one = data.draw(st.sampled_from(kept))
        read = {id(checkpoint) for checkpoint, _ in self.readings}
        written = sum(len(one.sequence.pending) for one in self.lives)
        if id(checkpoint) not in read and len(read) + written == self.states.reserved:
            with pytest.raises(OutOfBlocks, match="are being written or read"):
                self.states.open_reading(checkpoint)
            return
        self.states.open_reading(checkpoint)
        self.readings.append((checkpoint, one.tokens[: checkpoint.position]))

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def close_reading(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.readings) - 1))
        self.states.close_reading(self.readings.pop(number)[0])

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.lives))
        self.lives.remove(one)
        self.states.release(one.sequence)

    @invariant()
    def states_are_right_and_owned_once(self) -> None:
        if not hasattr(self, "lives"):
            return
        rows, users = Counter[int](), Counter[int]()
        shared = {}
        for one in self.lives:
            rows.update(one.sequence.ring)
            if one.sequence.ring:
                assert self.read(one.sequence.row(len(one.tokens))) == digest(one.tokens)
            rows.update(kept.row for kept in one.sequence.pending if kept.row is not None)
            for kept in one.sequence.checkpoints:
                users[id(kept)] += 1
                shared[id(kept)] = kept
                if kept.row is not None:
                    assert self.read(kept.row) == digest(one.tokens[: kept.position])
        for kept, tokens in self.readings:
            users[id(kept)] += 1
            shared[id(kept)] = kept
            assert kept.row is not None and self.read(kept.row) == digest(tokens)
        rows.update(kept.row for kept in shared.values() if kept.row is not None)
        assert max(rows.values(), default=1) == 1
        assert all(kept.users == users[number] for number, kept in shared.items() if kept.row is not None)
        in_rings = sum(len(one.sequence.ring) for one in self.lives)
        of_states = self.states.used_bytes, self.states.checkpoint_bytes
        assert of_states == (len(rows) * 8, (len(rows) - in_rings) * 8)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", EVERY)


def test_lives() -> None:
    Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    Lives.TestCase("runTest").runTest()


def test_rings_never_lack_room() -> None:
    """However many checkpoints prefills write."""
    states = RecurrentStates(layout(), SEQUENCES, CPU)
    first = states.begin(None, 0, 0)
    planned = states.plan_checkpoints(first, 0, 100 * EVERY)
    assert len(planned) == SEQUENCES // 2 and planned[-1].position == 100 * EVERY
    others = [states.begin(None, 0, 0) for _ in range(SEQUENCES - 1)]
    assert len({row for one in (first, *others) for row in one.ring}) == RING * SEQUENCES
    ends = [states.plan_checkpoints(one, 0, 64) for one in others]
    assert [len(planned) for planned in ends] == [1, 1, 0], "half of the room is for the ends of prompts"
    states.end_prefill(first, 100 * EVERY + 1)
    for one in (first, *others):
        states.release(one)
    assert states.used_bytes == 0


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    states = RecurrentStates(layout(), 2, CPU)
    first, second = (states.begin(None, 0, 0) for _ in range(2))
    for one, length in ((first, 64), (second, 128)):
        states.plan_checkpoints(one, 0, length)
        states.end_prefill(one, length + 1)
    states.pause(second, 129)  # its other row is free again
    states.begin(first, 64, 64)  # takes that row, and the place of the second's first checkpoint
    assert second.fork_point(200) == 0 and first.fork_point(200) == 64
    assert second.fixed(129) == 129, "its newest state is younger"


def test_prefills_write_checkpoints_only_where_there_is_room_for_others_to_use() -> None:
    states = RecurrentStates(layout(0), 2, CPU)
    assert not states.plan_checkpoints(states.begin(None, 0, 0), 0, 640)
    states = RecurrentStates(layout(3), 2, CPU)
    alone = states.begin(None, 0, 0)
    alone.keeps = False
    assert not states.plan_checkpoints(alone, 0, 640) and not states.checkpoint_bytes
    assert len(states.plan_checkpoints(states.begin(None, 0, 0), 0, 640)) == 2


def test_bytes() -> None:
    found = layout()
    assert found.layers == (0, 2) and found.state_bytes == 2 * 4
    assert found.nbytes(3) == (3 * RING + 3 + 1) * 8
    assert layout(5, 7).nbytes(3) == (3 * RING + 5 + 7 + 1) * 8
    assert layout(5).nbytes(3) == (3 * RING + 5 + 1) * 8 and layout(0).nbytes(3) == (3 * RING + 1) * 8
    assert RecurrentLayout.of(ModelShape(2, 1, 1, 8)) is None
