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

NEEDS_LENGTHS = True

FASTER_AT = (256,)
"""Head dims at which it takes less than 0.7 of Triton's time on an H200. Ours takes 1.06 to 1.26 of its time at 128,
and 0.86 to 1.0 at 64, for which nobody should wait while kernels compile."""

WORKSPACE = 128 * 2**20
"""Bytes for partial results, as many as the library recommends."""

PLANS = 8
"""Plans that are kept, each with 8 MiB on the device and on the host: in every layer packs of a batch take turns."""


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int] | None = None
) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims of 64, 128 or 256. A pack is planned in its first call,
    which waits for the one before; cannot be captured in a CUDA graph."""
    if not len(q):
        return torch.empty_like(q)
    lengths = cu_seqlens.diff().tolist() if lengths is None else lengths
    out: Tensor = _planned(tuple(lengths), q.shape[1:], k.shape[1], q.dtype, q.device).run(q, k, v)
    return out


@lru_cache(PLANS)
def _planned(
    lengths: tuple[int, ...], query: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """The library's object that attends to a pack, for queries [H_q, d]."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace, copied = _workspace(device)
    copied.synchronize()  # a plan that was dropped may be on its way from pinned memory, which is given to the next
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)  # on the host, so that it need not be read
    wrapper.plan(starts, starts, query[0], kv_heads, query[1], causal=True, q_data_type=dtype, kv_data_type=dtype)
    copied.record()
    return wrapper


@cache
def _workspace(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Memory that the packs of a device take turns with, and what marks that the latest plan is on it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device), torch.cuda.Event()
