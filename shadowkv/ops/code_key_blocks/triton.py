"""Keys in 8-bit steps of their blocks, in one Triton launch, a program for each block of a head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK, KeyBlocks
from shadowkv.ops.select_blocks.triton_steps import in_steps, step_of


def code_key_blocks(k: Tensor, keys: KeyBlocks, first: int) -> None:
    """As the reference, but for entries halfway between two codes; the last dimension of ``k`` is dense."""
    tokens, heads, dim = k.shape
    if not tokens:
        return
    codes, steps = keys.codes[first * BLOCK :], keys.steps[first:]
    _code[(tokens // BLOCK, heads)](
        k, codes, steps, *k.stride()[:2], *codes.stride()[:2], DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _code(
    k, codes, steps, k_token, k_head, code_token, code_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    token, dim = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    x = tl.load(k + token * k_token + head * k_head + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(codes + token * code_token + head * code_head + dim, in_steps(x, largest), mask=dim < DIM)
    bad = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    tl.store(steps + block * tl.num_programs(1) + head, step_of(largest, bad))
