"""The decoder layer: attention, linear attention or Mamba-2, then an MLP or experts, around the residual stream.
``forward.py`` calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shadowkv.layers.attention import Attention, Cache
from shadowkv.layers.gated_delta_net import GatedDeltaNet
from shadowkv.layers.mamba2 import Mamba2
from shadowkv.layers.mlp import MLP
from shadowkv.layers.moe import MixtureOfExperts, MixtureOfNormedExperts
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.per_layer_inputs import AddedInput, LayerInput
from shadowkv.layers.spec import LayerSpec, StateSpace


class DecoderLayer(nn.Module):
    """A layer in two halves. ``start`` is the first half, and the function that it returns is the second. Between the
    halves, attention may have to wait for values from the host.

    Attributes:
        layer: the layer's number in the model.
        cached_as: the layer number under which the cache has what this layer reads: the keys and values that it attends
            to, or its recurrent state.
        reuses_keys: whether this layer attends to an earlier layer's keys and values, and has none of its own.
    """

    linear_attention: GatedDeltaNet | Mamba2 | None
    mlp_norm: RMSNorm | None
    mlp: MLP | MixtureOfExperts | None
    post_attention_norm: RMSNorm | None
    post_mlp_norm: RMSNorm | None
    scale: nn.Parameter | None

    def __init__(self, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.cached_as, self.reuses_keys = layer, spec.cached_as, spec.reuses_keys

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

        self.attention_norm = norm()
        self.attention = Attention(spec) if spec.linear is None else None
        if spec.linear is None:
            self.linear_attention = None
        elif isinstance(spec.linear, StateSpace):
            self.linear_attention = Mamba2(spec, spec.linear)
        else:
            self.linear_attention = GatedDeltaNet(spec, spec.linear)
        if spec.experts is not None:
            kind = MixtureOfNormedExperts if spec.experts.separate_norms else MixtureOfExperts
            self.mlp = kind(spec, spec.experts)
        else:
            self.mlp = MLP(spec, spec.intermediate_size) if spec.intermediate_size else None
        self.mlp_norm = None if self.mlp is None else norm()
        self.post_attention_norm = norm() if spec.post_norms else None
        self.post_mlp_norm = norm() if spec.post_norms else None
        self.added_input = AddedInput(spec) if spec.per_layer_input_size else None
        self.scale = None
        if spec.output_scale:
            self.scale = nn.Parameter(torch.empty(1, dtype=spec.dtype, device=spec.device), requires_grad=False)

    @property
    def _mixer(self) -> Attention | GatedDeltaNet | Mamba2:
        """The module that mixes the tokens of a sequence: attention, linear attention or Mamba-2."""
        mixer = self.attention or self.linear_attention
        assert mixer is not None
        return mixer

    def start(
        self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any, own: LayerInput | None = None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Runs the layer up to the point where attention may have to wait for the host.

        The returned function finishes the layer. It returns the new residual stream and the output of the MLP, or of
        attention in a layer without an MLP, each [n, D], for the n tokens that need attention. For the other tokens,
        only keys and values are computed.

        Args:
            x: residual stream [T, D]; D is the hidden size.
            added: the previous layer's output [T, D], not yet added to ``x``; None if nothing is left to add. It is
                added in the same kernel launch as this layer's first norm.
            own: returns the tokens' per-layer inputs of a layer, given the layer's number (``PerLayerInputs``, as in
                Gemma 4 E2B and E4B); None if the model has no such inputs.
        """
        x, normed = self._normalised(x, added)
        finish = self._mixer.start(normed, cache, batch)
        return lambda: self._finish(batch.of_needed(x), finish(), batch, own)

    def append(self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any) -> None:
        """Runs the layer for tokens that need no attention: only stores their keys and values, or updates the recurrent
        state. Arguments are as in ``start``."""
        self._mixer.append(self._normalised(x, added)[1], cache, batch)

    def _normalised(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds ``added`` to the residual stream. Returns the sum and the normalised sum. The latter is the input of
        attention."""
        return (x, self.attention_norm(x)) if added is None else self.attention_norm.after_add(x, added)

    def _finish(self, x: Tensor, attended: Tensor, batch: Any, own: LayerInput | None) -> tuple[Tensor, Tensor]:
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        mlp = self.mlp
        if mlp is None or self.mlp_norm is None:
            return x, attended
        x, normed = self.mlp_norm.after_add(x, attended)
        hidden = mlp.of_residual(x, normed) if isinstance(mlp, MixtureOfNormedExperts) else mlp(normed)
        if self.post_mlp_norm is not None:
            hidden = self.post_mlp_norm(hidden)
        if self.added_input is not None:
            assert own is not None, "the layer's own input is missing"
            x = x + hidden
            hidden = self.added_input(x, batch.of_needed(own(self.layer)))
        return (x, hidden) if self.scale is None else (x * self.scale, hidden * self.scale)
