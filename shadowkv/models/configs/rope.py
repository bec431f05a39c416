"""RopeConfig from a Hugging Face config, in the old and the new form.

The old form has ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` with ``type`` or ``rope_type`` at the
top level. The new form (transformers 5) has all of these fields in ``rope_parameters``.
"""

from __future__ import annotations

import math
from typing import Any

from shadowkv.ops.apply_rope.tables import RopeConfig

_SCALINGS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # the name in Phi-3's first release
    "proportional": "proportional",
}
_ALWAYS_READ = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_from_hf(
    hf: dict[str, Any],
    head_dim: int,
    *,
    max_model_len: int | None,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    interleaved: bool = False,
) -> RopeConfig:
    """The RoPE that ``hf`` describes.

    LongRoPE has one set of factors for sequences up to the original context and one for longer ones. Cached keys cannot
    change sets later, so ``max_model_len`` decides: the short set if no sequence can outgrow the original context,
    otherwise the long set.

    Raises ValueError, with every reason, for an unknown type or missing fields.
    """
    # Some configs contain the unused form as null.
    scaling: dict[str, Any] = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = _kind(scaling)
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or default_theta
    partial = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or default_partial
    proportional = kind == "proportional"  # all dimensions are in a pair, but not all pairs rotate
    rotary_dim = head_dim if proportional else int(head_dim * partial)
    base: dict[str, Any] = {
        "head_dim": head_dim,
        "theta": float(theta),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "interleaved": interleaved,
        "scaling": _SCALINGS[kind],
        **({"proportion": float(partial)} if proportional else {}),
    }
    missing = [name for name in _REQUIRED[_SCALINGS[kind]] if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope type {kind!r} lacks " + ", ".join(missing))
    if _SCALINGS[kind] in ("llama3", "yarn", "longrope"):
        # Phi-3 stores the original context outside the rope fields, and that value takes precedence.
        base["original_max_position"] = int(
            hf.get("original_max_position_embeddings")
            or scaling.get("original_max_position_embeddings")
            or hf["max_position_embeddings"]
        )
    return _BUILDERS[_SCALINGS[kind]](hf, scaling, base, max_model_len)


def unread_fields(scaling: dict[str, Any]) -> list[str]:
    """Returns a list with one reason, which names all entries that this type of RoPE does not use; an empty list if it
    uses all entries. Raises ValueError for an unknown type."""
    kind = _kind(scaling)
    known = (*_ALWAYS_READ, *_REQUIRED[_SCALINGS[kind]], *_OPTIONAL[_SCALINGS[kind]])
    unread = [str(name) for name in scaling if name not in known]
    return [f"rope type {kind!r} reads no {', '.join(unread)}; it reads {', '.join(known)}"] if unread else []


def _kind(scaling: dict[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    # Phi-3's first release also calls LongRoPE "yarn".
    return "longrope" if kind == "yarn" and scaling.get("long_factor") is not None else kind


def _plain(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    return RopeConfig(**base)


def _linear(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    return RopeConfig(**base, factor=float(scaling["factor"]))


def _llama3(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    return RopeConfig(
        **base,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
    )


def _yarn(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    factor = float(scaling.get("factor") or hf["max_position_embeddings"] / base["original_max_position"])
    attention_factor = scaling.get("attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim and factor > 1:
        attention_factor = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return RopeConfig(
        **base,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
    )


def _longrope(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    original = base["original_max_position"]
    longest = hf["max_position_embeddings"] if limit is None else limit
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != (base["rotary_dim"] or base["head_dim"]) // 2:
            raise ValueError(f"rope type 'longrope' has {len(scaling[name])} numbers in {name}, not one per frequency")
    chosen = scaling["long_factor"] if longest > original else scaling["short_factor"]
    return RopeConfig(
        **base,
        factor=float(scaling.get("factor") or hf["max_position_embeddings"] / original),
        attention_factor=scaling.get("attention_factor"),
        factors=tuple(float(factor) for factor in chosen),
    )


def _proportional(hf: dict[str, Any], scaling: dict[str, Any], base: dict[str, Any], limit: int | None) -> RopeConfig:
    return RopeConfig(**base, factor=float(scaling.get("factor") or 1))


_BUILDERS = {
    "none": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor"),
    "proportional": ("factor",),
}
