"""Prefill attention on Hopper, over selected blocks or everything: ``csrc/kernels/attend_blocks_sm90/``."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import HOPPER, cuda_missing

DIMS = (64, 128)
"""Head dims that the kernel supports."""
DTYPES = (torch.bfloat16, torch.float16)


missing = partial(cuda_missing, "attend_blocks_sm90", "attend_blocks_sm90", "attend_sequences_sm90", capability=HOPPER)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    dims = unless(case.head_dim in DIMS, f"head dim {case.head_dim} is not 64 or 128")
    return unless(case.dtype in DTYPES, f"{case.dtype} is not bfloat16 or float16") + dims


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference; sums are in float32. Can be captured in a CUDA graph.

    bfloat16 or float16 with a head dim of 64 or 128; strides between heads and tokens of q, k and v are multiples of
    16 bytes. ``indices``, ``counts`` and ``weights`` are read on the device and not checked: a tile whose list lacks
    blocks of its own positions is masked incorrectly, and a tile without any block is not written. Blocks outside k and
    v read as zeros.
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
    """Attention [n, H_q, d] over all of k, v [m, H, d], and float32 log-sum-exp [n, H_q]; as above otherwise.

    Args:
        causal: q are the last n of the m positions, and each sees those up to its own; otherwise it sees all.
        cu_seqlens: int32 [S + 1], the start of each of S packed sequences' queries, from 0 to n, read on the device;
            attention is causal within each sequence. None for a single sequence.
        cu_seqlens_k: int32 [S + 1], the start of each one's keys, from 0 to m or less, read on the device and not
            checked; None where there are as many keys as queries.
    """
    out, taken = q.new_empty(q.shape), _taken(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    torch.ops.shadowkv_cuda.attend_sequences_sm90(q, k, v, cu_seqlens, cu_seqlens_k, causal, _scale(q), taken, out, lse)
    return out, lse


def _taken(q: Tensor) -> Tensor:
    """Number of tiles taken by thread blocks so far."""
    return torch.zeros(1, dtype=torch.int32, device=q.device)


def _scale(q: Tensor) -> float:
    return float(q.shape[2] ** -0.5 * math.log2(math.e))
