"""``GatedDeltaNet``: a layer of linear attention (arXiv:2412.06464), as in Qwen3.5. ``DecoderLayer`` uses it in place
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
from shadowkv.layers.linear import Linear
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import CONVOLUTION, RECURRENT, LayerSpec, LinearAttention, projection
from shadowkv.ops.recurrence import Spans


class GatedDeltaNet(Computing):
    """Projects hidden states to queries, keys, values and output gates; convolves queries, keys and values over tokens;
    applies the gated delta rule; and projects the gated result. The cache keeps two states for each sequence: the
    convolution's last inputs, and a matrix for each value head.
    """

    calls = ("causal_convolution", "gated_delta_rule")

    def __init__(self, spec: LayerSpec, linear: LinearAttention) -> None:
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=spec.device), requires_grad=False)

        self.layer, self.group, self.sizes = spec.cached_as, spec.group, linear
        self.qkvz = projection(spec, "linear_attention.qkvz", spec.hidden_size, linear.channels + linear.values)
        gates = 2 * linear.value_heads
        self.beta_decay = Linear(spec.hidden_size, gates, bias=False, dtype=spec.dtype, device=spec.device)
        self.convolution = empty(linear.channels, 1, linear.kernel, dtype=spec.dtype)
        self.log_rate = empty(linear.value_heads, dtype=torch.float32)
        self.rate_bias = empty(linear.value_heads, dtype=torch.float32)
        self.norm = RMSNorm(linear.value_dim, spec.rms_norm_eps, dtype=spec.dtype, device=spec.device)
        self.out = projection(spec, "linear_attention.out", linear.values, spec.hidden_size)

    def start(self, x: Tensor, cache: Cache, batch: Any) -> Callable[[], Tensor]:
        """Runs the layer on normalised hidden states [T, D], and updates the recurrent states.

        The returned function returns the layer's output [n, D], for the n tokens that need an output. D is the hidden
        size.
        """
        out, z = self._mixed(x, cache, batch)
        normed = self.norm(batch.of_needed(out))
        gate = batch.of_needed(z).unflatten(-1, normed.shape[1:])
        activated = F.silu(gate.float()) if self.sizes.gate == "silu" else gate.float().sigmoid()
        gated = (normed * activated).to(x.dtype)
        result = self.group.sum(self.out(gated.flatten(1)))
        return lambda: result

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Updates the recurrent states, without an output."""
        self._mixed(x, cache, batch)

    def _mixed(self, x: Tensor, cache: Cache, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the delta rule's results [T, H, dv] and the output gates [T, H * dv] for normalised hidden states. H
        is the number of value heads, dv their dimension."""
        qkv, z = self.qkvz(x).split((self.sizes.channels, self.sizes.values), dim=-1)
        beta, rate = self.beta_decay(x).float().chunk(2, dim=-1)
        log_decay = -self.log_rate.exp() * F.softplus(rate + self.rate_bias)
        states, parts = cache.states(self.layer, batch)
        compute = partial(self._round, states)
        return over_rounds(parts, compute, qkv, log_decay, beta.sigmoid()), z

    def _round(self, states: dict[str, Tensor], qkv: Tensor, log_decay: Tensor, beta: Tensor, spans: Spans) -> Tensor:
        """Returns the delta rule's results [T, H, dv] for the tokens of a round."""
        sizes = self.sizes
        mixed = self.ops.causal_convolution(qkv, self.convolution.squeeze(1), states[CONVOLUTION], spans)
        q, k, v = mixed.split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        q, k = (x.unflatten(-1, (sizes.key_heads, sizes.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (sizes.value_heads, sizes.value_dim))
        if sizes.tiled:  # the op gives a key head to neighbouring value heads, so each value head gets a copy here
            q, k = (x.repeat(1, sizes.value_heads // sizes.key_heads, 1) for x in (q, k))
        return self.ops.gated_delta_rule(q, k, v, log_decay, beta, states[RECURRENT], spans)
