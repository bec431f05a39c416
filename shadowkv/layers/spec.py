"""LayerSpec: the sizes and switches of a decoder layer, as layers need them, and the projections that it selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.layers.group import Group
from shadowkv.layers.linear import FP8Linear, Linear
from shadowkv.layers.quantised_matrix import QuantisedLinear, Run


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer; all layers of a model are alike except for ``runs``.

    Attributes:
        shape: heads and head dimensions.
        hidden_size: D, width of the residual stream.
        intermediate_size: I, width of the MLP.
        rms_norm_eps: added to the mean square in every RMSNorm.
        qkv_bias: the q, k and v projections have a bias.
        out_bias: the attention's output projection has a bias.
        qk_norm: queries and keys are RMS-normalised per head before RoPE.
        post_norms: the outputs of the attention and of the MLP are normalised before they join the residual.
        quantization: of the projections' products: ``fp8``, of weights and activations; None otherwise.
        runs: of the rows of weights that stay quantised as files store them, by name within the layer.
        dtype: of every weight that is not quantised.
        device: of every weight; ``meta`` allocates nothing, which is enough to count parameters.
        group: the ranks whose outputs are summed; sizes are those of this one's part.
    """

    shape: ModelShape
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    post_norms: bool
    quantization: str | None
    runs: Mapping[str, tuple[Run, ...]]
    dtype: torch.dtype
    device: torch.device
    group: Group


Projection = Linear | FP8Linear | QuantisedLinear


def projection(spec: LayerSpec, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Projection:
    """A projection whose weights are quantised where the spec says so; ``name`` is its name within the layer."""
    dtype, device = spec.dtype, spec.device
    if spec.quantization == "fp8":
        return FP8Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    if runs := spec.runs.get(f"{name}.weight"):
        return QuantisedLinear(in_features, out_features, runs, bias=bias, dtype=dtype, device=device)
    return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
