"""Mixtures of experts through the engine: ragged prompts, packed and in blocks, and steps, as transformers computes
them; answers of ranks; what start-up lines say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from families import CASES, build
from test_quantized_engine import answers, assert_alike

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.models import load_model

MIXTURES = [
    name
    for name in CASES
    if ("moe" in name or name in ("mixtral", "gpt_oss", "minimax_m2")) and name != "qwen3_moe-window"
]
"""Without those whose layers all have a window, where a policy compresses nothing."""
LONG = {"max_position_embeddings": 1024, "head_dim": 16}


def lossless(kv: str, kv_dim: int) -> KVSpec:
    """A policy at the setting where it loses nothing."""
    if kv == "turbo":
        return preset("turbo:keys=low-rank,values=dense,dense_below=0", rank=kv_dim, budget=1.0)
    return preset(kv)


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 90) for _ in range(length)]


@torch.no_grad()
def oracle(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    """transformers' logits [V] behind a text."""
    return model(torch.tensor([text]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("block", [1024, 48])
@pytest.mark.parametrize("kv", ["full", "turbo"])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_transformers(
    name: str, kv: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ragged prompts, and of steps of all of them."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, block)
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kv, loaded.config.shape.kv_dim), 700, slots=3)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((500, 40, 5))]
    sequences = [cache.allocate(len(text), 700) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)
    for step in zip(*(prompt(10 + seed, 70) for seed in range(3)), strict=True):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
    assert kv == "full" or (cache.groups[0].pool.tables.compressed > 0).any(), (
        "nothing was compressed: the test would show nothing"
    )
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "mixtral", "gpt_oss", "minimax_m2", "qwen3_5_moe"])
def test_ranks_answer_as_one(name: str, tmp_path: Path) -> None:
    """With a part of every expert on each, and with whole ones."""
    build(name, tmp_path, LONG)
    _, expected = answers(tmp_path)
    for expert_parallel in (False, True):
        notes, found = answers(tmp_path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel)
        count = "2 of 4" if name == "mixtral" else "4 of 8"
        assert (f"experts rank 0 has {count} whole" in notes) == expert_parallel
        assert_alike(found, expected)


def test_start_up_lines_say_how_many_experts_there_are(tmp_path: Path) -> None:
    build("glm4_moe", tmp_path, LONG)
    notes, _ = answers(tmp_path, [prompt(0, 7)])
    assert notes[0].endswith(": 3 layers, 8 experts in 2 of them, 3 a token, float32 on cpu")
    assert any(line.startswith("kernels reference: ") and "grouped_matmul" in line for line in notes)
    assert not any(line.startswith("experts ") for line in notes)
    notes, _ = answers(tmp_path, [prompt(0, 7)], enable_expert_parallel=True)
    assert notes[1].startswith("experts --enable-expert-parallel has no effect on one rank; --tensor-parallel-size ")
