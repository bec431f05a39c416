"""The config of a tiny Llama, for models with random weights whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def write_config(directory: Path, hidden_size: int, max_position_embeddings: int, **fields: Any) -> Path:
    """Makes ``directory`` that of a model without files of weights; returns it."""
    sizes = {"hidden_size": hidden_size, "max_position_embeddings": max_position_embeddings}
    (directory / "config.json").write_text(json.dumps(CONFIG | sizes | fields))
    return directory
