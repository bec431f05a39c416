"""Densities of sparse prefills are those that the cache counts; longer prompts' follow from the blocks of a tile."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from benchmarks.sweeps import density
from benchmarks.sweeps.density import left_out
from benchmarks.sweeps.engines import densities_of
from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution import forward
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import prefill as sparse_prefill

BLOCK, open_cache = density.BLOCK, density.open_cache


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"SPARSE_FROM": 1024, "MIN_QUERIES": 100}.items():
        monkeypatch.setattr(sparse_prefill, name, value)
    monkeypatch.setattr("shadowkv.ops.select_blocks.reference.MIN_BLOCKS", 1)
    monkeypatch.setitem(forward.BLOCK_TOKENS, "cpu", 1024)


def test_a_file_that_sweeps_can_replay(tmp_path):
    out, rows = tmp_path / "new" / "density.json", tmp_path / "new" / "mass.csv"
    with tiny_model() as model:
        flags = [
            "--model",
            str(model),
            "--load-format",
            "dummy",
            "--device",
            "cpu",
            "--tasks",
            "fwe",
            "--out",
            str(out),
        ]
        flags += ["--length", "3000", "2200", "--extrapolate", "6000"]
        assert density.main([*flags, "--prefill-error", "0.3", "--mass-out", str(rows)]) == 0
    content = json.loads(out.read_text())
    ((name, found),) = content["models"].items()
    assert list(found["density"]) == ["2200", "3000"] and list(found["extrapolated"]) == ["6000"]
    assert [list(ends) for ends in found["by_end_of_block_of_queries"].values()] == [["2048", "3072"]] * 2
    assert found["by_task"]["3000"]["fwe"] == found["density"]["3000"]
    assert found["about"]["prefill_error"] == 0.3
    densities = densities_of(content["replay"])
    assert [*densities] == [2200, 3000, 6000]
    assert densities[3000] == pytest.approx(found["density"]["3000"], abs=1e-4)
    measured = list(csv.DictReader(rows.read_text().splitlines()))
    assert [(row["model"], row["length"], row["rule"]) for row in measured] == [
        (name, length, "prefill_error=0.3") for length in ("2200", "3000")
    ]
    for row in measured:
        assert float(row["density"]) == pytest.approx(found["density"][row["length"]], abs=1e-4)
        assert 0 < float(row["mass_left_out_mean"]) < float(row["mass_left_out_p99"]) < 0.9


def test_another_model_is_added_and_the_densest_is_replayed(tmp_path):
    path = tmp_path / "density.json"
    density.add_model(path, "a", {"density": {"100": 0.5, "200": 0.2}, "extrapolated": {"400": 0.1}})
    content = density.add_model(path, "b", {"density": {"200": 0.3, "400": 0.05}, "extrapolated": {}})
    assert [*content["models"]] == ["a", "b"]
    assert content["replay"] == "100=0.5000,200=0.3000,400=0.0500"  # measured, where a's is extrapolated
    assert json.loads(path.read_text()) == content


def test_what_is_left_out_is_that_of_the_exact_softmax(seed):
    n, m, block = 400, 1100, BLOCK
    q, k = torch.randn(n, 4, 16), torch.randn(m, 2, 16)
    indices, weights = torch.full((4, 4, 9), 7, dtype=torch.int32), torch.full((4, 4, 9), math.nan)
    counts = torch.full((4, 4), 3, dtype=torch.int32)
    indices[:, :, :3], weights[:, :, :3] = torch.tensor([0, 2, 5]), torch.tensor([1.0, 2.5, 1.0])
    counts[2, 1] = 9  # attends to everything: does not count
    means, largest = left_out(q, k, (indices, counts, weights))
    expected = []
    for head in range(4):
        for tile in range(3):  # the fourth is not full
            if (head, tile) == (2, 1):
                continue
            own = torch.arange(tile * block, (tile + 1) * block)
            scores = q[own, head] @ k[:, head // 2].T / 4
            shares = scores.masked_fill(torch.arange(m) > m - n + own[:, None], float("-inf")).softmax(1)
            stands_for = torch.tensor([1, 0, 2.5, 0, 0, 1, 0, 0, 0])[torch.arange(m) // block]
            expected.append(((shares * stands_for).sum(1) - 1).abs())
    torch.testing.assert_close(means, torch.stack(expected).mean(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(largest, torch.stack(expected).amax(1), atol=1e-5, rtol=1e-5)


def test_what_the_cache_counts(monkeypatch):
    caches = []
    monkeypatch.setattr(density, "open_cache", lambda *args: caches.append(open_cache(*args)) or caches[-1])
    with tiny_model() as model:
        loaded = load_from_config(EngineConfig(str(model), load_format="dummy", device="cpu", dtype="float32"))
        kept = density.measure(loaded, [n * n % 127 for n in range(2500)], 0.8)
        with pytest.raises(ValueError, match="900 tokens is attended to as a whole"):
            density.measure(loaded, [1] * 900, 0.8)
    assert [*kept] == [*range(8, 20)]
    assert isinstance(caches[0], KVCache)
    assert density.density(kept) == pytest.approx(caches[0].take_attention_density())
    assert kept[19] == 20 and kept[18] == 19  # the last 256 tokens see everything


def test_longer_prompts_go_on_as_tiles_grow():
    def prompt(tiles):
        kept = {tile: 3 * (tile + 1) ** 0.5 for tile in range(64, tiles)}
        return kept | {tile: tile + 1.0 for tile in (tiles - 2, tiles - 1)}

    assert density.growth(prompt(480)) == pytest.approx((3, 0.5))
    found = density.extrapolated(prompt(480), 2000 * BLOCK, 64 * BLOCK)
    assert found == pytest.approx(density.density(prompt(2000)))
    everything = {tile: tile + 1.0 for tile in range(64, 480)}
    assert density.extrapolated(everything, 1000 * BLOCK, 64 * BLOCK) == pytest.approx(1)
