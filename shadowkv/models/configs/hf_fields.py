"""Whether the fields that are read from a Hugging Face config have plausible values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_TOKENS, MAX_POSITIONS = 1 << 24, 1 << 30

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
"""Limits of integers from 1 on; no model comes near, and products of numbers within them fit in 63 bits."""

ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
"""The objects that describe RoPE: the old name and transformers 5's, which is read first."""

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
"""What every family reads; modules of families name what they read besides."""

_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_POSITIVE = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_NOT_NEGATIVE = ("mscale", "mscale_all_dim")
_DIVISORS = ("short_factor", "long_factor")


def is_number(value: Any, above: float = -math.inf, most: float = 1e300) -> bool:
    """Whether it is a number in that range, and not NaN; integers may have any number of digits."""
    return type(value) in (int, float) and above < value <= most


def wrong_fields(hf: Mapping[str, Any], names: Mapping[str, str] | None = None) -> list[str]:
    """A reason for every field that is missing or invalid.

    Args:
        hf: content of a config.json, or another format's in that form.
        names: names of the fields in the file, where they differ from ``hf``.
    """
    names = names or {}
    reasons = [f"{names.get(name, name)} is missing" for name in _REQUIRED if hf.get(name) is None]

    def check(fields: Mapping[str, Any], name: str, fine: Callable[[Any], bool], wanted: str) -> None:
        value = fields.get(name)
        if value is not None and not fine(value):
            reasons.append(f"{names.get(name, name)}={_short(value)} is not {wanted}")

    def whole(least: int, most: int) -> Callable[[Any], bool]:
        return lambda value: type(value) is int and least <= value <= most

    for name, most in _LARGEST.items():
        check(hf, name, whole(1, most), f"a whole number from 1 to {most}")
    check(hf, "sliding_window", whole(0, MAX_POSITIONS), f"a whole number from 0 to {MAX_POSITIONS}")
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
    """Whether it is a token id or a list of token ids."""
    return all(type(token) is int for token in (value if isinstance(value, list) else [value]))


def _are_divisors(value: Any) -> bool:
    return isinstance(value, list) and all(is_number(divisor, 0) for divisor in value)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "…"
    return text if len(text) <= 60 else f"{text[:60]}…"
