"""Prompts that are computed in a decode step's pass, and the step with them, give what each gives alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import prompt

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.kvcache.presets import PRESETS
from shadowkv.kvcache.sequences.sequence import CachedSequence

ON_GPU = torch.cuda.is_available()
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
RUNNING, JOINING = (700, 90), (130, 1, 600)
CHANGED = "turbo:min_budget=640", "turbo:min_budget=640,skip_layers=1", "turbo:min_budget=640,sampled=0.0"
"""With narrow keys, ``turbo`` alone would select all tokens of these sequences."""
COMPRESSING = 66
"""Steps in which every compressed sequence compresses a page."""


def prefilled(runner: Runner, work: list[tuple[CachedSequence, list[int]]]) -> torch.Tensor:
    """Logits behind new tokens that are computed by themselves."""
    steps = runner.prefill(work)
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as end:
                logits: torch.Tensor = end.value[0]
                return logits.clone()


def apart(runner: Runner, old: list[CachedSequence], work: list[tuple[CachedSequence, list[int]]]) -> torch.Tensor:
    """Logits of a step of ``old`` and of new tokens, one after the other."""
    return torch.cat((runner.decode(old, [7] * len(old)).clone(), prefilled(runner, work)))


def together(runner: Runner, old: list[CachedSequence], work: list[tuple[CachedSequence, list[int]]]) -> torch.Tensor:
    """The same in one pass."""
    return runner.decode(old, [7] * len(old), None, None, work).clone()


def logits_of(engine: Engine, both: Any) -> list[torch.Tensor]:
    """Of steps, of one with new sequences, of one with a later turn, by when pages of all have been compressed, and of
    steps behind it."""
    runner, cache, found = engine.runner, engine.cache, []

    def started(seed: int, length: int) -> tuple[CachedSequence, list[int]]:
        return cache.allocate(length, length + 400), prompt(seed, length)

    def decoded(sequences: list[CachedSequence], count: int) -> None:
        for number in range(count):
            tokens = [(31 * number + row) % 500 for row in range(len(sequences))]
            found.append(runner.decode(sequences, tokens).clone())

    work = [started(seed, length) for seed, length in enumerate(RUNNING)]
    prefilled(runner, work)
    old = [sequence for sequence, _ in work]
    decoded(old, 3)
    new = [started(10 + seed, length) for seed, length in enumerate(JOINING)]
    found.append(both(runner, old, new))
    turn, *others = [*old, *(sequence for sequence, _ in new)]
    decoded([turn, *others], COMPRESSING)
    cache.extend(turn, turn.length + 100, turn.length + 300)
    found.append(both(runner, others, [(turn, prompt(20, 100))]))
    decoded([turn, *others], 3)
    for sequence in (turn, *others):
        cache.release(sequence)
    assert cache.free == cache.total
    return found


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Products whose bits do not depend on how many rows there are: a last bit may change a code of a few bits."""
    product = (x.double() @ weight.double().T).to(x.dtype)
    return product if bias is None else product + bias


@pytest.mark.parametrize("kv", [*sorted(PRESETS), *CHANGED])
def test_one_pass_equals_two(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(torch.nn.functional, "linear", exact_linear)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = Engine(
        EngineConfig(
            model=str(tmp_path), load_format="dummy", kv=kv, kv_dense_below=0, max_num_seqs=8, max_model_len=2048,
            fetch_buffer=2.0, gpu_memory_utilization=0.5,
        ),
        backends={"decode_layers": "reference"},  # whose products are the exact ones, too
    )  # fmt: skip
    errors = []
    for got, wanted in zip(logits_of(engine, together), logits_of(engine, apart), strict=True):
        assert got.isfinite().all()
        errors.append((got - wanted).norm(dim=1) / wanted.norm(dim=1))
        if not ON_GPU:
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.cat(errors).median() < 0.05  # on a GPU, where other rows of a product round its sums differently
