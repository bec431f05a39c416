"""What benches measure on: free blocks lie mixed, random sequences are as good as others, selections repeat as set."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.sweeps.synthetic import ScriptedSelection, begin, fill_random, scatter
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig

SHAPE = ModelShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64)


def scattered_cache(kv: str, tokens: int, capacity: int) -> KVCache:
    """Room for four sequences of ``tokens`` that may grow to ``capacity``."""
    layout = Layout(preset(kv), SHAPE, torch.float32, capacity)
    need = layout.demand(tokens, capacity)
    memory = Blocks({tier: 4 * need[tier] for tier in ("device", "host")})
    ops = choose_ops(layout, RopeConfig(64), "cpu")
    cache = KVCache(layout, RopeConfig(64), slots=4, memory=memory, ops=ops)
    scatter(cache)
    return cache


@pytest.mark.parametrize(("kv", "pages"), [("full", "dense"), ("shadowkv", "host_reserve")])
def test_free_blocks_lie_mixed_and_nothing_is_held(kv, pages):
    cache = scattered_cache(kv, 4000, 4096)
    assert cache.free == cache.total
    names = getattr(cache.allocate(4000, 4096), pages)
    step = min(b - a for a, b in pairwise(sorted(names)))
    assert len(names) > 50
    assert sum(abs(a - b) == step for a, b in pairwise(names)) < len(names) / 2


def test_a_random_sequence_decodes():
    cache = scattered_cache("turbo:min_budget=640", 1000, 1024)  # not all tokens are selected
    sequence = cache.allocate(1000, 1024)
    fill_random(cache, sequence, 1000)
    assert sequence.length == 1000
    plan = cache.plan_decode([sequence])
    batch = cache.decode_batch(plan)
    for layer in range(SHAPE.num_layers):
        cache.append(layer, *torch.randn(2, 1, 2, 64), batch)
        out = cache.start(layer, torch.randn(1, 4, 64), batch)()
        assert out.isfinite().all()
        assert out.any()


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_selections_repeat_at_the_rate_that_is_set(share):
    wanted = {**ENGINE, "kv": "shadowkv:rank=32,budget=0.125,outliers=4", "fetch_buffer": 1.0}
    with tiny_model() as path:
        engine = Engine(EngineConfig(model=str(path), max_num_seqs=3, max_model_len=1024, max_cached_seqs=0, **wanted))
    scatter(engine.cache)
    engine.cache.selection_hook = ScriptedSelection(engine.cache, 700, share)
    begin(engine, [[7] * 720, [9] * 700], 40, synthetic=True)
    engine.step()  # finds nothing
    before = engine.stats().fetches
    for _ in range(20):
        assert len(engine.step()) == 2
    after = engine.stats().fetches
    fetched, selected = after.fetched - before.fetched, after.selected - before.selected
    assert selected
    assert fetched / selected == pytest.approx(1 - share, abs=0.12)
