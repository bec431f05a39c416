"""Projection of keys in one Triton kernel: keys are read once, latents written straight into their pages.

61440 tokens of 1024 dimensions on 160 directions take 0.08 ms on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MOST_RANKS = 256
"""Rank dimensions of a thread block: 64 x 256 sums in float32 are half of a multiprocessor's registers."""


def project_latents(
    keys: Tensor, basis: Tensor, mean: Tensor | None, step: Tensor | None, slots: Tensor, latents: Tensor, pages: Tensor
) -> None:
    """As the reference; the last dimension of ``keys`` and all but the first of ``basis``, ``mean`` and ``step`` are
    dense."""
    layers, count, _, heads, dim = keys.shape
    rank = basis.shape[2]
    if not layers * count:
        return
    quantised = mean is not None and step is not None
    # Anything stands in for what is not there and not read.
    mean, step = (mean, step) if mean is not None and step is not None else (basis, basis)
    block = min(MOST_RANKS, max(16, triton.next_power_of_2(rank)))
    _project_latents[(count, layers, triton.cdiv(rank, block))](
        keys, basis, mean, step, slots, latents, pages,
        *keys.stride()[:4], basis.stride(0), mean.stride(0), step.stride(0), latents.stride(0), latents.stride(1),
        SHARED=len(slots) == 1, QUANTISED=quantised, HEADS=heads, DIM=dim, RANK=rank, RANK_BLOCK=block,
        STRETCH=32 if dim % 32 == 0 else 16, num_warps=8 if block > 64 else 4, num_stages=4,
    )  # fmt: skip


@triton.jit
def _project_latents(
    keys, basis, mean, step, slots, latents, pages,
    key_layer, key_page, key_token, key_head, basis_layer, mean_layer, step_layer, latent_layer, latent_page,
    SHARED: tl.constexpr, QUANTISED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """One page of one layer."""
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, within = tl.arange(0, 64), tl.arange(0, STRETCH)
    rank = tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    slot = tl.load(slots) if SHARED else tl.load(slots + page)
    row = keys + layer * key_layer + page * key_page + token[:, None] * key_token
    direction = basis + layer * basis_layer + slot * (RANK * HEADS * DIM) + rank[None, :] * (HEADS * DIM)
    PARTS: tl.constexpr = (DIM + STRETCH - 1) // STRETCH
    total = tl.zeros((64, RANK_BLOCK), tl.float32)
    for part in range(HEADS * PARTS):
        head, dim = part // PARTS, part % PARTS * STRETCH + within
        lives = dim < DIM
        column = head * DIM + dim
        x = tl.load(row + head * key_head + dim[None, :], mask=lives[None, :], other=0.0)
        b = tl.load(direction + column[:, None], mask=lives[:, None] & (rank < RANK)[None, :], other=0.0)
        total = tl.dot(x, b, total, input_precision="ieee")
    target = latents + layer * latent_layer + tl.load(pages + page) * latent_page + token[:, None] * RANK
    if QUANTISED:
        size = tl.load(step + layer * step_layer + slot * RANK + rank, mask=rank < RANK, other=1.0)
        centre = tl.load(mean + layer * mean_layer + slot * RANK + rank, mask=rank < RANK, other=0.0)
        ratio = (total - centre[None, :]) / (size * size)[None, :]
        # Ties to even, as torch.round: adding and taking off 1.5 * 2^23 drops the fraction.
        ratio = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
        whole = (ratio + 12582912.0) - 12582912.0
        tl.store(target + rank[None, :], whole.to(tl.int8), mask=(rank < RANK)[None, :])
    else:
        tl.store(target + rank[None, :], total.to(latents.dtype.element_ty), mask=(rank < RANK)[None, :])
