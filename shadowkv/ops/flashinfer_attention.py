"""FlashInfer's prefill attention (arXiv:2501.01005), where it is installed: on a Hopper its FlashAttention-3 kernels.

They plan nothing on the host, unlike cuDNN's, and take shapes as they are: blocks of some hundred queries take half as
long (``scripts/bench/bench_causal_attention.py``).
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless

DIM = 128
"""The head dim for which they were measured to be the faster ones."""


@cache
def available() -> bool:
    """Whether FlashInfer runs on this GPU, a Hopper: kernels that nobody has compiled yet take it about a minute."""
    if find_spec("flashinfer") is None or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        attend(*torch.randn(3, 128, 1, DIM, device="cuda", dtype=torch.bfloat16))
    except Exception as error:  # whatever a compiler, a loader or a launch may raise: there is another way
        warnings.warn(f"FlashInfer is installed but does not run here, PyTorch's attention does: {error}", stacklevel=2)
        return False
    return True


def supports(case: Case) -> list[str]:
    """Why it is not used for a case."""
    dims = unless(case.head_dim == DIM, f"head dim {case.head_dim} is not {DIM}, for which alone it was measured")
    return unless(case.dtype == torch.bfloat16, f"{case.dtype} is not bfloat16") + dims


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As ``block_attention``, but keys and values are [m, H, d], whatever their strides: FlashInfer 0.7.2 takes
    [H, m, d] for that on a Hopper, whatever layout it is told, and divides by 0."""
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(q.contiguous(), k, v, causal=causal, return_lse=True)
    return out, lse * math.log(2)  # its logarithms are to base 2
