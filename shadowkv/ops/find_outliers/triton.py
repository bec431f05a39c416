"""Outlier detection in Triton. It reads the keys once and makes no float32 copies of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.triton_sizes import TOKENS


def find_outliers(rope_keys: Tensor, chunk: int, count: int, sink: int = 1) -> Tensor:
    """Same as the reference. ``chunk`` is a power of two up to 64. The last dimension of ``rope_keys`` is
    contiguous."""
    tokens, heads, dim = rope_keys.shape
    if not count:
        return torch.empty(heads, 0, dtype=torch.int64, device=rope_keys.device)
    worst = torch.empty(heads, tokens // chunk, dtype=torch.float32, device=rope_keys.device)
    _worst_cosine[(triton.cdiv(tokens, 64), heads)](
        rope_keys, worst, rope_keys.stride(0), rope_keys.stride(1), tokens // chunk, CHUNK=chunk, DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
    return worst[:, sink:].topk(count, largest=False).indices + sink


@triton.jit(do_not_specialize=["chunks"])
def _worst_cosine(
    rope_keys, worst, token_stride, head_stride, chunks, CHUNK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the smallest cosine of each chunk's keys with their mean, for a page of tokens of one head."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHUNKS: tl.constexpr = TOKENS // CHUNK
    chunk = block * CHUNKS + tl.arange(0, CHUNKS)
    within = tl.arange(0, TOKENS)
    token = block * TOKENS + within
    dim = tl.arange(0, DIM_BLOCK)
    lives = (token < chunks * CHUNK)[:, None] & (dim < DIM)[None, :]
    rows = tl.load(rope_keys + token[:, None] * token_stride + head * head_stride + dim[None, :], mask=lives, other=0.0)
    # A key's product with the mean is the mean of its products with all keys, and tensor cores compute these products.
    products = tl.dot(rows, tl.trans(rows), input_precision="ieee")
    same = (within // CHUNK)[:, None] == (within // CHUNK)[None, :]
    with_sum = tl.sum(tl.where(same, products, 0.0), 1)
    square = tl.sum(tl.where(within[:, None] == within[None, :], products, 0.0), 1)
    with_sum = tl.reshape(with_sum, (CHUNKS, CHUNK))
    square_of_sum = tl.maximum(tl.sum(with_sum, 1), 0.0)
    norms = tl.sqrt(tl.reshape(square, (CHUNKS, CHUNK))) * tl.sqrt(square_of_sum)[:, None]
    cosine = with_sum / tl.maximum(norms, CHUNK * 1e-12)
    tl.store(worst + head * chunks + chunk, tl.min(cosine, 1), mask=chunk < chunks)
