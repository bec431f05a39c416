"""What a config.json says about weights in 8-bit floats: the kinds of checkpoints that load as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALED = ("tensor", "channel", "block")
"""Those of compressed-tensors' strategies that have one scale per weight, per row, or per block."""


@dataclass(frozen=True)
class FP8Format:
    """A kind of checkpoint.

    Attributes:
        block: rows and columns that share a scale, if scales are block-wise.
    """

    block: tuple[int, int] | None = None


def fp8_format(stated: Any) -> FP8Format | None:
    """The format of a ``quantization_config``; None if it is of another kind, or has unknown values.

    Modules that it lists as not converted are stored as plain numbers, as the file itself says. Static scales of
    activations are not used here: activations are quantised by their own largest number, which loses less.
    """
    if not isinstance(stated, Mapping):
        return None
    method = stated.get("quant_method")
    if method == "fbgemm_fp8":
        return FP8Format()
    if method == "fp8" and stated.get("fmt", "e4m3") == "e4m3":
        return _of_block(stated.get("weight_block_size"))
    if method == "compressed-tensors" and stated.get("format") == "float-quantized":
        return _of_groups(stated)
    return None


def _of_groups(stated: Mapping[str, Any]) -> FP8Format | None:
    """compressed-tensors has arguments for each group of modules."""
    sparsity, groups = stated.get("sparsity_config") or {}, stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not isinstance(sparsity, Mapping):
        return None
    if sparsity.get("format", "dense") != "dense" or stated.get("transform_config"):
        return None
    formats = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("strategy") not in SCALED:
            return None
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
            return None
        formats.add(_of_block(weights.get("block_structure") if weights["strategy"] == "block" else None))
    return formats.pop() if len(formats) == 1 else None


def _of_block(size: Any) -> FP8Format | None:
    if size is None:
        return FP8Format()
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return FP8Format((size[0], size[1]))
    return None
