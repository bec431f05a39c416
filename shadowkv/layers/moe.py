"""Mixture of experts (arXiv:1701.06538): each token uses a few of many MLPs, the experts. Some models also have a
shared expert, which all tokens use.

Tokens are sorted by expert once, and both matrix products of the experts use this order. On a GPU, no shape depends on
data, and the ops' fast backends do not make the host wait. So a decode step can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from shadowkv.layers.computing import Computing
from shadowkv.layers.linear import Linear
from shadowkv.layers.mlp import MLP
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.quantized_matrix import QuantizedMatrix
from shadowkv.layers.spec import Experts, LayerSpec
from shadowkv.ops.activation_rows.reference import inputs_of
from shadowkv.ops.choose_experts.routing import Routing
from shadowkv.ops.quantized.rows import QuantizedRows


class Router(Computing):
    """Scores the experts and chooses k of them for each token. If scores are sigmoids, logits are in float32, as in
    models trained with such scores."""

    calls = ("choose_experts",)
    correction_bias: nn.Parameter | None

    def __init__(self, spec: LayerSpec, routing: Routing, bias: bool) -> None:
        super().__init__()
        self.routing, number = routing, torch.float32
        dtype = number if routing.scores == "sigmoid" else spec.dtype
        self.logits = Linear(spec.hidden_size, routing.experts, bias=bias, dtype=dtype, device=spec.device)
        if routing.corrected:
            correction = torch.empty(routing.experts, dtype=number, device=spec.device)
            self.correction_bias = nn.Parameter(correction, requires_grad=False)
        else:
            self.correction_bias = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights, float32 [T, k], and the numbers, [T, k], of the experts chosen for hidden states
        [T, D]."""
        logits = self.logits(x.to(self.logits.weight.dtype))
        weights, experts = self.ops.choose_experts(logits, self.correction_bias, self.routing)
        return weights, experts


class ExpertsProjection(Computing):
    """y = x W_eᵀ + b_e, for rows x that are sorted by their expert e. This rank has ``count`` experts, all ranks
    together have ``total``. Weights and biases are stored expert by expert. They are uninitialised until a loader fills
    them."""

    weight: nn.Parameter | QuantizedMatrix
    bias: nn.Parameter | None

    def __init__(self, spec: LayerSpec, name: str, experts: Experts, in_features: int, out_features: int) -> None:
        super().__init__()
        count = experts.count
        self.count, self.total, self.out_features = count, experts.routing.experts, out_features
        if row_blocks := spec.row_blocks.get(f"{name}.weight"):
            self.weight = QuantizedMatrix(in_features, row_blocks, dtype=spec.dtype, device=spec.device)
            self.calls = ("grouped_quantized_matmul",)
        else:
            weight = torch.empty(count * out_features, in_features, dtype=spec.dtype, device=spec.device)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.calls = ("grouped_matmul",)
        self.bias = None
        if experts.biases:
            empty = torch.empty(count * out_features, dtype=spec.dtype, device=spec.device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, number: Tensor, offsets: Tensor) -> Tensor:
        """Computes the products of sorted rows. Rows of experts on other ranks are last, and their results are
        arbitrary.

        Args:
            x: [S, in_features], S rows sorted by expert.
            number: [S], number of each row's expert among this rank's experts, ascending; ``count`` for an expert on
                another rank.
            offsets: int32 [count + 1], where each expert's rows start, and where the last expert's rows end.

        Returns:
            [S, out_features].
        """
        product = self._product(x, offsets)
        if self.bias is None:
            return product
        bias = self.bias.view(-1, self.out_features)
        return product.add_(bias.index_select(0, number.clamp_max(len(bias) - 1)))

    def _product(self, x: Tensor, offsets: Tensor) -> Tensor:
        if isinstance(self.weight, QuantizedMatrix):
            # The type is that of unpacked weights. The chosen backend may have packed them (``PackedExperts``).
            rows = cast("list[Tensor | QuantizedRows]", self.weight.of_experts)
            return self.ops.grouped_quantized_matmul(x, rows, offsets)
        weight = self.weight.view(self.count, self.out_features, -1)
        return self.ops.grouped_matmul(x, weight, offsets, self.total)


