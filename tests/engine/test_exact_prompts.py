"""Passes with a prompt that stays exact, in the form that is captured: padded, with all numbers on the device."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import prompt
from test_mixed_passes import CONFIG, apart, prefilled

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.cuda_graphs import EAGER_STEPS, CudaGraphs
from shadowkv.kvcache.prefill.exact import MAX_PROMPTS

RUNNING, JOINING = (700, 90, 5), (130, 1, 64, 600, 128)
KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "windows": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
    "windows and sinks": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "attention_bias": True, "swiglu_limit": 7.0,
    },
}  # fmt: skip


class Uncaptured(CudaGraphs):
    """Runs every pass as the captured function would, without a graph."""

    def __init__(self, engine: Engine, most: int = 8) -> None:
        runner = engine.runner
        self.cache, self._step, self.max_batch = engine.cache, runner.step, most
        self._logits = torch.full((most + MAX_PROMPTS, engine.model_config.vocab_size), torch.nan, device=engine.device)
        self.graphs, self.without, self.eager = Everything(), set(), Counter()
        self.captures, self.passes = 0, 0

    def _run(self, key: Any, numbers: np.ndarray, function: Any, dry_run: Any, at_once: bool = False) -> Any:
        static = torch.from_numpy(numbers).to(self.cache.device)
        dry_run(static)
        self.passes += 1
        return function(static)


class Everything(dict[Any, Any]):
    def __contains__(self, key: object) -> bool:
        return True


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def build(config: Any = CONFIG, **options: Any) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        given = {"model": str(tmp_path), "load_format": "dummy", "max_num_seqs": 8, "max_model_len": 2048}
        torch.manual_seed(3)
        return Engine(EngineConfig(**{**given, "dtype": "float32", "enforce_eager": True, **options}))

    return build


@pytest.mark.parametrize("kv", ["full", "turbo", "turbo:skip_layers=1", "fp8", "shadowkv"])
def test_a_padded_prompt_gives_what_it_gives_alone(make: Any, kv: str) -> None:
    logits = []
    for captured in (False, True):
        engine = make(kv=kv, kv_dense_below=1000)
        runner, cache = engine.runner, engine.cache
        if captured:
            runner.graphs = Uncaptured(engine)
        work = [(cache.allocate(n, n + 30), prompt(seed, n)) for seed, n in enumerate(RUNNING)]
        prefilled(runner, work)
        old, found = [sequence for sequence, _ in work], []
        for seed, length in enumerate(JOINING):
            new = cache.allocate(length, length + 30), prompt(10 + seed, length)
            assert cache.stays_exact(new[0], length)
            if captured:
                found.append(runner.decode(old, [7] * len(old), None, None, [new]).clone())
                assert new[0].length == length
            else:
                found.append(apart(runner, old, [new]))
            old.append(new[0])
            found.append(runner.decode(old, [9] * len(old)).clone())
        if captured:
            assert runner.graphs.passes >= len(JOINING)
        for sequence in old:
            cache.release(sequence)
        assert cache.free == cache.total
        logits.append(found)
    for alone, padded in zip(*logits, strict=True):
        torch.testing.assert_close(padded, alone, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kv", ["full", "turbo"])
@pytest.mark.parametrize("family", ["windows", "windows and sinks"])
def test_several_prompts_in_a_pass_and_windows(make: Any, kv: str, family: str) -> None:
    """More prompts than one, prompts longer than a window and than its ring, as many rows as tokens and more."""
    logits, config = [], {**CONFIG, **FAMILIES[family], "sliding_window": 100, "layer_types": KINDS}
    for captured in (False, True):
        engine = make(kv=kv, kv_dense_below=1000, config=config, max_num_seqs=32)
        runner, cache = engine.runner, engine.cache
        assert any(group.layout.window for group in cache.groups)
        if captured:
            runner.graphs = Uncaptured(engine, most=32)
        work = [(cache.allocate(n, n + 30), prompt(seed, n)) for seed, n in enumerate(RUNNING)]
        prefilled(runner, work)
        old, found = [sequence for sequence, _ in work], []
        for lengths in ((64, 192), (500, 1, 130), (1,) * MAX_PROMPTS):
            seeds = range(len(old), len(old) + len(lengths))
            new = [(cache.allocate(n, n + 30), prompt(seed, n)) for seed, n in zip(seeds, lengths, strict=True)]
            together = runner.decode(old, [7] * len(old), None, None, new) if captured else apart(runner, old, new)
            found.append(together.clone())
            old += [sequence for sequence, _ in new]
            found += [runner.decode(old, [9] * len(old)).clone() for _ in range(2)]
        for sequence in old:
            cache.release(sequence)
        assert cache.free == cache.total
        logits.append(found)
    for alone, padded in zip(*logits, strict=True):
        torch.testing.assert_close(padded, alone, atol=2e-4, rtol=1e-4)


def test_what_does_not_stay_exact_is_computed_as_ever(make: Any) -> None:
    engine = make(kv="turbo", kv_dense_below=256)
    cache = engine.cache
    assert not cache.stays_exact(cache.allocate(700, 800), 700), "it is compressed at once"
    assert not cache.stays_exact(cache.allocate(100, 800), 100), "the index learns from its queries for later"
    short = cache.allocate(100, 120)
    assert cache.stays_exact(short, 100)
    prefilled(engine.runner, [(short, prompt(1, 100))])
    assert not cache.stays_exact(short, 10), "it is no new sequence"
    graphs = Uncaptured(engine)
    old = [cache.allocate(5, 20)]
    prefilled(engine.runner, [(old[0], prompt(2, 5))])
    plan = cache.plan_decode(old)
    long = cache.allocate(2000, 2010)
    graphs.graphs = {}
    for _ in range(EAGER_STEPS):
        assert graphs.run(plan, [1], [-1], [long], [prompt(3, 100)]) is None, "there is no graph yet"
    assert graphs.run(plan, [1], [-1], [long], [prompt(3, 100)]) is not None, "such passes come again and again"
    assert graphs.run(plan, [1], [-1], [long], [prompt(3, 2000) + prompt(4, 49)]) is None, "longer than any graph"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_graphs_of_such_passes_give_what_each_gives_alone(make: Any, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = []
    for captured in (False, True):
        engine = make(kv=kv, kv_dense_below=1000, enforce_eager=not captured, dtype="bfloat16", skip_warmup=True)
        runner, cache, passes = engine.runner, engine.cache, []
        work = [(cache.allocate(n, n + 30), prompt(seed, n)) for seed, n in enumerate(RUNNING)]
        prefilled(runner, work)
        old, found = [sequence for sequence, _ in work], []
        if captured:
            for rows, batch in runner.graphs.mixed_shapes():
                runner.prepare(cache.forecast_decode([], [(old[0], 100)]), batch, rows)
            run = runner.graphs.run

            def counted(
                plan: Any, tokens: Any, sources: Any, new: Any, ids: Any, run: Any = run, seen: Any = passes
            ) -> Any:
                logits = run(plan, tokens, sources, new, ids)
                if new:
                    seen.append(logits)
                return logits

            monkeypatch.setattr(runner.graphs, "run", counted)
        for seed, length in enumerate(JOINING):
            new = cache.allocate(length, length + 30), prompt(10 + seed, length)
            both = runner.decode(old, [7] * len(old), None, None, [new]) if captured else apart(runner, old, [new])
            found.append(both.clone())
            old.append(new[0])
            found.append(runner.decode(old, [9] * len(old)).clone())
        if captured:
            assert len(passes) == len(JOINING) and all(out is not None for out in passes)
        logits.append(found)
    for alone, padded in zip(*logits, strict=True):
        assert padded.isfinite().all()
        assert ((padded - alone).norm(dim=1) / alone.norm(dim=1)).max() < 0.05
