"""PyTorch's fused attention with its log-sum-exp on a GPU: flash attention, and cuDNN's for large blocks on a Hopper.

For 8192 queries and 53248 keys before them (32 query and 8 kv heads of 128) cuDNN's does 645 TFLOP/s on an H200, flash
attention 345. But it plans every shape anew, which takes the host 36 ms: few shapes are asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGE = 2**24
"""Pairs of queries and keys from which cuDNN's is worth a plan: over the layers of a model it saves some 10 ms."""

STEP = 512
"""Queries and keys of plans are multiples of this."""

UNIT, SPAN = 8192, 65536
"""Keys of most plans are multiples of a unit up to a span; longer runs are taken apart and merged. So there are few
plans, however long a context is, and an engine can have made them all before its first prompt."""


def spans(keys: int) -> Iterator[slice]:
    """Runs of ``keys``, a multiple of STEP, that plans are made for."""
    start = 0
    while start < keys:
        left = keys - start
        stop = start + (SPAN if left >= SPAN else left // UNIT * UNIT or left)
        yield slice(start, stop)
        start = stop


def is_large(q: Tensor, keys: int) -> bool:
    """Whether cuDNN's serves queries [n, H_q, d] over so many keys."""
    return (
        len(q) * keys >= LARGE
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As ``block_attention``, in a dtype of 16 bits, for head dims that are a multiple of 8 and up to 256."""
    n, m = len(q), k.shape[1]
    whole = n == m if causal else m % STEP == 0
    large = whole and is_large(q, m)
    if large and n % STEP:  # rows that nobody sees: later than all where causal
        q = pad(q, (0, 0, 0, 0, 0, -n % STEP))
        if causal:
            k, v = (pad(x, (0, 0, 0, -n % STEP)) for x in (k, v))
    queries, k, v = q.transpose(0, 1)[None], k[None], v[None]
    if large:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(queries, k, v, None, True, 0.0, causal)
        lse = lse.view(lse.shape[:3])
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, k, v, 0.0, causal)
    return out[0].transpose(0, 1)[:n], lse[0].T[:n]
