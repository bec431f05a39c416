"""Causal attention of packed sequences by FlashInfer, which plans on the host how kernels divide the work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.block_attention.flashinfer import missing, supports

__all__ = ["FASTER_AT", "missing", "ragged_attention", "supports"]

NEEDS_LENGTHS = ("cuda",)

FASTER_AT = (256,)
"""Head dims at which it takes less than 0.7 of Triton's time on an H200. Ours takes 1.06 to 1.26 of its time at 128,
and 0.86 to 1.0 at 64, for which nobody should wait while kernels compile."""

WORKSPACE = 128 * 2**20
"""Bytes for partial results, as many as the library recommends."""

PLANS = 8
"""Plans that are kept, each with 8 MiB on the device and on the host: in every layer packs of a batch take turns."""


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims of 64, 128 or 256. A pack is planned in its first call,
    which waits for the one before; cannot be captured in a CUDA graph."""
    if not len(q):
        return torch.empty_like(q)
    lengths = tuple(cu_seqlens.diff().tolist() if lengths is None else lengths)
    keys = lengths if cu_seqlens_k is None else tuple(cu_seqlens_k.diff().tolist())
    out: Tensor = _planned(lengths, keys, q.shape[1:], k.shape[1], q.dtype, q.device).run(q, k, v)
    return out


@lru_cache(PLANS)
def _planned(
    lengths: tuple[int, ...],
    keys: tuple[int, ...],
    query: torch.Size,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The library's object that attends to a pack of ``lengths`` queries [H_q, d] over ``keys`` keys."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace, copied = _workspace(device)
    copied.synchronize()  # a plan that was dropped may be on its way from pinned memory, which is given to the next
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    # On the host, so that they need not be read.
    starts, key_starts = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, keys))
    wrapper.plan(starts, key_starts, query[0], kv_heads, query[1], causal=True, q_data_type=dtype, kv_data_type=dtype)
    copied.record()
    return wrapper


@cache
def _workspace(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Memory that the packs of a device take turns with, and what marks that the latest plan is on it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device), torch.cuda.Event()
