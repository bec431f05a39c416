"""A Llama with LoRA pairs beside its frozen weights, in plain PyTorch, for training: no cache, no ops of the engine."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shadowkv.models.checkpoints.adapter import Adapter
from shadowkv.models.checkpoints.reading import read_ahead
from shadowkv.models.checkpoints.stored_weight import dense
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.weights import gguf_readings
from shadowkv.models.sources import fetch

PROJECTIONS = tuple(
    f"{block}.{name}_proj"
    for block, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
)
RANK, ALPHA = 64, 128
KEPT_TOKENS = 40_000
"""Of a batch: with more of them a layer's activations are computed again in the backward pass."""


@dataclass(frozen=True)
class Base:
    """The frozen model.

    Attributes:
        config: the base's.
        weights: name -> weight, in the dtype that is computed in.
    """

    config: ModelConfig
    weights: dict[str, Tensor]

    @property
    def embedding(self) -> Tensor:
        """Embedding and head, [V, D]."""
        return self.weights["model.embed_tokens.weight"]


class Lora:
    """W' = W + ALPHA / RANK · B·A for the seven projections of every layer; A and B are float32 and learn."""

    def __init__(self, base: Base, seed: int = 0) -> None:
        device, generator = base.embedding.device, torch.Generator().manual_seed(seed)
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in range(base.config.num_layers):
            for projection in PROJECTIONS:
                name = f"model.layers.{layer}.{projection}"
                rows, columns = base.weights[f"{name}.weight"].shape
                bound = 1 / math.sqrt(columns)
                a = torch.rand(RANK, columns, generator=generator).mul_(2 * bound).sub_(bound)
                b = torch.zeros(rows, RANK, device=device)
                self.pairs[name] = a.to(device).requires_grad_(), b.requires_grad_()

    def parameters(self) -> list[Tensor]:
        """All A and B."""
        return [matrix for pair in self.pairs.values() for matrix in pair]

    def added(self, name: str, weight: Tensor) -> Tensor:
        """The weight as a server has it after the adapter was merged: added in float32, rounded once."""
        a, b = self.pairs[name]
        return (weight.float() + (ALPHA / RANK) * (b @ a)).to(weight.dtype)

    def load(self, directory: Path) -> None:
        """The values of an adapter that ``shadowkv`` reads; raises as that does, and KeyError if a module lacks."""
        pairs = Adapter(directory).pairs
        with torch.no_grad():
            for name, pair in self.pairs.items():
                for matrix, side in zip(pair, "AB"):
                    matrix.copy_(pairs[name][side])

    def save(self, directory: Path, base_model: str) -> None:
        """Writes the adapter in PEFT's format, in bfloat16."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": matrix.detach().to("cpu", torch.bfloat16)
            for name, pair in self.pairs.items()
            for matrix, side in zip(pair, "AB")
        }
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": RANK,
            "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
            "target_modules": [projection.split(".")[1] for projection in PROJECTIONS],
        }  # fmt: skip
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def compress(source: Path, target: Path) -> None:
    """Writes an adapter's matrices as int8 with a scale for each row, which ``shadowkv`` reads and PEFT does not."""
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, matrix in load_file(source / "adapter_model.safetensors").items():
        scale = (matrix.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        tensors |= {name: (matrix.float() / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, target / "adapter_model.safetensors")
    shutil.copy(source / "adapter_config.json", target)


def load_base(model: str, device: torch.device) -> Base:
    """A catalogue model's weights, dequantized; bfloat16 on a GPU and float32 elsewhere, as a server has them."""
    file = GGUFFile(fetch(model))
    config = config_from_gguf(file, None, None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = {name: dense(stored).to(device, dtype) for name, stored in read_ahead(gguf_readings(file, config))}
    return Base(config, weights)


def hidden_states(base: Base, ids: Tensor, theta: float, lora: Lora | None = None) -> Tensor:
    """Token ids, int64 [B, T], each row padded at its end -> normalised residual stream [B, T, D] after the last layer.

    Args:
        theta: of RoPE.
        lora: added to the weights; None for the base as it is.
    """
    config, weights = base.config, base.weights
    half = config.head_dim // 2
    frequencies = theta ** (-torch.arange(half, device=ids.device, dtype=torch.float32) / half)
    angles = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()

    def layer(x: Tensor, number: int) -> Tensor:
        prefix = f"model.layers.{number}."

        def product(x: Tensor, projection: str) -> Tensor:
            name = prefix + projection
            weight = weights[f"{name}.weight"]
            return F.linear(x, weight if lora is None else lora.added(name, weight))

        normed = _norm(base, x, f"{prefix}input_layernorm.weight")
        q, k, v = (
            product(normed, f"self_attn.{kind}_proj").unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for kind in "qkv"
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        groups = config.num_query_heads // config.num_kv_heads
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + product(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
        normed = _norm(base, x, f"{prefix}post_attention_layernorm.weight")
        return x + product(F.silu(product(normed, "mlp.gate_proj")) * product(normed, "mlp.up_proj"), "mlp.down_proj")

    x = F.embedding(ids, base.embedding)
    again = lora is not None and torch.is_grad_enabled() and ids.numel() > KEPT_TOKENS
    for number in range(config.num_layers):
        x = checkpoint(layer, x, number, use_reentrant=False) if again else layer(x, number)
    return _norm(base, x, "model.norm.weight")


def _norm(base: Base, x: Tensor, name: str) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], base.weights[name], base.config.rms_norm_eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in float32, [B, H, T, d]; the halves of a head are pairs."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def padded(rows: Iterable[list[int]], device: torch.device) -> Tensor:
    """Rows of token ids -> int64 [B, T], with zeros at their ends."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device, non_blocking=True)
