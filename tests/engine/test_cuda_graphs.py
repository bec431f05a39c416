"""Decode steps from captured graphs against the same steps run eagerly; needs a GPU."""

import gc
import json
import random
from pathlib import Path

import pytest
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.cuda_graphs import _no_garbage_collection
from shadowkv.kvcache.decode.planning import round_up
from shadowkv.kvcache.presets import PRESETS
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.sources import config_file
from shadowkv.ops.scaled_matmul import cuda as scaled_matmul


def test_rounding_up_wastes_at_most_a_quarter() -> None:
    assert [round_up(count) for count in (1, 2, 3, 5, 8, 9, 33, 960, 1952)] == [1, 2, 3, 5, 8, 10, 40, 1024, 2048]
    for count in range(1, 5000):
        assert count <= round_up(count) <= 1.25 * count
        assert round_up(round_up(count)) == round_up(count)


def test_nothing_is_collected_in_a_capture() -> None:
    with pytest.raises(RuntimeError), _no_garbage_collection():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


LENGTHS = [2500, 700, 90]
LATER = 900
"""Tokens of a later turn: with a fitted state they are a segment of their own."""


def steps(
    model: Path, kv: str, eager: bool, monkeypatch: pytest.MonkeyPatch, quantization: str | None = None
) -> torch.Tensor:
    """Logits of steps on fixed tokens, with sequences joining on the way and, at the end, with a later turn each."""
    config = EngineConfig(
        model=str(model), load_format="dummy", kv=kv,
        kv_dense_below=0, max_num_seqs=6, enforce_eager=eager, max_model_len=4096,
        gpu_memory_utilization=0.9, quantization=quantization,
    )  # fmt: skip
    engine = Engine(config)
    assert (engine.runner.graphs is None) == eager
    if eager:
        # Of the same shapes: additions in another order change last bits, and those which tokens are drawn.
        plan = engine.cache.plan_decode
        monkeypatch.setattr(engine.cache, "plan_decode", lambda *some: engine.cache.rounded(plan(*some), 6))
    draw, sequences, logits = random.Random(0), [], []

    def feed(sequence: CachedSequence, count: int) -> None:
        prompt = [draw.randrange(500) for _ in range(count)]
        with torch.inference_mode():
            for _ in engine.runner.prefill([(sequence, prompt)]):
                pass

    def decode() -> None:
        for _ in range(70):
            tokens = [draw.randrange(500) for _ in sequences]
            logits.append(engine.runner.decode(sequences, tokens).clone())

    for joining in LENGTHS:
        sequences.append(engine.cache.allocate(joining, joining + 400))
        feed(sequences[-1], joining)
        decode()
    for sequence in sequences:
        engine.cache.extend(sequence, sequence.length + LATER, sequence.length + LATER + 400)
        feed(sequence, LATER)
        decode()
    # Of the first, whose prompt was long enough for one: how often others outgrow theirs differs by policy.
    segments = len(sequences[0].path)
    assert segments == (0 if kv == "full" else 2 if engine.cache.layout.learns else 1)
    return torch.cat(logits)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 384,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.skipif(bool(scaled_matmul.missing()), reason="needs a GPU of compute capability 8.9")
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_graphs_and_eager_steps_agree_with_fp8_weights(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    eager, graphs = (steps(tmp_path, kv, eager, monkeypatch, "fp8") for eager in (True, False))
    assert graphs.isfinite().all()
    error = (eager - graphs).norm(dim=1) / eager.norm(dim=1)
    assert error.max() < 0.05, error
    if kv == "full":
        exact = steps(tmp_path, kv, True, monkeypatch)
        error = (eager - exact).norm(dim=1) / exact.norm(dim=1)
        assert 0.02 < error.median() < 0.25, error  # 0.04 of each of twelve products in a row


GEMMA4 = {
    **json.loads(config_file("gemma-4-31b").read_text()),
    **{"vocab_size": 512, "hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "num_global_key_value_heads": 2, "sliding_window": 512, "num_hidden_layers": 4},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Gemma-4-31B's kinds of layers and sizes of heads."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_graphs_and_eager_steps_agree_with_heads_of_512(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    eager, graphs = (steps(tmp_path, kv, eager, monkeypatch) for eager in (True, False))
    assert graphs.isfinite().all()
    error = (eager - graphs).norm(dim=1) / eager.norm(dim=1)
    assert error.max() < 0.05, error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", [*sorted(PRESETS), "turbo:sampled=0.0", "turbo:values=rotated-3bit"])
def test_graphs_and_eager_steps_agree(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    eager, graphs = (steps(tmp_path, kv, eager, monkeypatch) for eager in (True, False))
    assert graphs.isfinite().all()
    error = (eager - graphs).norm(dim=1) / eager.norm(dim=1)
    assert error.max() < 0.05, error
