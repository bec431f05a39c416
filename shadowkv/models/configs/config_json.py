"""Reads a Hugging Face config.json: checks the values of fields, and reads the fields that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.models.checkpoints.files import is_number, join_reasons
from shadowkv.models.configs.model_config import MAX_POSITIONS, ModelConfig
from shadowkv.models.configs.rope import rope_from_hf
from shadowkv.ops.apply_rope.tables import RopeConfig

MAX_TOKENS = 1 << 24

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_LARGEST = {
    "vocab_size": MAX_TOKENS,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": MAX_POSITIONS,
}
"""Largest valid values of integer fields; the smallest is 1. Real models have far smaller values. Products of the
largest values fit in 63 bits."""

SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
"""Values of ``layer_types``."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
"""Names of gate activations in configs -> one name for each activation."""

ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
"""Fields with objects that describe RoPE: the old name, and transformers 5's, which takes precedence."""

FIELDS = tuple(
    dict.fromkeys(
        (
            *_REQUIRED,
            *_LARGEST,
            *("hidden_act", "mlp_bias", "tie_word_embeddings", "eos_token_id", "bos_token_id"),
            *("rope_theta", "partial_rotary_factor", *ROPE_OBJECTS),
        )
    )
)
"""Fields that every family reads; the families' modules list further fields."""

_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_POSITIVE = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_NOT_NEGATIVE = ("mscale", "mscale_all_dim")
_DIVISORS = ("short_factor", "long_factor")


OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
"""Fields that describe the text model, and that a multimodal config can have outside its ``text_config``."""


