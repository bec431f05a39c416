"""Causal attention within a window in one Triton launch, ``ragged_attention``'s kernel: blocks of keys before a tile's
windows are not read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.ops.ragged_attention.triton import attend, supports

__all__ = ["causal_window_attention", "supports"]


def causal_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Same as the reference, for head dims up to 256; the last dimension of every tensor is dense."""
    return attend(q, k, v, cu_seqlens, cu_seqlens_k, window, sinks)
