"""Reads the fields of a config.json that describe experts: checks their values, and reads what families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shadowkv.models.checkpoints.files import is_number, join_reasons

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that can have the number of experts."""

_LARGEST = {
    **dict.fromkeys(_COUNTS, 1 << 12),
    "num_experts_per_tok": 1 << 12,
    "moe_intermediate_size": 1 << 20,
    "rotary_dim": 1 << 12,
    "decoder_sparse_step": 1 << 10,
    "n_group": 1 << 12,
    "topk_group": 1 << 12,
}
"""Largest values of integers whose smallest value is 1."""

_FROM_ZERO = {
    "shared_expert_intermediate_size": 1 << 20,
    "n_shared_experts": 1 << 8,
    "first_k_dense_replace": 1 << 10,
    "num_nextn_predict_layers": 1 << 10,
    "num_mtp_modules": 1 << 10,
}
"""Largest values of integers whose smallest value is 0."""
_SWITCHES = ("norm_topk_prob", "use_qk_norm", "qkv_bias")


def expert_fields(hf: Mapping[str, Any], count: str, *required: str) -> dict[str, Any]:
    """Returns the entries of ``hf`` that are not null, with the number of experts under the name ``count``.

    Raises ValueError with a reason for every field that is invalid, or that is ``required`` and missing.

    Args:
        hf: content of a config.json.
        count: the family's name for the number of experts. transformers 5 may write another name, and GGUF files are
            read with one name for all families.
        required: names of other fields that must be present.
    """
    fields = {name: value for name, value in hf.items() if value is not None}
    if (experts := next((fields[name] for name in (count, *_COUNTS) if name in fields), None)) is not None:
        fields[count] = experts
    reasons = [f"{name} is missing" for name in (count, *required) if fields.get(name) is None]

    def check(names: Sequence[str], fine: Callable[[Any], bool], expected: str) -> None:
        for name in names:
            value = fields.get(name)
            if value is not None and not fine(value):
                reasons.append(f"{name}={str(value)[:60]} is not {expected}")

    def whole(least: int, most: int) -> Callable[[Any], bool]:
        return lambda value: type(value) is int and least <= value <= most

    for name, most in _LARGEST.items():
        check([name], whole(1, most), f"a whole number from 1 to {most}")
    for name, most in _FROM_ZERO.items():
        check([name], whole(0, most), f"a whole number from 0 to {most}")
    check(_SWITCHES, lambda value: type(value) is bool, "true or false")
    check(["routed_scaling_factor"], lambda value: is_number(value, 0, 1e6), "a number above 0")
    layers = "mlp_only_layers"
    check([layers], lambda value: isinstance(value, list) and all(map(whole(0, 1 << 10), value)), "a list of layers")
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    return fields


def dense_layers(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers of Qwen's models that have an MLP instead of experts: those in ``mlp_only_layers``, and all
    but every ``decoder_sparse_step``-th."""
    step, listed = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
