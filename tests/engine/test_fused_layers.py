"""Steps whose layers are one call have the logits of those that go from op to op, and what cannot take it does that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from noted_calls import noted_calls
from test_engine import prompt
from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.fused_layers import REPLACED
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_engine_parts
from shadowkv.eval.running.caches import prefill
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.ops.extension import cpu_missing

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from families import build

pytestmark = pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")

LENGTHS, STEPS = (700, 3, 330), 70


def runner_of(folder: Path, backends: dict[str, str], **options: Any) -> Runner:
    settings = {"kv_dense_below": 0, "max_num_seqs": 4, "device": "cpu", "max_model_len": 1024, **options}
    loaded, cache, _ = load_engine_parts(EngineConfig(model=str(folder), **settings), backends=backends)
    return Runner(loaded.model, cache)


def decoded(runner: Runner) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """Logits of steps of three sequences, and what they selected, by layer."""
    selections: list[tuple[int, Tensor]] = []

    def see(layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        selections.append((layer, selected.chunks))
        return selected

    runner.cache.selection_hook = see
    vocabulary = runner.model.config.vocab_size
    texts = [[token % vocabulary for token in prompt(seed, length)] for seed, length in enumerate(LENGTHS)]
    sequences = [runner.cache.allocate(len(text), 1024) for text in texts]
    prefill(runner.model, runner.cache, list(zip(sequences, texts, strict=True)))
    return [runner.decode(sequences, [step % vocabulary] * 3) for step in range(STEPS)], selections


def assert_same(folder: Path, **options: Any) -> int:
    """Returns how many selections were made."""
    fused, general = (runner_of(folder, backends, **options) for backends in ({}, {"decode_layers": "reference"}))
    assert fused._fused is not None and general._fused is None
    (found, seen), (expected, others) = decoded(fused), decoded(general)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4 * float(other.abs().max()))
    for (layer, mine), (other_layer, other) in zip(seen, others, strict=True):
        assert layer == other_layer and mine.shape == other.shape
    return len(seen)


@pytest.mark.parametrize("family", ["llama-bias-head-dim", "qwen2", "qwen3", "glm4", "phi3-partial", "qwen3_5"])
def test_every_kind_of_layer(tmp_path: Path, family: str) -> None:
    build(family, tmp_path, {"max_position_embeddings": 1024})
    assert assert_same(tmp_path, kv="full") == 0


@pytest.mark.parametrize("kv", ["shadowkv:budget=700,outliers=4", "turboquant-4", "quest:budget=700"])
def test_compressed_sequences_beside_exact_ones(tmp_path: Path, kv: str) -> None:
    """With a budget for all tokens: rounding may not decide what is selected."""
    build("llama-bias-head-dim", tmp_path, {"max_position_embeddings": 1024, "hidden_size": 64})
    assert (assert_same(tmp_path, kv=kv) > 0) == (kv != "turboquant-4")


@pytest.mark.parametrize("kv", ["full", "quest:budget=700"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5-more-full"])
def test_layers_with_recurrent_states(tmp_path: Path, family: str, kv: str) -> None:
    """The first layer has linear attention or full attention, and so has the last."""
    build(family, tmp_path, {"max_position_embeddings": 1024, "head_dim": 16})
    assert (assert_same(tmp_path, kv=kv, mamba_ssm_cache_dtype="bfloat16") > 0) == (kv != "full")


def test_greedy_answers_of_a_hybrid(tmp_path: Path) -> None:
    build("qwen3_5", tmp_path, {"max_position_embeddings": 1024, "head_dim": 16})
    answers = []
    for backends in ({}, {"decode_layers": "reference"}):
        runner, answer = runner_of(tmp_path, backends, kv="full", dtype="float32"), [5]
        sequence = runner.cache.allocate(1, 1024)
        prefill(runner.model, runner.cache, [(sequence, [1])])
        for _ in range(100):
            answer.append(int(runner.decode([sequence], answer[-1:]).argmax()))
        answers.append(answer)
    assert answers[0] == answers[1] and len({*answers[0]}) > 3


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama-bias-head-dim", {"dtype": "bfloat16"}), ("llama-bias-head-dim", {"kv": "turbo-host", "fetch_buffer": 2.0}),
     ("nemotron_h", {}), ("qwen3_5_moe", {})],
)  # fmt: skip
def test_what_cannot_take_it_goes_from_op_to_op(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    build(family, tmp_path, {"max_position_embeddings": 1024, "hidden_size": 64})
    assert runner_of(tmp_path, {}, **options)._fused is None


@pytest.mark.parametrize(
    ("backends", "fuses"),
    [
        ({"decode_layers": "reference"}, False),
        ({"gated_delta_rule": "reference"}, False),
        ({"causal_convolution": "reference"}, False),
        ({"paged_attention": "reference"}, False),
        ({"rms_norm": "reference"}, False),
        ({"gated_delta_rule": "cpu", "paged_attention": "cpu"}, True),
        ({"sample_tokens": "reference"}, True),
    ],
    ids=str,
)
def test_a_backend_that_is_asked_for_is_not_bypassed(tmp_path: Path, backends: dict[str, str], fuses: bool) -> None:
    build("qwen3_5", tmp_path, {"max_position_embeddings": 1024})
    assert (runner_of(tmp_path, backends, kv="full", dtype="float32")._fused is not None) == fuses


@pytest.mark.parametrize("kv", ["full", "turboquant-4"])
def test_every_op_that_is_bypassed_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    """These are the ops that steps call only without fusion."""
    build("qwen3_5", tmp_path, {"max_position_embeddings": 1024})
    called = []
    for backends in ({}, {"decode_layers": "reference"}):
        runner = runner_of(tmp_path, backends, kv=kv, dtype="float32")
        sequence = runner.cache.allocate(300, 1024)
        prefill(runner.model, runner.cache, [(sequence, [1] * 300)])
        called.append(noted_calls(runner.cache.ops, monkeypatch))
        runner.decode([sequence], [5])
    fused, general = called
    assert "decode_layers" in fused and general - fused <= {*REPLACED} and "gated_delta_rule" in general
