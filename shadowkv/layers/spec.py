"""LayerSpec: the sizes and switches of a decoder layer, as layers need them, and the projections that it selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.layers.group import Group
from shadowkv.layers.linear import FP8Linear, Linear
from shadowkv.layers.quantised_matrix import QuantisedLinear, RowBlock
from shadowkv.ops.choose_experts.routing import Routing


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that some layers have in place of an MLP.

    Attributes:
        routing: how tokens choose among them.
        intermediate_size: inner width of one of them.
        shared_size: inner width of the expert that every token is given to; 0 if there is none.
        shared_gate: what that adds is multiplied with the sigmoid of a learned product with the token.
        biases: the router, and both products of each of the experts among which tokens choose, have a bias.
        held: the first expert whose weights are here, and the one after the last; None for all.
    """

    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    held: tuple[int, int] | None = None

    @property
    def here(self) -> tuple[int, int]:
        """``held``, of all experts too."""
        return self.held or (0, self.routing.experts)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer; all layers of a model are alike except for ``experts`` and ``row_blocks``.

    Attributes:
        shape: heads and head dimensions.
        hidden_size: D, width of the residual stream.
        intermediate_size: I, width of the MLP.
        experts: what the layer has in place of the MLP; None for nothing.
        rms_norm_eps: added to the mean square in every RMSNorm.
        activation: of the MLP's gate, by its name in Hugging Face configs where it has one: one of
            ``ops/gated_activation``'s.
        qkv_bias: the q, k and v projections have a bias.
        out_bias: the attention's output projection has a bias.
        qk_norm: queries and keys are RMS-normalised before RoPE, each head by itself.
        normed_heads: query and kv heads of the whole model, where all of a token's are normalised together instead.
        sinks: every softmax has one more position, with a learned score for each head and a value of 0 (gpt-oss).
        post_norms: the outputs of the attention and of the MLP are normalised before they join the residual.
        quantization: of the projections' products: ``fp8``, of weights and activations; None otherwise.
        row_blocks: of weights that stay quantised as files store them, by name within the layer.
        dtype: of activations, and of every weight that is not quantised.
        norm_dtype: of the weights of norms: ``dtype``, or float32.
        device: of every weight; ``meta`` allocates nothing, which is enough to count parameters.
        group: the ranks whose outputs are summed; sizes are those of this one's part.
    """

    shape: ModelShape
    hidden_size: int
    intermediate_size: int
    experts: Experts | None
    rms_norm_eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    normed_heads: tuple[int, int] | None
    sinks: bool
    post_norms: bool
    quantization: str | None
    row_blocks: Mapping[str, tuple[RowBlock, ...]]
    dtype: torch.dtype
    norm_dtype: torch.dtype
    device: torch.device
    group: Group


Projection = Linear | FP8Linear | QuantisedLinear


def projection(
    spec: LayerSpec,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    borders: tuple[int, ...] = (),
) -> Projection:
    """A projection whose weights are quantised where the spec says so.

    Args:
        name: its name within the layer.
        borders: where ranges of outputs begin that are asked for alone.
    """
    dtype, device = spec.dtype, spec.device
    if spec.quantization == "fp8":
        return FP8Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    if row_blocks := spec.row_blocks.get(f"{name}.weight"):
        return QuantisedLinear(
            in_features, out_features, row_blocks, bias=bias, dtype=dtype, device=device, borders=borders
        )
    return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
