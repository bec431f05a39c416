"""Dense attention by flash-attn 2 (github.com/Dao-AILab/flash-attention, arXiv:2307.08691), on GPUs from Ampere on. It
needs a 16-bit dtype and a head dim that is a multiple of 8, up to 256."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from shadowkv.ops.case import unless
from shadowkv.ops.dense_attention.cuda import supports
from shadowkv.ops.dense_attention.forms import Packed, from_one_sequence
from shadowkv.ops.extension import gpu_missing

__all__ = ["NEEDS_LENGTHS", "attend", "causal", "missing", "packed", "partial", "supports", "windowed"]

NEEDS_LENGTHS = ("windowed",)

MIN_CAPABILITY = (8, 0)


def missing() -> list[str]:
    """Reasons why the library cannot be used here."""
    built = find_spec("flash_attn_2_cuda") is not None  # later versions have the same package name, but other functions
    return gpu_missing(MIN_CAPABILITY) + unless(
        built, "flash-attn is not installed: pip install flash-attn --no-build-isolation, which compiles it"
    )


def packed(q: Tensor, k: Tensor, v: Tensor, pack: Packed) -> Tensor:
    """Same as the reference. Can be captured in a CUDA graph."""
    if not len(q):
        return torch.empty_like(q)
    from flash_attn import flash_attn_varlen_func

    starts, key_starts = pack.cu_seqlens, pack.cu_seqlens_k
    longest = len(q) if pack.lengths is None else max(pack.lengths)
    keys, most = (starts, longest) if key_starts is None else (key_starts, len(k))
    out: Tensor = flash_attn_varlen_func(q, k, v, starts, keys, longest, most, causal=True)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, H_q, d] over k, v [m, H, d], with or without a window. Returns out [n, H_q, d] and
    its log-sum-exp, float32 [n, H_q]. Can be captured in a CUDA graph."""
    from flash_attn import flash_attn_func

    # How many positions a query sees before its own and after it; -1 means no bound.
    bounds = (-1, -1) if window is None else (window - 1, 0)
    out, lse, _ = flash_attn_func(
        q[None], k[None], v[None], causal=causal, window_size=bounds, return_attn_probs=True
    )  # the third result, probabilities, is empty without dropout
    return out[0], lse[0].T


causal, partial, windowed = from_one_sequence(attend)