class RoutedExperts(Computing):
    """The experts that tokens choose from, each an MLP. With expert parallelism, only this rank's experts."""

    calls = ("gated_activation", "sort_by_expert", "sum_experts")

    def __init__(self, spec: LayerSpec, experts: Experts) -> None:
        super().__init__()
        self.activation = spec.activation
        size, hidden = experts.intermediate_size, spec.hidden_size
        self.first, self.count, self.all_here = experts.here[0], experts.count, experts.count == experts.routing.experts
        self.gate_up = ExpertsProjection(
            spec, "mlp.experts.gate_up", experts, hidden, inputs_of(spec.activation) * size
        )
        self.down = ExpertsProjection(spec, "mlp.experts.down", experts, size, hidden)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [T, D].
            weights: float32 [T, k], weights of the chosen experts.
            experts: [T, k], numbers of the chosen experts.

        Returns:
            [T, D], the sum over this rank's experts only.
        """
        token, number, row, offsets = self.ops.sort_by_expert(experts, self.first, self.count)
        partly = None if self.all_here else offsets
        # Nested calls free each wide tensor as early as possible, as sizing.block_bytes assumes.
        gated, kind = self.ops.gated_activation, self.activation
        out = self.down(gated(self.gate_up(x.index_select(0, token), number, offsets), kind, partly), number, offsets)
        return self.ops.sum_experts(out, row, weights, partly)


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a layer: routed experts, and an optional shared expert for all tokens, with or without a
    gate.

    Each rank has either some whole experts, or a part of every expert's inner width. The outputs are summed over ranks.
    """

    shared: MLP | None
    shared_gate: Linear | None

    def __init__(self, spec: LayerSpec, experts: Experts) -> None:
        super().__init__()
        self.group = spec.group
        self.router = Router(spec, experts.routing, experts.biases)
        self.experts = RoutedExperts(spec, experts)
        self.shared = MLP(spec, experts.shared_size, "mlp.shared") if experts.shared_size else None
        self.shared_gate = None
        if experts.shared_gate:
            self.shared_gate = Linear(spec.hidden_size, 1, bias=False, dtype=spec.dtype, device=spec.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        out = self.experts(x, *self.router(x))
        if self.shared is not None:
            shared = self.shared.part(x)
            out = out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self.group.sum(out)


class MixtureOfNormedExperts(MixtureOfExperts):
    """Gemma 4's mixture: the router, the routed experts and the shared expert each have norms of their own, and the
    router scales the weight of each expert. Norms are not linear. So the outputs of the routed experts and of the
    shared expert are summed over ranks separately, before their norms."""

    def __init__(self, spec: LayerSpec, experts: Experts) -> None:
        super().__init__(spec, experts)

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

        self.router_norm, self.routed_norm, self.routed_out_norm, self.shared_out_norm = norm(), norm(), norm(), norm()
        scale = torch.empty(experts.routing.experts, dtype=torch.float32, device=spec.device)
        self.expert_scale = nn.Parameter(scale, requires_grad=False)

    def of_residual(self, x: Tensor, normed: Tensor) -> Tensor:
        """Returns the output [T, D].

        Args:
            x: [T, D], the residual stream, which the router and the routed experts normalise.
            normed: [T, D], the normalised residual stream for the shared expert.
        """
        assert self.shared is not None, "a mixture with separate norms has a shared expert"
        weights, experts = self.router(self.router_norm(x))
        weights = weights * self.expert_scale[experts.long()]
        routed = self.group.sum(self.experts(self.routed_norm(x), weights, experts))
        return self.shared_out_norm(self.group.sum(self.shared.part(normed))) + self.routed_out_norm(routed)
