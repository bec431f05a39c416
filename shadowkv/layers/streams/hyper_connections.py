"""Hyper-connections (arXiv:2409.19606), in the form of the Qwen4 preview. The model has several residual streams. They
are mixed into the input of each block; a block is attention, linear attention, an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.attention import Attention, Cache
from shadowkv.layers.gated_delta_net import GatedDeltaNet
from shadowkv.layers.linear import Linear
from shadowkv.layers.mlp import MLP
from shadowkv.layers.moe import MixtureOfExperts
from shadowkv.layers.norm import GroupNorm
from shadowkv.layers.per_layer_inputs import LayerInput
from shadowkv.layers.spec import LayerSpec, StateSpace
from shadowkv.layers.streams.n_grams import NGramInput


class StreamMixer(nn.Module):
    """Mixes S streams of D dimensions into one block's input. The streams are normalised, and a low-rank gate weighs
    each dimension of each stream. There is no other norm before the block.

    Args:
        injects: whether a block follows whose output is added to the streams. False for the mixer after the last layer.
    """

    def __init__(self, spec: LayerSpec, injects: bool = True) -> None:
        super().__init__()
        assert spec.streams is not None, "the model has one stream"
        self.count, size = spec.streams.count, spec.hidden_size
        joined = self.count * size

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=spec.dtype, device=spec.device)

        self.norm = GroupNorm(joined, self.count, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)
        self.down, self.up = linear(joined, spec.streams.rank), linear(spec.streams.rank, joined)
        self.injection = linear(joined, self.count) if injects else None

    def forward(self, x: Tensor) -> Tensor:
        """Mixes joined streams [T, S * D] into the block's input [T, D]."""
        return self._mixed(self.norm(x))

    def after_add(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x + added``, [T, S * D], and the block's input [T, D], mixed from this sum."""
        x = x + added
        return x, self(x)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the block's input [T, D], mixed from joined streams [T, S * D], and the weights [T, S] with which the
        block's output is added to each stream."""
        assert self.injection is not None, "no block follows this mixer"
        normed = self.norm(x)
        return self._mixed(normed), 2 * (self.injection(normed) / self.count).sigmoid()

    def _mixed(self, normed: Tensor) -> Tensor:
        gate = self.up(F.silu(self.down(normed) / self.count)).sigmoid()
        return (gate * normed).unflatten(-1, (self.count, -1)).mean(-2)


class HyperConnectedLayer(nn.Module):
    """A decoder layer on several residual streams, with the methods of ``DecoderLayer``. ``x`` and ``added`` are joined
    streams, [T, S * D].

    Attributes:
        layer, cached_as, reuses_keys: as in ``DecoderLayer``.
    """

    def __init__(self, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.cached_as, self.reuses_keys = layer, spec.cached_as, spec.reuses_keys
        self.n_grams = NGramInput(spec, spec.n_grams) if spec.n_grams is not None else None
        self.attention_mixer = StreamMixer(spec)
        self.attention = Attention(spec) if spec.linear is None else None
        assert not isinstance(spec.linear, StateSpace), "Mamba-2 has one residual stream"
        self.linear_attention = None if spec.linear is None else GatedDeltaNet(spec, spec.linear)
        self.mlp_mixer = StreamMixer(spec)
        self.mlp: MLP | MixtureOfExperts
        if spec.experts is None:
            self.mlp = MLP(spec, spec.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(spec, spec.experts)

    def start(
        self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any, own: LayerInput | None = None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """As ``DecoderLayer.start``. ``own`` returns the token ids, int64 [T]; None if no layer reads n-grams."""
        x = x if added is None else x + added
        if self.n_grams is not None:
            assert own is not None, "the layer's token ids are missing"
            x = x + self.n_grams(x, own(self.layer), cache, batch)
        mixed, weights = self.attention_mixer.inputs(x)
        mixer = self.attention or self.linear_attention
        assert mixer is not None
        finish = mixer.start(mixed, cache, batch)
        return lambda: self._finish(batch.of_needed(x), finish(), batch.of_needed(weights))

    def append(self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any) -> None:
        """As ``DecoderLayer.append``, for a layer without n-grams."""
        mixer = self.attention or self.linear_attention
        assert mixer is not None and self.n_grams is None
        mixer.append(self.attention_mixer(x if added is None else x + added), cache, batch)

    def _finish(self, x: Tensor, attended: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x = x + _injected(attended, weights)
        mixed, weights = self.mlp_mixer.inputs(x)
        return x, _injected(self.mlp(mixed), weights)


def _injected(out: Tensor, weights: Tensor) -> Tensor:
    """Returns what is added to the joined streams, [T, S * D]: a block's output [T, D], multiplied by each stream's
    weight [T, S]."""
    return (out.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2).to(out.dtype)
