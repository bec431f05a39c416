"""The linear projection that a layer's spec asks for."""

from __future__ import annotations

from shadowkv.layers.fp8_linear import FP8Linear
from shadowkv.layers.linear import Linear
from shadowkv.layers.spec import LayerSpec

Projection = Linear | FP8Linear


def projection(spec: LayerSpec, in_features: int, out_features: int, *, bias: bool = False) -> Projection:
    """A projection whose weights are quantised where the spec says so."""
    if spec.quantization == "fp8":
        return FP8Linear(in_features, out_features, bias=bias, dtype=spec.dtype, device=spec.device, ops=spec.ops)
    return Linear(in_features, out_features, bias=bias, dtype=spec.dtype, device=spec.device)
