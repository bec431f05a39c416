"""Prefill attention on Hopper, over selected blocks or over all keys (``csrc/kernels/attend_blocks_sm90/``)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.extension import HOPPER, cuda_missing

DIMS = (64, 128)
"""Head dims that the kernel supports."""
DTYPES = (torch.bfloat16, torch.float16)


missing = partial(cuda_missing, "attend_blocks_sm90", "attend_blocks_sm90", "attend_sequences_sm90", capability=HOPPER)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless_one_of(case.dtype, DTYPES) + unless_one_of(case.head_dim, DIMS, "head dim")


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference. Sums are in float32. Can be captured in a CUDA graph.

    The dtype is bfloat16 or float16, the head dim 64 or 128. Strides between heads and tokens of q, k and v are
    multiples of 16 bytes. ``indices``, ``counts`` and ``weights`` are read on the device and not checked. If a tile's
    indices lack a block that holds keys of the tile's own positions, the causal mask is wrong. The results of a tile
    without any block are not written. Blocks outside k and v read as zeros.
    """
    out, taken = q.new_empty(q.shape), _taken(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    torch.ops.shadowkv_cuda.attend_blocks_sm90(q, k, v, indices, counts, weights, _scale(q), taken, out, lse)
    return out, lse


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, H_q, d] over all of k, v [m, H, d], for ``dense_attention``. Returns the result
    [n, H_q, d] and its log-sum-exp, float32 [n, H_q].

    Dtypes, head dims and strides are those of ``attend_blocks``.

    Args:
        causal: with True, the queries are the last n of the m positions, and each sees the positions up to its own.
            With False, each query sees all positions.
        cu_seqlens: int32 [S + 1], the start of the queries of each of S packed sequences, from 0 to n. It is read on
            the device. Attention is causal within each sequence. None for a single sequence.
        cu_seqlens_k: int32 [S + 1], the start of each sequence's keys, from 0 to at most m. It is read on the device
            and not checked. None if there are as many keys as queries.
    """
    out, taken = q.new_empty(q.shape), _taken(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    torch.ops.shadowkv_cuda.attend_sequences_sm90(q, k, v, cu_seqlens, cu_seqlens_k, causal, _scale(q), taken, out, lse)
    return out, lse


def _taken(q: Tensor) -> Tensor:
    """Allocates the kernel's counter of tiles that thread blocks have taken, int32 [1]. It starts at 0."""
    return torch.zeros(1, dtype=torch.int32, device=q.device)


def _scale(q: Tensor) -> float:
    return float(q.shape[2] ** -0.5 * math.log2(math.e))
