"""Decoder layer: attention and MLP around the residual stream, whole or in the two passes of a blockwise prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shadowkv.layers.attention import Attention, Cache
from shadowkv.layers.mlp import MLP
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec


class DecoderLayer(nn.Module):
    """A layer with four entry points.

    Prefill is layer-major and runs in token blocks: ``append`` on all blocks, then ``attend`` on all blocks, equals
    ``forward`` on all tokens at once. Between any two blocks it can be paused. ``begin`` is ``forward`` up to where
    attention may have to wait.
    """

    post_attention_norm: RMSNorm | None
    post_mlp_norm: RMSNorm | None

    def __init__(self, spec: LayerSpec, layer: int) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.dtype, device=spec.device, ops=spec.ops)

        self.attention_norm = norm()
        self.attention = Attention(spec, layer)
        self.mlp_norm = norm()
        self.mlp = MLP(spec)
        self.post_attention_norm = norm() if spec.post_norms else None
        self.post_mlp_norm = norm() if spec.post_norms else None

    def forward(self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any) -> tuple[Tensor, Tensor]:
        """The whole layer (decode): residual stream [T, D] and what the layer before adds to it -> the same two.

        They are added where the next norm is taken, in one launch.
        """
        return self.begin(x, added, cache, batch)()

    def begin(self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begins ``forward``; what is returned finishes it."""
        x, normed = (x, self.attention_norm(x)) if added is None else self.attention_norm.after_add(x, added)
        attended = self.attention.begin(normed, cache, batch)
        return lambda: self._finish(x, attended())

    def append(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """Keys and values of a block [T, D] of the residual stream into the cache."""
        self.attention.append(self.attention_norm(x), cache, batch)

    def attend(self, x: Tensor, cache: Cache, batch: Any) -> None:
        """The rest of the layer for a block [T, D] whose sequences' keys and values are all in the cache, in place."""
        total, added = self._finish(x, self.attention.attend(self.attention_norm(x), cache, batch))
        torch.add(total, added, out=x)

    def _finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        x, normed = self.mlp_norm.after_add(x, attended)
        hidden = self.mlp(normed)
        if self.post_mlp_norm is not None:
            hidden = self.post_mlp_norm(hidden)
        return x, hidden
