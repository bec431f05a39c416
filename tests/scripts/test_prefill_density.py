"""Densities of sparse prefills are those that the cache counts; longer prompts' follow from the blocks of a tile."""

from __future__ import annotations

import json

import prefill_density
import pytest
from sweep_engine import densities_of
from tiny_model import tiny_model

from shadowkv.engine import prefill as engine_prefill
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.kvcache import sparse_prefill
from shadowkv.kvcache.cache import KVCache

BLOCK, open_cache = prefill_density.BLOCK, prefill_density.open_cache


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"SPARSE_FROM": 1024, "FEWEST_QUERIES": 100, "SHARE": 0.1}.items():
        monkeypatch.setattr(sparse_prefill, name, value)
    monkeypatch.setitem(engine_prefill.BLOCK_TOKENS, "cpu", 1024)


def test_a_file_that_sweeps_can_replay(tmp_path):
    out = tmp_path / "new" / "density.json"
    with tiny_model() as model:
        flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--tasks", "fwe"]
        flags += ["--length", "3000", "2200", "--extrapolate", "6000", "--share", "0.12", "--out", str(out)]
        assert prefill_density.main(flags) == 0
    found = json.loads(out.read_text())
    assert list(found["density"]) == ["2200", "3000"] and list(found["extrapolated"]) == ["6000"]
    assert [list(ends) for ends in found["by_end_of_block_of_queries"].values()] == [["2048", "3072"]] * 2
    assert found["by_task"]["3000"]["fwe"] == found["density"]["3000"]
    assert found["about"]["share"] == 0.12
    densities = densities_of(found["replay"])
    assert [*densities] == [2200, 3000, 6000]
    assert densities[3000] == pytest.approx(found["density"]["3000"], abs=1e-4)


def test_what_the_cache_counts(monkeypatch):
    caches = []
    monkeypatch.setattr(prefill_density, "open_cache", lambda *args: caches.append(open_cache(*args)) or caches[-1])
    with tiny_model() as model:
        loaded = load_from_config(EngineConfig(str(model), load_format="dummy", device="cpu", dtype="float32"))
        kept = prefill_density.measure(loaded, [n * n % 127 for n in range(2500)])
        with pytest.raises(ValueError, match="900 tokens is attended to as a whole"):
            prefill_density.measure(loaded, [1] * 900)
    assert [*kept] == [*range(8, 20)]
    assert isinstance(caches[0], KVCache)
    assert prefill_density.density(kept) == pytest.approx(caches[0].take_attention_density())
    assert kept[19] == 20 and kept[18] == 19  # the last 256 tokens see everything


def test_longer_prompts_keep_as_many_blocks_a_tile():
    kept = {tile: 10.0 for tile in range(64, 480)}
    kept |= {tile: tile + 1.0 for tile in (478, 479)}
    assert prefill_density.blocks_per_tile(kept) == 10
    assert prefill_density.extrapolated(10, 480 * BLOCK, 64 * BLOCK) == pytest.approx(prefill_density.density(kept))
    halves = [prefill_density.extrapolated(10, tiles * BLOCK, 64 * BLOCK) for tiles in (1000, 2000)]
    assert 0.4 < halves[1] / halves[0] < 0.6
    assert prefill_density.extrapolated(5000, 1000 * BLOCK, 64 * BLOCK) == 1
