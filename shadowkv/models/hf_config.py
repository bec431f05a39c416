"""ModelConfig fields that all families read in the same way from a Hugging Face config."""

from __future__ import annotations

from typing import Any

from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.models.config import ModelConfig
from shadowkv.models.files import in_words
from shadowkv.models.hf_fields import wrong_fields
from shadowkv.models.hf_rope import rope_from_hf
from shadowkv.ops.apply_rope.tables import RopeConfig

SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
"""What ``layer_types`` has for every layer."""


def build_config(
    hf: dict[str, Any],
    *,
    max_model_len: int | None,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    interleaved: bool = False,
    sliding_window: int | None = None,
    layer_types: Any = None,
    **switches: bool,
) -> ModelConfig:
    """ModelConfig from ``hf``; ``switches`` are the family's ModelConfig flags.

    ``layer_types`` says which layers have the window; where it is None they are unknown.

    Raises ValueError naming every field that is missing or out of range, activations other than SiLU and MLP biases.
    """
    reasons = wrong_fields(hf)
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"hidden_act={hf['hidden_act']!r} is not supported, only 'silu'")
    if hf.get("mlp_bias"):
        reasons.append("mlp_bias is not supported")
    if reasons:
        raise ValueError(f"this config cannot be used: {in_words(reasons)}")
    kinds = _kinds(layer_types, hf["num_hidden_layers"], sliding_window)
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    rope = rope_from_hf(
        hf,
        head_dim,
        max_model_len=max_model_len,
        default_theta=default_theta,
        default_partial=default_partial,
        interleaved=interleaved,
    )
    return ModelConfig(
        architecture=hf["model_type"],
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_query_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(hf["rms_norm_eps"]),
        max_position=_max_position(hf["max_position_embeddings"], rope, max_model_len),
        rope=rope,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        layer_kinds=kinds,
        sliding_window=sliding_window if layer_types is None else None,
        quantization=None,  # set by the loader
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(hf.get("bos_token_id"))), None),
        **switches,
    )


def _kinds(types: Any, count: int, window: int | None) -> tuple[LayerKind, ...]:
    """The kind of each of ``count`` layers; none where all of them see everything. Raises ValueError."""
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != count or not all(kind in LAYER_TYPES for kind in types):
        raise ValueError(
            f"this config cannot be used: layer_types is not a list of {' or '.join(LAYER_TYPES)} for {count} layers"
        )
    kinds = tuple(LayerKind(window) if kind == SLIDING else FULL for kind in types)
    if SLIDING in types and not window:
        raise ValueError(f"this config cannot be used: layer_types has {SLIDING}, and no sliding_window is in use")
    return kinds if SLIDING in types else ()


def _max_position(stated: int, rope: RopeConfig, max_model_len: int | None) -> int:
    if rope.scaling == "yarn":
        # Some configs give the context before the extension, others the one after it.
        return max(stated, int(rope.factor * rope.original_max_position))
    if rope.scaling == "longrope" and max_model_len is not None and max_model_len <= rope.original_max_position:
        # The short factors are in use: they are wrong for longer sequences.
        return min(stated, rope.original_max_position)
    return stated


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
