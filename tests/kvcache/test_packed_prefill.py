"""Prompts that are prefilled together give what each gives alone, in one attention call and one write per layer."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, make_cache, prefill

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.policy import spec
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.snapshots.header import Snapshot

POLICIES = {
    "full": preset("full"),
    "turbo": preset("turbo:dense_below=500", rank=16, budget=32, values="rotated-4bit"),
    "snapkv": preset("snapkv:dense_below=500", budget=32),
    "infinigen": preset("infinigen:dense_below=500", budget=32),
    "shadowkv": preset("shadowkv:dense_below=500", rank=16, budget=32, outliers=3),
}
LENGTHS = [70, 1, 130, 64, 900, 30]
ROOM = 700
"""Tokens that each may grow by: those that are dense have a state in reserve, which learns from their prompt."""


def start(cache: KVCache, seed: int, length: int) -> Stream:
    return Stream(seed, cache.allocate(length, length + ROOM))


def same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        # Several matrices at once may be computed in another order.
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    elif isinstance(a, Snapshot):
        assert a.header == b.header
        same(a.arrays(), b.arrays())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            same(a[name], b[name])
    else:
        raise AssertionError(f"{a} and {b} are not compared")


@pytest.mark.parametrize("block", [10000, 100])
@pytest.mark.parametrize("name", POLICIES)
def test_packed_prompts_equal_prompts_alone(name: str, block: int) -> None:
    cache = make_cache(POLICIES[name])
    old = start(cache, 99, 200)
    prefill(cache, [(old, 200)])
    packed = [start(cache, seed, length) for seed, length in enumerate(LENGTHS)]
    cache.extend(old.sequence, 250, 300)
    work = list(zip(packed, LENGTHS, strict=True))
    prefill(cache, [*work[:3], (old, 50), *work[3:]], block=block)
    for seed, (together, length) in enumerate(work):
        other = make_cache(POLICIES[name])
        alone = start(other, seed, length)
        prefill(other, [(alone, length)], block=10000)
        same(cache.snapshots.export(together.sequence), other.snapshots.export(alone.sequence))
        torch.testing.assert_close(together.output(), alone.output(), atol=2e-5, rtol=2e-5)
        if DEVICE == "cpu" and block > 1000:
            assert torch.equal(together.output(), alone.output())
        decode(cache, [together])
        decode(other, [alone])
        torch.testing.assert_close(together.output(), alone.output(), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["full", "turbo"])
def test_nothing_is_done_prompt_by_prompt_in_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "LATE", 5)
    cache, calls = make_cache(POLICIES[name]), Counter[str]()

    def counted(owner: Any, what: str) -> Any:
        function = getattr(owner, what)

        def counting(*args: Any) -> Any:
            calls[what] += 1
            return function(*args)

        return counting

    attention = cache.ops.dense_attention
    forms = {form: counted(attention, form) for form in ("packed", "causal")}
    monkeypatch.setattr(cache.ops, "dense_attention", replace(attention, **forms))
    for owner, what in ((cache.groups[0].store, "write_tokens"), (cache.groups[0].storing, "observe")):
        monkeypatch.setattr(owner, what, counted(owner, what))
    streams = [start(cache, seed, length) for seed, length in enumerate([70, 100, 64, 300, 90])]
    prefill(cache, [(stream, stream.sequence.capacity - ROOM) for stream in streams], block=1000)
    stored = 1  # both layers together
    observed = stored if cache.spec.compresses else 0
    assert calls == Counter(packed=SHAPE.num_layers, write_tokens=stored, observe=observed)


def test_prompts_that_a_block_has_some_of_attend_by_themselves() -> None:
    cache = make_cache(POLICIES["full"])
    streams = [start(cache, seed, length) for seed, length in enumerate((5, 7, 100, 99, 2))]
    (batch,) = cache.prefill_batch([(s.sequence, s.sequence.capacity - ROOM) for s in streams]).groups
    runs = [(rows.start, rows.stop, rows.alone is None, rows.lengths) for rows in batch.block(0, 213).row_ranges]
    assert runs == [(0, 213, True, (5, 7, 100, 99, 2))]
    runs = [(rows.start, rows.stop, rows.alone is None, rows.lengths) for rows in batch.block(8, 213).row_ranges]
    assert runs == [(8, 12, False, ()), (12, 213, True, (100, 99, 2))]
    assert batch.block(8, 213).row_ranges[1].cu_seqlens.tolist() == [0, 100, 199, 201]
    cut = [(rows.start, rows.stop, rows.alone is None) for rows in batch.block(2, 150).row_ranges]
    assert cut == [(2, 5, False), (5, 112, True), (112, 150, False)]
    for b in (batch.block(0, 50), batch.block(50, 213)):
        assert torch.equal(batch.last[b.kept] - b.start, b.last)