def plain_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns a config in the flat form that families read.

    Fields in the ``text_config`` of a multimodal model replace those at the top level. transformers 5 describes RoPE
    for each type of layer. The result then has the RoPE of full attention, and the base of sliding attention as
    ``rope_local_base_freq``. Raises ValueError if sliding attention has another RoPE type than ``default``.
    """
    if isinstance(text := hf.get("text_config"), dict):
        whole = {name: hf[name] for name in ("model_type", *OF_THE_WHOLE) if hf.get(name) is not None}
        hf = {**hf, **text, **whole, "text_config": None}
    for name in ROPE_OBJECTS:
        of_types = hf.get(name)
        if not isinstance(of_types, dict) or not any(isinstance(of_types.get(kind), dict) for kind in LAYER_TYPES):
            continue
        full, sliding = (of_types.get(kind) or {} for kind in LAYER_TYPES)
        if not isinstance(sliding, dict) or (sliding.get("rope_type") or "default") != "default":
            raise ValueError(f"{name}: {SLIDING} has {_short(sliding)}, where only rope_type='default' is supported")
        hf = {**hf, name: full, "rope_local_base_freq": sliding.get("rope_theta", hf.get("rope_local_base_freq"))}
    return hf


def wrong_fields(hf: Mapping[str, Any], names: Mapping[str, str] | None = None) -> list[str]:
    """Returns a reason for every field that is missing or invalid.

    Args:
        hf: content of a config.json, or another format's fields in that form.
        names: key of ``hf`` -> name of the field in the file, where the two differ.
    """
    names = names or {}
    reasons = [f"{names.get(name, name)} is missing" for name in _REQUIRED if hf.get(name) is None]

    def check(fields: Mapping[str, Any], name: str, fine: Callable[[Any], bool], expected: str) -> None:
        value = fields.get(name)
        if value is not None and not fine(value):
            reasons.append(f"{names.get(name, name)}={_short(value)} is not {expected}")

    def whole(least: int, most: int) -> Callable[[Any], bool]:
        return lambda value: type(value) is int and least <= value <= most

    for name, most in _LARGEST.items():
        check(hf, name, whole(1, most), f"a whole number from 1 to {most}")
    for name in ("sliding_window", "max_window_layers"):
        check(hf, name, whole(0, MAX_POSITIONS), f"a whole number from 0 to {MAX_POSITIONS}")
    check(hf, "rope_local_base_freq", lambda value: is_number(value, 1), "a number above 1")
    check(hf, "query_pre_attn_scalar", lambda value: is_number(value, 0), "a positive number")
    check(hf, "sliding_window_pattern", whole(1, 1024), "a whole number from 1 to 1024")
    for name in _SWITCHES:
        check(hf, name, lambda value: type(value) is bool, "true or false")
    check(hf, "rms_norm_eps", lambda value: is_number(value, 0, 1), "a number above 0, up to 1")
    for name in ("eos_token_id", "bos_token_id"):
        check(hf, name, are_token_ids, "a token id or a list of them")
    for name in ROPE_OBJECTS:
        check(hf, name, lambda value: isinstance(value, dict), "an object")
    scalings = [hf[name] for name in ROPE_OBJECTS if isinstance(hf.get(name), dict)]
    for fields in (hf, *scalings):
        check(fields, "rope_theta", lambda value: is_number(value, 1), "a number above 1")
        check(fields, "partial_rotary_factor", lambda value: is_number(value, 0, 1), "a number above 0, up to 1")
    for fields in scalings:
        for name in ("rope_type", "type"):
            check(fields, name, lambda value: isinstance(value, str), "a text")
        check(fields, "factor", lambda value: is_number(value) and value >= 1, "a number from 1 on")
        for name in _POSITIVE:
            check(fields, name, lambda value: is_number(value, 0), "a positive number")
        for name in _NOT_NEGATIVE:
            check(fields, name, lambda value: is_number(value) and value >= 0, "a number from 0 on")
        for name in _DIVISORS:
            check(fields, name, _are_divisors, "a list of positive numbers")
        name = "original_max_position_embeddings"
        check(fields, name, whole(1, MAX_POSITIONS), f"a whole number from 1 to {MAX_POSITIONS}")
        check(fields, "truncate", lambda value: type(value) is bool, "true or false")
    return reasons


def are_token_ids(value: Any) -> bool:
    """Whether ``value`` is a token id or a list of token ids."""
    return all(type(token) is int for token in (value if isinstance(value, list) else [value]))


def _are_divisors(value: Any) -> bool:
    return isinstance(value, list) and all(is_number(divisor, 0) for divisor in value)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "…"
    return text if len(text) <= 60 else f"{text[:60]}…"


def build_config(
    hf: dict[str, Any],
    *,
    max_model_len: int | None,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    interleaved: bool = False,
    window: LayerKind = FULL,
    first_window: int = 0,
    layer_types: Any = None,
    embedding_scale: float = 1.0,
    query_scale: float = 1.0,
    **switches: bool,
) -> ModelConfig:
    """Builds the ModelConfig of ``hf``. ``switches`` are boolean fields of ModelConfig, as the family sets them.

    ``window`` is the kind of the layers that ``layer_types`` calls sliding. Without ``layer_types``, it is the kind of
    all layers from ``first_window`` on.

    Raises ValueError, which names every missing, invalid or unsupported field.
    """
    reasons = wrong_fields(hf)
    activation = hf.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        reasons.append(f"hidden_act={activation!r} is not supported, only {', '.join(map(repr, ACTIVATIONS))}")
    if hf.get("mlp_bias"):
        reasons.append("mlp_bias is not supported")
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    kinds = _kinds(layer_types, hf["num_hidden_layers"], window, first_window)
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
        activation=ACTIVATIONS[activation],
        embedding_scale=embedding_scale,
        query_scale=query_scale,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        normed_heads=None,  # families set normed_heads, experts, dense_layers, bare_layers and linear
        experts=None,
        dense_layers=(),
        bare_layers=(),
        layer_kinds=kinds,
        linear=None,
        streams=None,
        n_grams=None,
        n_gram_layers=(),
        quantization=None,  # set by the loader
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(hf.get("bos_token_id"))), None),
        **switches,
    )


def window_of(hf: Mapping[str, Any]) -> LayerKind:
    """The kind of layers with the config's ``sliding_window``; full attention without one."""
    return LayerKind(hf.get("sliding_window") or None)


def _kinds(types: Any, count: int, window: LayerKind, first: int) -> tuple[LayerKind, ...]:
    """The kind of each of ``count`` layers; empty if all have full attention. Raises ValueError."""
    if window == FULL:
        return ()
    if types is None:
        return (FULL,) * min(first, count) + (window,) * (count - first)
    if not isinstance(types, list) or len(types) != count or not all(kind in LAYER_TYPES for kind in types):
        names = " or ".join(LAYER_TYPES)
        raise ValueError(f"this config cannot be used: layer_types is not a list of {names} for each of {count} layers")
    return tuple(window if kind == SLIDING else FULL for kind in types) if SLIDING in types else ()


def _max_position(stated: int, rope: RopeConfig, max_model_len: int | None) -> int:
    if rope.scaling == "yarn":
        # Some configs give the context length before YaRN's extension, others the length after it.
        return max(stated, int(rope.factor * rope.original_max_position))
    if rope.scaling == "longrope" and max_model_len is not None and max_model_len <= rope.original_max_position:
        # The short factors are in use, and they are wrong for longer sequences.
        return min(stated, rope.original_max_position)
    return stated


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
