"""Prompts that wait: what is cached of them is looked up when something changes, and held until they are admitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY, drain, leave_blocks, prompt
from test_prefix_cache import DOCUMENT, cached, until
from test_tiers import ask
from test_tiers_faults import QUESTION, filled, on
from tiers import assert_consistent, assert_nothing_left, evict_device, evict_host, settle

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

from faulty_disks import HeldDisk

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine

LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
SLAB_GIB = 2**22 / 2**30


def waiting(engine: Engine, *prompts: list[int]) -> None:
    """Has prompts wait, named by their numbers, for a request that runs."""
    engine.add_request("first", prompt(9, 50), LONG)
    until(engine, 1)
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), ids, GREEDY)
    settle(engine)
    assert len(engine.scheduler.waiting) == len(prompts)


def test_what_a_prompt_waits_for_leaves_host_memory_only_with_it(make: Any, tmp_path: Path) -> None:
    filled(make, tmp_path)
    engine = make(kv="full", kv_disk_dir=str(tmp_path), max_num_seqs=1)
    waiting(engine, QUESTION, DOCUMENT + [5])
    evict_host(engine)
    assert_consistent(engine)
    assert set(cached(drain(engine)).values()) == {0, len(QUESTION) // 64 * 64, len(DOCUMENT)}
    assert engine.stats().prefixes["disk"].restores == 1, "it was read again"
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


@pytest.mark.parametrize("when", ["read", "being read", "lost"])
def test_a_prompt_that_is_cancelled_holds_nothing(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    filled(make, tmp_path)
    disk = HeldDisk("open")
    disk.go_on.set()
    on(monkeypatch, disk)
    engine = make(kv="full", kv_disk_dir=str(tmp_path), max_num_seqs=1)
    while engine.scheduler.prefix_cache.opening:
        pass
    if when == "read":
        waiting(engine, QUESTION, QUESTION)
    else:
        engine.add_request("first", prompt(9, 50), LONG)
        until(engine, 1)
        settle(engine)
        if when == "lost":
            for file in tmp_path.glob("*.safetensors"):
                file.write_bytes(file.read_bytes()[:-100])
        disk.go_on.clear()
        for name in "01":
            engine.add_request(name, QUESTION, GREEDY)
        engine.step()
    assert engine.scheduler.prefix_cache.lower.copies.host.used_bytes
    engine.abort("1")
    assert_consistent(engine)
    engine.abort("0")
    disk.go_on.set()
    settle(engine)
    evict_host(engine)
    assert not engine.scheduler.prefix_cache.lower.copies.host.used_bytes
    drain(engine)
    settle(engine)
    assert_nothing_left(engine)
    engine.close()


def test_no_more_than_half_of_host_memory_is_held(make: Any, tmp_path: Path) -> None:
    options = {"kv": "full", "kv_disk_dir": str(tmp_path), "max_num_seqs": 1}
    questions = [prompt(seed, 700) for seed in range(5)]
    engine = make(**options)
    for ids in questions:
        ask(engine, ids)
    settle(engine)
    engine.close()
    engine = make(**options, kv_offload_gib=5 * SLAB_GIB)
    waiting(engine, *questions)
    evict_host(engine)
    host = engine.scheduler.prefix_cache.lower.copies.host
    assert host.used_bytes == 2 * host.slab_bytes
    assert_consistent(engine)
    assert sorted(cached(drain(engine)).values()) == [0, *5 * [640]]
    settle(engine)
    assert engine.stats().prefixes["host"].refused == 0
    assert_nothing_left(engine)
    engine.close()


def test_a_prompt_that_there_is_no_room_for_is_looked_up_when_something_changes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(kv="full", kv_offload_gib=0.0625)
    leave_blocks(engine, engine.cache.demand(50, 349)["device"] + 1, 0)
    waiting(engine, prompt(1, 300), prompt(2, 300))
    engine.step()
    asked, match, held = [], engine.scheduler.prefix_cache.match, engine.cache.held
    monkeypatch.setattr(engine.scheduler.prefix_cache, "match", lambda one: asked.append(one) or match(one))
    monkeypatch.setattr(engine.cache, "held", lambda some: asked.append(some) or held(some))
    for _ in range(20):
        assert engine.step()
    assert not asked
    engine.abort("first")
    outputs = drain(engine)
    assert asked and set(outputs) == {"0", "1"}
    settle(engine)
    assert_nothing_left(engine)


def test_what_is_computed_meanwhile_is_found(make: Any) -> None:
    engine = make(kv="turbo:values=dense,min_budget=640", max_num_seqs=1)
    waiting(engine, QUESTION, DOCUMENT + [5], DOCUMENT + [6])
    assert cached(drain(engine)) == {"first": 0, "0": 0, "1": len(DOCUMENT), "2": len(DOCUMENT)}
    evict_device(engine)
    assert engine.cache.free == engine.cache.total
