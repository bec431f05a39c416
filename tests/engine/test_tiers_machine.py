"""Whatever happens to requests, memory, files and servers: answers are those of computing anew, and nothing leaks."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from test_engine import GREEDY, leave_blocks, prompt, small_blocks
from tiers import assert_consistent, assert_nothing_left, evict_device, evict_host, settle

from shadowkv.engine.engine import Engine
from shadowkv.kvcache.policy.spec import PAGE

SLAB_GIB = 2**22 / 2**30
MAX_STEPS = 4000

PAGES = {letter: prompt(number, PAGE) for number, letter in enumerate("abc")}
EXAMPLES = {
    "full": 48,
    "turbo:dense_below=256,values=dense,min_budget=640": 12,
    "turbo:values=dense,min_budget=640": 12,
    "shadowkv": 12,
}

DOCUMENTS = ["aabbaabbaabb", "aabbccaabbcc", "aabc"]

texts = st.builds(lambda text, length: text[:length], st.sampled_from(DOCUMENTS), st.integers(0, 12))
numbers = st.integers(0, 2**20)
"""Which of what is there: not drawn from it, as what is there depends on time."""


class Serving(RuleBasedStateMachine):
    """An engine, what was asked of it and what it has answered."""

    def __init__(self, make: Any, kv: str, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.make, self.kv, self.answers = make, kv, answers
        self.directory = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch, 2 * PAGE)
        self.asked: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.histories: list[list[int]] = []
        self.engine: Engine | None = None
        self.count = 0

    @initialize(slabs=st.integers(0, 12), blocks=st.integers(10, 60), disk=st.booleans())
    def begin(self, slabs: int, blocks: int, disk: bool) -> None:
        self.options = {"kv": self.kv, "kv_offload_gib": max(slabs, not disk) * SLAB_GIB, "max_cached_seqs": 3}
        if disk:
            self.options["kv_disk_dir"] = str(self.directory / "cache")
        self.blocks = blocks
        self.open()

    def open(self) -> None:
        self.engine = self.make(**self.options)
        total = {name: tier.num_blocks for name, tier in self.engine.cache.groups[0].store.tiers.items()}
        leave_blocks(self.engine, max(self.blocks, self.least()), total["host"])

    def least(self) -> int:
        return self.engine.cache.demand(1200, 1300)["device"]

    def ask(self, ids: list[int], params: Any = GREEDY) -> None:
        ids = ids[-1200:]
        name = str(self.count)
        self.count += 1
        self.asked[name], self.got[name] = ids, []
        self.engine.add_request(name, ids, params)

    def expected(self, ids: list[int]) -> list[int]:
        key = tuple(ids)
        if key not in self.answers:
            if None not in self.answers:
                self.answers[None] = self.make(kv=self.kv, enable_prefix_caching=False)
            engine = self.answers[None]
            engine.add_request("x", ids, GREEDY)
            self.answers[key] = []
            while engine.has_work:
                for output in engine.step():
                    self.answers[key] += output.token_ids
        return self.answers[key]

    def take(self, outputs: Any) -> None:
        for output in outputs:
            assert output.error is None, output.error
            name = output.request_id
            self.got[name] += output.token_ids
            if output.finish_reason is not None:
                ids = self.asked.pop(name)
                if self.kv == "full":
                    assert self.got[name] == self.expected(ids)
                assert len(self.got[name]) == GREEDY.max_tokens
                self.histories.append(ids + self.got[name])

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(pages=texts, tail=st.integers(1, PAGE), number=st.integers(1, 3), salt=st.sampled_from([None, None, "salt"]))
    def questions(self, pages: str, tail: int, number: int, salt: str | None) -> None:
        for one in range(number):
            ids = [token for letter in pages for token in PAGES[letter]] + prompt(10 + one, tail)
            self.ask(ids, replace(GREEDY, cache_salt=salt))

    @rule(pages=texts, tail=st.integers(1, PAGE), number=st.integers(2, 4))
    def answers_to_one(self, pages: str, tail: int, number: int) -> None:
        for _ in range(number):
            self.ask([token for letter in pages for token in PAGES[letter]] + prompt(10, tail))

    @rule(number=numbers, more=st.integers(1, 2 * PAGE))
    def go_on(self, number: int, more: int) -> None:
        if self.histories:
            self.ask(self.histories[-1 - number % len(self.histories)] + prompt(20, more))

    @rule(number=numbers, at=numbers, more=st.integers(1, PAGE))
    def edit(self, number: int, at: int, more: int) -> None:
        if self.histories:
            history = self.histories[-1 - number % len(self.histories)]
            self.ask(history[: at % len(history)] + prompt(21, more))

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule()
    def finish(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.asked, "a request waits for ever"
        settle(self.engine)

    @rule(number=numbers)
    def abort(self, number: int) -> None:
        if self.asked:
            name = sorted(self.asked)[number % len(self.asked)]
            self.engine.abort(name)
            del self.asked[name]

    @rule(number=numbers)
    def come_back(self, number: int) -> None:
        self.finish()
        evict_device(self.engine)
        self.go_on(number, 10)

    @rule()
    def forget_device(self) -> None:
        evict_device(self.engine)

    @rule(count=st.integers(1, 4))
    def forget_host(self, count: int) -> None:
        evict_host(self.engine, count)

    @rule(number=numbers, at=numbers, harm=st.sampled_from(["remove", "cut", "flip"]))
    def harm(self, number: int, at: int, harm: str) -> None:
        files = sorted((self.directory / "cache").glob("*.safetensors"))
        if not files:
            return
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        content[at % len(content)] ^= 4
        if harm == "remove":
            file.unlink()
        else:
            file.write_bytes(content if harm == "flip" else content[:-1])

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        old = self.engine
        for name in list(self.asked):
            self.engine.abort(name)
        self.asked.clear()
        if not crash:
            self.engine.close()
        self.open()
        if crash:
            old.close()

    @invariant()
    def all_adds_up(self) -> None:
        if self.engine is not None:
            assert_consistent(self.engine)

    def teardown(self) -> None:
        try:
            if self.engine is not None:
                self.finish()
                assert_nothing_left(self.engine)
                self.engine.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.mark.parametrize("kv", EXAMPLES)
def test_answers_are_those_of_computing_anew_and_nothing_leaks(make: Any, kv: str) -> None:
    answers: dict[Any, Any] = {}
    limits = settings(
        max_examples=EXAMPLES[kv],
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Serving(make, kv, answers), settings=limits)
