"""A model of two small layers with random weights, for soak and fuzz tests, in which speed does not matter; its server.

Its policy compresses, rebuilds and fetches like any other, yet loses nothing (all ranks, all chunks selected): whatever
else shares the batch or the cache with a request, its answer must be the same up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from robustness.live_server import start_server, stop_server

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,  # ASCII: every answer is text that becomes the same tokens in the next turn
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "max_position_embeddings": 4096,
    # Sharp attention, as in trained models: with plain random weights every token weighs about the same, and one that
    # is read from the wrong page would hardly show.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 2.0,
    },
}
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "kv": "shadowkv:rank=32,budget=1.0,outliers=4",
    "kv_dense_below": 0,
}
"""Fields of EngineConfig; prompts of up to 136 tokens stay dense, longer ones are compressed."""
SLOTS = 16
SERVER = {**ENGINE, "max_model_len": 4096, "max_num_seqs": SLOTS, "max_cached_seqs": 0, "max_queued_seqs": 8}
"""It keeps finished sequences only in free slots."""
TIMEOUTS = {"client_header_timeout": 2, "client_body_timeout": 2, "send_timeout": 1}
"""Seconds; shorter than hostile clients hold a connection."""


@contextmanager
def tiny_model(**changes: Any) -> Iterator[Path]:
    """A directory to use as ``EngineConfig.model``, together with ``ENGINE``; ``changes`` override ``CONFIG``."""
    with TemporaryDirectory(prefix="tiny-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
        yield Path(folder)


@contextmanager
def own_server(kv: str, max_body_mib: float) -> Iterator[str]:
    """URL of a server with the tiny model, that policy and bodies up to that length; it must end when told to."""
    with tiny_model() as folder:
        process, url = start_server({"model": folder, **SERVER, "kv": kv, **TIMEOUTS, "max_body_mib": max_body_mib})
        with process:
            try:
                yield url
            finally:
                stop_server(process)
