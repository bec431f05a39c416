"""Batches split in two: the same logits, and one micro-batch computes while values of the other are fetched."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache.decode.fetching import TWO_BATCH_CHUNKS, Fetching
from shadowkv.layers.decoder_layer import DecoderLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1500, 700, 90, 1000, 2000]  # an odd number, one of them dense
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


def open_engine(folder: Path, kv: str) -> Engine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Engine(
        EngineConfig(
            model=str(folder), load_format="dummy", kv=kv,
            kv_dense_below=0, max_num_seqs=len(LENGTHS), max_model_len=4096,
            dtype="float32" if DEVICE == "cpu" else "bfloat16", fetch_buffer=1.5, gpu_memory_utilization=0.5,
        )
    )  # fmt: skip


def steps(engine: Engine, count: int) -> torch.Tensor:
    """Logits of steps on fixed tokens, while pages are compressed."""
    draw, sequences = random.Random(0), []
    for length in LENGTHS:
        sequence = engine.cache.allocate(length, length + count)
        with torch.inference_mode():
            for _ in engine.runner.prefill([(sequence, [draw.randrange(500) for _ in range(length)])]):
                pass
        sequences.append(sequence)
    logits = [engine.runner.decode(sequences, [draw.randrange(500) for _ in LENGTHS]).clone() for _ in range(count)]
    for sequence in sequences:
        engine.cache.release(sequence)
    return torch.stack(logits)


@pytest.mark.parametrize("kv", ["shadowkv", "turbo-host"])
def test_micro_batches_change_nothing(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = steps(open_engine(tmp_path, kv), 70)
    monkeypatch.setattr(Fetching, "micro_batches", lambda self, budget: 2)
    engine, order, fetches = open_engine(tmp_path, kv), [], []
    start, fetch = DecoderLayer.start, engine.cache.ops.fetch_chunks

    def watched(layer: DecoderLayer, x: torch.Tensor, *rest: object) -> object:
        finish, of = start(layer, x, *rest), (layer.attention.layer, len(x))
        order.append(("start", *of))
        return lambda: (order.append(("finish", *of)), finish())[1]

    def fetched(*args: object) -> torch.Tensor:
        *_, selected, _, _, overlapped = args
        fetches.append((len(selected), overlapped))
        return fetch(*args)

    monkeypatch.setattr(DecoderLayer, "start", watched)
    monkeypatch.setattr(engine.cache.ops, "fetch_chunks", fetched)
    apart = steps(engine, 70)
    error = (apart - together).norm(dim=-1) / together.norm(dim=-1)
    assert error.max() < 0.05, error.max()
    # Sums in another order tell apart what a sketch rates alike: a step may take the other one of two chunks.
    assert DEVICE != "cpu" or (error > 1e-4).sum() <= 2, error
    assert engine.cache.fetches is not None
    assert engine.cache.fetches.fetched > 0
    first = order.index(("start", 0, 2))  # of the first decode step
    assert order[first : first + 7] == [
        ("start", 0, 2), ("start", 0, 3), ("finish", 0, 2), ("start", 1, 2), ("finish", 0, 3), ("start", 1, 3),
        ("finish", 1, 2),
    ]  # fmt: skip
    assert fetches[:4] == [(2, True), (3, True)] * 2


def test_one_batch_is_fetched_as_what_nothing_overlaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, overlapped = open_engine(tmp_path, "turbo-host"), []
    fetch = engine.cache.ops.fetch_chunks
    monkeypatch.setattr(engine.cache.ops, "fetch_chunks", lambda *args: (overlapped.append(args[-1]), fetch(*args))[1])
    steps(engine, 2)
    assert overlapped
    assert not any(overlapped)


def test_batches_are_split_where_much_is_selected_in_short_chunks_beyond_a_bus(tmp_path: Path) -> None:
    fetching = open_engine(tmp_path, "turbo-host").cache.groups[0].decode.fetching
    long = open_engine(tmp_path, "shadowkv").cache.groups[0].decode.fetching
    assert fetching is not None
    assert long is not None
    budget = np.full(64, TWO_BATCH_CHUNKS // 64 // 2)  # of two heads
    fetching._stream = None
    assert fetching.micro_batches(budget) == 1
    fetching._stream = long._stream = object()
    assert fetching.micro_batches(budget) == 2
    assert fetching.micro_batches(budget[:63]) == 1
    assert fetching.micro_batches(np.append(budget[:32], budget[:32] * 0)) == 1  # dense rows select nothing
    assert fetching.micro_batches(budget[:1] * 64) == 1  # one row has no halves
    long._buffers[0] = SimpleNamespace(rows=torch.empty(1, 2, 1, 8, 128, dtype=torch.bfloat16))
    assert long.micro_batches(budget * 100) == 1
