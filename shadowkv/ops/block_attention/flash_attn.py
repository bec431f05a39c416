"""Attention with its log-sum-exp by flash-attn (github.com/Dao-AILab/flash-attention, arXiv:2307.08691): version 2 of
it, for GPUs from Ampere on."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from shadowkv.ops.block_attention.cuda import supports
from shadowkv.ops.case import unless
from shadowkv.ops.extension import gpu_missing

__all__ = ["attend", "block_attention", "missing", "supports"]

MIN_CAPABILITY = (8, 0)


def missing() -> list[str]:
    """The reasons why the library cannot be used here; none if it can."""
    built = find_spec("flash_attn_2_cuda") is not None  # later versions share the package's name, and not its functions
    return gpu_missing(MIN_CAPABILITY) + unless(
        built, "flash-attn is not installed: pip install flash-attn --no-build-isolation, which compiles it"
    )


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256; the last dimension of
    every tensor is dense. Can be captured in a CUDA graph."""
    return attend(q, k.transpose(0, 1), v.transpose(0, 1), causal)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention of q [n, H_q, d] over k, v [m, H, d], over the newest ``window`` positions up to each one's own where
    there is one: out [n, H_q, d] and the log-sum-exp, float32 [n, H_q]."""
    from flash_attn import flash_attn_func

    # Bounds of a window are inclusive, of positions before a query's own and after it; -1 is none.
    bounds = (-1, -1) if window is None else (window - 1, 0)
    out, lse, _ = flash_attn_func(
        q[None], k[None], v[None], causal=causal, window_size=bounds, return_attn_probs=True
    )  # probabilities are empty without dropout
    return out[0], lse[0].T
