"""The linear projection that a layer's spec selects."""

from __future__ import annotations

from shadowkv.layers.block_linear import BlockLinear
from shadowkv.layers.fp8_linear import FP8Linear
from shadowkv.layers.linear import Linear
from shadowkv.layers.spec import LayerSpec

Projection = Linear | FP8Linear | BlockLinear


def projection(spec: LayerSpec, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Projection:
    """A projection whose weights are quantised where the spec says so; ``name`` is its name within the layer."""
    dtype, device = spec.dtype, spec.device
    if spec.quantization == "fp8":
        return FP8Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    if runs := spec.runs.get(f"{name}.weight"):
        return BlockLinear(in_features, out_features, runs, bias=bias, dtype=dtype, device=device)
    return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
