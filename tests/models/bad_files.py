"""A small good model in both formats, and what must become of one that is not: one line, soon, in little memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tokenizers
import torch
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, INNER, HEADS, HEAD_DIM, CONTEXT = 96, 32, 64, 2, 16, 256
SECONDS, MEMORY = 10, 1 << 30
"""Most that a refusal takes; one that comes at all takes well under a second and a few MiB."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = "model.layers.0"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
    **{f"{LAYER}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    f"{LAYER}.mlp.gate_proj.weight": (INNER, HIDDEN),
    f"{LAYER}.mlp.up_proj.weight": (INNER, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, INNER),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
}


def write_directory(directory: Path) -> Path:
    """A Hugging Face directory with all that is read of one."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "#", "chat_template": "{{ messages }}"}))
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, directory / "model.safetensors")
    vocab = {chr(ord(" ") + index): index for index in range(90)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.save(str(directory / "tokenizer.json"))
    return directory


def edit_json(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file; ``...`` takes one away."""
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensors(file: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a safetensors file; None takes one away."""
    content = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, file)


@contextmanager
def little_memory() -> Iterator[None]:
    """Allocations beyond ``MEMORY`` more than there is now fail."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


Serve = Callable[..., tuple[int, str]]


def assert_refused(answer: tuple[int, str], name: str, reason: str = "") -> None:
    """That the command said what it loads, and ended with one line, which has the file's name and the reason."""
    code, stderr = answer
    first, *lines = stderr.splitlines()
    assert code == 2 and first.startswith("loading ") and len(lines) == 1, stderr
    assert lines[0].startswith("error: ") and name in lines[0] and reason in lines[0], stderr
    assert len(lines[0]) < 2000 and lines[0].isprintable()
    assert "Traceback" not in stderr
