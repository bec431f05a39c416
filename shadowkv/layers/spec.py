"""LayerSpec: the sizes and the switches of a decoder layer, as the layers need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shadowkv.kvcache.shape import ModelShape
from shadowkv.ops import Ops


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer; every layer of a model is alike.

    Attributes:
        shape: heads and head dimensions.
        hidden_size: D, width of the residual stream.
        intermediate_size: I, width of the MLP.
        rms_norm_eps: added to the mean square in every RMSNorm.
        qkv_bias: the q, k and v projections have a bias.
        out_bias: the attention's output projection has a bias.
        qk_norm: queries and keys are RMS-normalised per head before the rotation.
        post_norms: the outputs of the attention and of the MLP are normalised before they join the residual.
        quantization: of the projections' weights: ``fp8``, or None where they are not quantised.
        dtype: of every weight that is not.
        device: of every weight; ``meta`` allocates nothing, which is enough to count parameters.
        ops: what the layers compute with.
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
    dtype: torch.dtype
    device: torch.device
    ops: Ops
