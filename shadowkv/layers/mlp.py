"""The MLP, with a gate (arXiv:2002.05202) or without one (``relu2``)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.layers.computing import Computing
from shadowkv.layers.spec import LayerSpec, projection
from shadowkv.ops.activation_rows.reference import inputs_of


class MLP(Computing):
    """Computes down(activation(gate(x)) * up(x)). Gate and up are one matrix product. With ``relu2``, there is no gate
    (``gated_activation``). Inputs and outputs are [T, D]: T tokens, D the hidden size.

    Args:
        spec: spec of the layer.
        size: inner width of this rank's part.
        name: name of the MLP within the layer.
    """

    calls = ("gated_activation",)

    def __init__(self, spec: LayerSpec, size: int, name: str = "mlp") -> None:
        super().__init__()
        self.group = spec.group
        self.activation = spec.activation
        self.gate_up = projection(spec, f"{name}.gate_up", spec.hidden_size, inputs_of(spec.activation) * size)
        self.down = projection(spec, f"{name}.down", size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.group.sum(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of the output, before the sum over ranks: [T, D] -> [T, D]."""
        return self.down(self.ops.gated_activation(self.gate_up(x), self.activation))
