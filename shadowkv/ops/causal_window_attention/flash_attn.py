"""Causal prefill attention within a window by flash-attn, without scores in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shadowkv.ops.add_sinks.reference import add_sinks
from shadowkv.ops.block_attention.flash_attn import attend, missing, supports
from shadowkv.ops.ragged_attention.reference import of_each

__all__ = ["NEEDS_LENGTHS", "causal_window_attention", "missing", "supports"]

NEEDS_LENGTHS = ("cuda",)


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
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256, n at least 1."""
    if cu_seqlens is not None:
        attend_each = partial(causal_window_attention, window=window, sinks=sinks)
        return of_each(attend_each, q, k, v, cu_seqlens, lengths, cu_seqlens_k)
    out, lse = attend(q, k, v, causal=True, window=window)
    return out if sinks is None else add_sinks(out, lse, sinks)[0]
