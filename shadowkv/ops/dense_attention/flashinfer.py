"""Dense attention by FlashInfer (github.com/flashinfer-ai/flashinfer, arXiv:2501.01005).

FlashInfer compiles a kernel with nvcc for every dtype and head dim, with and without a window, and keeps it in
``~/.cache/flashinfer``. The dtype has 16 bits, the head dim is 64, 128 or 256.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shadowkv.installation import adding
from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.cuda_compiler import PYPI, CompilerNotFound, find_compiler
from shadowkv.ops.dense_attention.forms import Packed, from_one_sequence
from shadowkv.ops.extension import gpu_missing

NEEDS_LENGTHS = ("packed", "windowed")

FASTER_AT = {"causal": (256,), "packed": (256,)}
"""Head dims at which FlashInfer is faster, by form. On an H200 with 256 dimensions, FlashInfer takes less than half of
PyTorch's time for one sequence, and less than 0.7 of Triton's time for packed sequences. With 64 or 128 dimensions, it
takes 0.94 to 1.08 times our kernel's time for one sequence. For packed sequences, it takes 0.79 to 0.94 times our
kernel's time with 128 dimensions, and 1.0 to 1.16 times with 64. With 128 dimensions, FlashInfer thus saves at most
21 % for packed sequences. Compiling its kernels takes too long for that."""

WORKSPACE = 128 * 2**20
"""Bytes for partial results, as the library recommends."""

PLANS = 8
"""Number of plans that are kept. Each takes 8 MiB on the device and 8 MiB on the host. A batch can have several packs.
Every layer computes them one after another, each with its own plan."""

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability whose tensor cores have bfloat16."""

DIMS = (64, 128, 256)
"""Head dims for which FlashInfer's attention can be compiled."""


def missing() -> list[str]:
    """Reasons why the library cannot be used here."""
    if find_spec("flashinfer") is None:
        return [*gpu_missing(MIN_CAPABILITY), f"flashinfer-python is not installed: {adding('flashinfer')}"]
    return gpu_missing(MIN_CAPABILITY) + _compiler_missing()


def supports(case: Case) -> list[str]:
    """Why the library cannot serve a case."""
    return unless_one_of(case.dtype, (torch.bfloat16, torch.float16)) + unless_one_of(case.head_dim, DIMS, "head dim")


def packed(q: Tensor, k: Tensor, v: Tensor, pack: Packed) -> Tensor:
    """Same as the reference. Cannot be captured in a CUDA graph: in the first call with a pack, the library plans the
    work on the host. Planning waits until the previous plan has been copied to the device."""
    if not len(q):
        return torch.empty_like(q)
    lengths = tuple(pack.cu_seqlens.diff().tolist() if pack.lengths is None else pack.lengths)
    keys = lengths if pack.cu_seqlens_k is None else tuple(pack.cu_seqlens_k.diff().tolist())
    out: Tensor = _planned(lengths, keys, q.shape[1:], k.shape[1], q.dtype, q.device).run(q, k, v)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, H_q, d] over k, v [m, H, d], with or without a window. Returns out [n, H_q, d] and
    its log-sum-exp, float32 [n, H_q]. The call needs no plan on the host, and can be captured in a CUDA graph."""
    from flashinfer import single_prefill_with_kv_cache

    before = -1 if window is None else window - 1  # positions that a query sees before its own; -1 means all
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=causal, window_left=before, return_lse=True)
    return out, lse * math.log(2)  # the library's log-sum-exp is in base 2


causal, partial, windowed = from_one_sequence(attend)


@cache
def _compiler_missing() -> list[str]:
    """Returns the reason why the library cannot compile its kernels. Returns ``[]`` if it can, or if the package with
    compiled kernels is installed."""
    if find_spec("flashinfer_jit_cache") is not None:
        return []
    try:
        whole = find_compiler(None).origin != PYPI  # PyPI's packages lack curand's headers, which the library includes
    except CompilerNotFound:
        whole = False
    places = "in $CUDA_HOME, on the path or in /usr/local/cuda"
    return unless(whole, f"flashinfer compiles its kernels with a CUDA toolkit, and there is none {places}")


@lru_cache(PLANS)
def _planned(
    lengths: tuple[int, ...],
    keys: tuple[int, ...],
    query: torch.Size,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Returns the library's wrapper with a plan for packed sequences. Sequence i has ``lengths[i]`` queries and
    ``keys[i]`` keys. ``query`` is the shape (H_q, d) of a token's queries."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace, copied = _workspace(device)
    copied.synchronize()  # the new plan may reuse a dropped plan's pinned memory, whose copy may still run
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    # The library reads these offsets on the host.
    starts, key_starts = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, keys))
    wrapper.plan(starts, key_starts, query[0], kv_heads, query[1], causal=True, q_data_type=dtype, kv_data_type=dtype)
    copied.record()
    return wrapper


@cache
def _workspace(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Returns the workspace that all plans of a device share, and the event that marks when the latest plan has been
    copied to the device."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device), torch.cuda.Event()
