"""``Mamba2``: a layer with a state space model (arXiv:2405.21060), as in Nemotron-H. ``DecoderLayer`` uses it in place
of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.kvcache.recurrent.recurrent_part import over_rounds
from shadowkv.layers.attention import Cache
from shadowkv.layers.computing import Computing
from shadowkv.layers.norm import GroupNorm
from shadowkv.layers.spec import CONVOLUTION, RECURRENT, LayerSpec, StateSpace, projection
from shadowkv.ops.recurrence import Spans


class Mamba2(Computing):
    """Projects hidden states to output gates z, inputs x, B, C and time steps dt; convolves x, B and C over tokens;
    computes the state space model; and projects the gated and normalised result. The cache keeps two states for each
    sequence: the convolution's last inputs, and a matrix for each head.
    """

    calls = ("causal_convolution", "ssd")

    def __init__(self, spec: LayerSpec, sizes: StateSpace) -> None:
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=spec.device), requires_grad=False)

        self.layer, self.group, self.sizes = spec.cached_as, spec.group, sizes
        self.zxbcdt = projection(spec, "linear_attention.zxbcdt", spec.hidden_size, sizes.projected)
        self.convolution = empty(sizes.channels, 1, sizes.kernel, dtype=spec.dtype)
        self.convolution_bias = empty(sizes.channels, dtype=spec.dtype)
        self.log_rate = empty(sizes.heads, dtype=torch.float32)
        self.time_bias = empty(sizes.heads, dtype=torch.float32)
        self.skip = empty(sizes.heads, dtype=torch.float32)
        self.norm = GroupNorm(sizes.values, sizes.groups, spec.rms_norm_eps, dtype=spec.dtype, device=spec.device)
        self.out = projection(spec, "linear_attention.out", sizes.values, spec.hidden_size)

    def start(self, x: Tensor, cache: Cache, batch: Any) -> Callable[[], Tensor]:
        """Runs the layer on normalised hidden states [T, D], and updates the recurrent states.

        The returned function returns the layer's output [n, D], for the n tokens that need an output. D is the hidden
        size.
        """
        out, z = self._mixed(x, cache, batch)
        gated = batch.of_needed(out).flatten(1).float() * F.silu(batch.of_needed(z).float())
        result = self.group.sum(self.out(self.norm(gated).to(x.dtype)))
        return lambda: result

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Updates the recurrent states, without an output."""
        self._mixed(x, cache, batch)

    def _mixed(self, x: Tensor, cache: Cache, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the state space model's results [T, H, P] and the output gates [T, H * P] for normalised hidden
        states. H is the number of heads, P their dimension."""
        sizes = self.sizes
        z, xbc, dt = self.zxbcdt(x).split((sizes.values, sizes.channels, sizes.heads), dim=-1)
        dt = F.softplus(dt.float() + self.time_bias).clamp(*sizes.time_limits)
        states, parts = cache.states(self.layer, batch)
        return over_rounds(parts, partial(self._round, states, -self.log_rate.exp()), xbc, dt), z

    def _round(self, states: dict[str, Tensor], a: Tensor, xbc: Tensor, dt: Tensor, spans: Spans) -> Tensor:
        """Returns the results [T, H, P] for the tokens of a round."""
        sizes, weight = self.sizes, self.convolution.squeeze(1)
        mixed = self.ops.causal_convolution(xbc, weight, states[CONVOLUTION], spans, self.convolution_bias)
        x, b, c = mixed.split((sizes.values, sizes.keys, sizes.keys), dim=-1)
        b, c = (one.unflatten(-1, (sizes.groups, sizes.state_dim)) for one in (b, c))
        x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
        return self.ops.ssd(x, dt, a, b, c, self.skip, states[RECURRENT], spans)
