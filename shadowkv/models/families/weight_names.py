"""Where each weight of a checkpoint goes: names in a family's files -> rows of the decoder's joined parameters."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.models.configs.model_config import ModelConfig


@dataclass(frozen=True)
class Target:
    """Rows ``start`` to ``stop`` of a decoder's parameter."""

    parameter: str
    start: int
    stop: int


Targets = dict[str, Target]


def decoder_targets(config: ModelConfig, *, joined_qkv: bool = False, joined_gate_up: bool = False) -> Targets:
    """Targets of Hugging Face's names for the parts that all families share.

    Args:
        config: the model.
        joined_qkv: the files hold q, k and v as one ``qkv_proj``.
        joined_gate_up: the files hold gate and up as one ``gate_up_proj``.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_query_heads * config.head_dim, config.shape.kv_dim
    targets = {
        "model.embed_tokens.weight": Target("embedding", 0, config.vocab_size),
        "model.norm.weight": Target("norm.weight", 0, hidden),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = Target("head", 0, config.vocab_size)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, qkv = f"{theirs}.self_attn", f"{ours}.attention.qkv"
        if joined_qkv:
            targets |= rows(f"{attention}.qkv_proj", qkv, 0, q + 2 * kv, config.qkv_bias)
        else:
            targets |= rows(f"{attention}.q_proj", qkv, 0, q, config.qkv_bias)
            targets |= rows(f"{attention}.k_proj", qkv, q, q + kv, config.qkv_bias)
            targets |= rows(f"{attention}.v_proj", qkv, q + kv, q + 2 * kv, config.qkv_bias)
        targets |= rows(f"{attention}.o_proj", f"{ours}.attention.out", 0, hidden, config.attention_out_bias)
        if joined_gate_up:
            targets |= rows(f"{theirs}.mlp.gate_up_proj", f"{ours}.mlp.gate_up", 0, 2 * inner)
        else:
            targets |= rows(f"{theirs}.mlp.gate_proj", f"{ours}.mlp.gate_up", 0, inner)
            targets |= rows(f"{theirs}.mlp.up_proj", f"{ours}.mlp.gate_up", inner, 2 * inner)
        targets |= rows(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", 0, hidden)
        targets |= rows(f"{theirs}.input_layernorm", f"{ours}.attention_norm", 0, hidden)
        targets |= rows(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", 0, hidden)
    return targets


def rows(theirs: str, ours: str, start: int, stop: int, bias: bool = False) -> Targets:
    """Targets of one module: its weight, and its bias where it has one."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{theirs}.{kind}": Target(f"{ours}.{kind}", start, stop) for kind in kinds}
