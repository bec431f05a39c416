"""Inputs of single layers, beside the residual stream: Gemma 3n's and Gemma 4's per-layer embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.computing import Computing
from shadowkv.layers.linear import Linear
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec, projection

LayerInput = Callable[[int], Tensor]
"""Computes a layer's own input [T, P] from the layer's number in the model: P numbers for each of T tokens."""


class PerLayerInputs(nn.Module):
    """Computes an input of P numbers for every token and layer. It is the sum of two vectors, divided by sqrt(2): a
    learned vector for the token's id and the layer, and a normalised projection of the token's embedding.

    One table has the learned vectors of all layers. A layer's input is computed when the layer needs it, because all
    inputs of a long prompt would take more memory than its keys and values.

    Args:
        spec: spec of the layers.
        layers: number of layers, L.
        vocab_size: rows of the table.
    """

    def __init__(self, spec: LayerSpec, layers: int, vocab_size: int) -> None:
        super().__init__()
        size, hidden = spec.per_layer_input_size, spec.hidden_size
        table = torch.empty(vocab_size, layers * size, dtype=spec.dtype, device=spec.device)
        self.layers, self.size, self.table = layers, size, nn.Parameter(table, requires_grad=False)
        self.projection = Linear(hidden, layers * size, bias=False, dtype=spec.dtype, device=spec.device)
        self.norm = RMSNorm(size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

    def forward(self, token_ids: Tensor, embedded: Tensor, layer: int) -> Tensor:
        """Returns the inputs [T, P] of a layer.

        Args:
            token_ids: int64 [T].
            embedded: [T, D], the embedded tokens.
            layer: the layer's number.
        """
        rows = self.table.view(-1, self.size)
        own = F.embedding(token_ids * self.layers + layer, rows) * self.size**0.5
        projected = self.projection.rows(embedded, layer * self.size, (layer + 1) * self.size)
        return (self.norm(projected * embedded.shape[-1] ** -0.5) + own) * 2**-0.5


class AddedInput(Computing):
    """Computes what a layer's own input adds to the residual stream x: norm(project(activation(gate(x)) * input))."""

    calls = ("gated_activation",)

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        size, self.activation = spec.per_layer_input_size, spec.activation
        self.gate = projection(spec, "added_input.gate", spec.hidden_size, size)
        self.out = projection(spec, "added_input.out", size, spec.hidden_size)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """Returns what is added to the residual stream ``x`` [T, D]. ``own`` [T, P] is the layer's own input."""
        gated = self.ops.gated_activation(torch.cat((self.gate(x), own), dim=-1), self.activation)
        return self.norm(self.out(gated))
