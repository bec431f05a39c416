"""Attention with its log-sum-exp by FlashInfer (github.com/flashinfer-ai/flashinfer, arXiv:2501.01005): kernels that it
compiles here with nvcc, once for every dtype and head dim, with a window or without, and keeps in
``~/.cache/flashinfer``."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from shadowkv.installation import adding
from shadowkv.ops.case import Case, unless
from shadowkv.ops.cuda_compiler import PYPI, CompilerNotFound, find_compiler
from shadowkv.ops.extension import gpu_missing

MIN_CAPABILITY = (8, 0)
"""Of tensor cores with bfloat16."""

DIMS = (64, 128, 256)
"""Head dims that its attention is compiled for."""


def missing() -> list[str]:
    """The reasons why the library cannot be used here; none if it can."""
    if find_spec("flashinfer") is None:
        return [*gpu_missing(MIN_CAPABILITY), f"flashinfer-python is not installed: {adding('flashinfer')}"]
    return gpu_missing(MIN_CAPABILITY) + _compiler_missing()


def supports(case: Case) -> list[str]:
    """Why the library cannot serve a case."""
    dims = unless(case.head_dim in DIMS, f"head dim {case.head_dim} is not {', '.join(map(str, DIMS))}")
    return unless(case.dtype in (torch.bfloat16, torch.float16), f"{case.dtype} is not of 16 bits") + dims


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 16-bit dtypes and head dims of 64, 128 or 256; the last dimension of every tensor is
    dense. Can be captured in a CUDA graph."""
    return attend(q, k.transpose(0, 1), v.transpose(0, 1), causal)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention of q [n, H_q, d] over k, v [m, H, d], over the newest ``window`` positions up to each one's own where
    there is one: out [n, H_q, d] and the log-sum-exp, float32 [n, H_q]. Needs no plan on the host."""
    from flashinfer import single_prefill_with_kv_cache

    before = -1 if window is None else window - 1  # positions before a query's own; -1 is all
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=causal, window_left=before, return_lse=True)
    return out, lse * math.log(2)  # the library's are in base 2


@cache
def _compiler_missing() -> list[str]:
    """Why the library cannot compile its kernels, unless they are installed compiled."""
    if find_spec("flashinfer_jit_cache") is not None:
        return []
    try:
        whole = find_compiler(None).origin != PYPI  # which lacks the headers of curand that the library includes
    except CompilerNotFound:
        whole = False
    places = "of $CUDA_HOME, on the path or in /usr/local/cuda"
    return unless(whole, f"flashinfer compiles its kernels with a CUDA toolkit, {places}: there is none")
