"""Causal prefill attention through PyTorch's fused kernels for GPUs, with no mask in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shadowkv.ops.fused_attention import SPAN, STEP, UNIT, attend, is_large, spans
from shadowkv.ops.merge_attention import triton as merge


def available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the reference. float32 and head dims that are no multiple of 8 take a mask of n x m, others none."""
    n, m = len(q), len(k)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > 256:
        q, bias = q.transpose(0, 1)[None], causal_lower_right(n, m)
        return scaled_dot_product_attention(q, k[None], v[None], bias, enable_gqa=True)[0].transpose(0, 1)
    before = (m - n) // STEP * STEP
    if not is_large(q, before):
        return attend(q, k, v, causal=True)[0]
    parts = [attend(q, k[:, span], v[:, span]) for span in spans(before)]
    return merge.merge_attention([*parts, attend(q, k[:, before:], v[:, before:], causal=True)])


def planned(q: Tensor, longest: int) -> Iterator[tuple[int, int]]:
    """Numbers of queries and keys of calls that plan all that prompts of up to ``longest`` tokens need.

    They are computed in blocks of as many queries as ``q`` [n, H_q, d] has, a multiple of UNIT, the last of fewer.
    """
    for before in range(0, min(longest, SPAN + 1), UNIT):
        for n in range(STEP, min(len(q), longest - before + STEP - 1) + 1, STEP):
            if is_large(q[:n], before or n):
                yield n, before + n
