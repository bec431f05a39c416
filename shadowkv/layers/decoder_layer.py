"""Decoder layer: attention and an MLP or experts around the residual stream, whole or in the two passes of a blockwise
prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shadowkv.layers.attention import Attention, Cache
from shadowkv.layers.mlp import MLP
from shadowkv.layers.moe import MixtureOfExperts
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec


class DecoderLayer(nn.Module):
    """A layer, whole or in parts.

    Prefill is layer-major and runs in token blocks: ``normalise`` and ``append`` on all blocks, then ``attend`` on all
    blocks, equals ``forward`` on all tokens at once. It can be paused between any two blocks. ``begin`` is ``forward``
    up to where attention may have to wait.
    """

    post_attention_norm: RMSNorm | None
    post_mlp_norm: RMSNorm | None

    def __init__(self, spec: LayerSpec, layer: int) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

        self.attention_norm = norm()
        self.attention = Attention(spec, layer)
        self.mlp_norm = norm()
        self.mlp = MLP(spec, spec.intermediate_size) if spec.experts is None else MixtureOfExperts(spec, spec.experts)
        self.post_attention_norm = norm() if spec.post_norms else None
        self.post_mlp_norm = norm() if spec.post_norms else None

    def forward(
        self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The whole layer, for prompts of one block: residual stream [T, D] and what the previous layer adds to it ->
        the same two.

        They are added where the next norm is computed, in one launch. With ``wanted``, int64 [n], both are [n, D]: the
        other tokens go no further than attention needs them.
        """
        return self.begin(x, added, cache, batch, wanted)()

    def begin(
        self, x: Tensor, added: Tensor | None, cache: Cache, batch: Any, wanted: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begins ``forward``; the returned function finishes it."""
        x, normed = self.normalise(x, added)
        attended = self.attention.begin(normed, cache, batch, wanted)
        return lambda: self._finish(x if wanted is None else x[wanted], attended())

    def normalise(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """A block [T, D] of the residual stream with what the previous layer adds to it, and the input of attention."""
        return (x, self.attention_norm(x)) if added is None else self.attention_norm.after_add(x, added)

    def append(self, normed: Tensor, cache: Cache, batch: Any) -> None:
        """Stores keys and values of a normalised block [T, D] in the cache."""
        self.attention.append(normed, cache, batch)

    def attend(self, x: Tensor, normed: Tensor, cache: Cache, batch: Any) -> tuple[Tensor, Tensor]:
        """The rest of the layer for a block whose sequences' keys and values are all in the cache: both [T, D] as
        ``normalise`` returns them -> residual stream and what is to be added to it."""
        return self._finish(x, self.attention.attend(normed, cache, batch))

    def _finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        x, normed = self.mlp_norm.after_add(x, attended)
        hidden = self.mlp(normed)
        if self.post_mlp_norm is not None:
            hidden = self.post_mlp_norm(hidden)
        return x, hidden
