"""Projection of keys in one Triton kernel. It reads keys once and writes latents directly into their pages.

61440 keys of 1024 dimensions with rank 160 take 0.08 ms on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.codec import FIXED_WIDTH_LATENTS, CodecId, LatentCodec, unknown_codecs
from shadowkv.ops.triton_sizes import TOKENS, dot_size

MAX_RANKS = 256
"""Maximum number of rank dimensions per thread block. 64 x 256 float32 sums take half of a multiprocessor's
registers."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    reasons = unknown_codecs(case.key_codec, known=(CodecId.LATENT_MIXED,))
    fits = case.key_codec != CodecId.LATENT_MIXED or case.rank <= MAX_RANKS
    return reasons + unless(fits, f"rank {case.rank} of latents of mixed widths is more than {MAX_RANKS}")


def project_latents(
    keys: Tensor,
    codec: LatentCodec,
    basis: Tensor,
    mean: Tensor | None,
    step: Tensor | None,
    states: Tensor,
    latents: Tensor,
    pages: Tensor,
    widths: Tensor | None = None,
) -> None:
    """Same as the reference. The last dimension of ``keys`` is contiguous. In ``basis``, ``mean``, ``step`` and
    ``widths``, all dimensions but the first two are contiguous. Pages of mixed widths start at multiples of 4 bytes.

    Raises:
        ValueError: another codec, or too many rank dimensions of mixed widths.
    """
    mixed = codec.id == CodecId.LATENT_MIXED
    if codec.id not in FIXED_WIDTH_LATENTS and not mixed:
        raise ValueError(f"project_latents in Triton does not know codec {codec.name!r} ({codec.id})")
    layers, count, _, heads, dim = keys.shape
    rank = basis.shape[2]
    if mixed and rank > MAX_RANKS:
        raise ValueError(f"project_latents in Triton takes ranks of up to {MAX_RANKS} in mixed widths, not {rank}")
    if not layers * count:
        return
    # ``basis`` stands in for arguments that are not used, because it has the same alignment in all calls. With
    # ``states`` instead, the kernel would be compiled once per alignment.
    if mean is None or step is None:
        mean = step = basis
    if widths is None:
        widths = basis
    packed = codec.id == CodecId.LATENT_INT4
    block = min(MAX_RANKS, dot_size(rank))
    _project_latents[(count, layers, triton.cdiv(rank, block))](
        keys, basis, mean, step, widths, states, latents, pages,
        *keys.stride()[:4], *basis.stride()[:2], *mean.stride()[:2], *step.stride()[:2],
        *(widths.stride()[:2] if mixed else (0, 0)), *latents.stride()[:2],
        SHARED=len(states) == 1, MIXED=mixed, WIDTH=latents.shape[4], LARGEST=float(codec.largest or 0), PACKED=packed,
        STRONG=2 * latents.shape[4] - rank if packed else rank, HEADS=heads, DIM=dim, RANK=rank, RANK_BLOCK=block,
        STRETCH=32 if dim % 32 == 0 else 16, num_warps=8 if block > 64 else 4, num_stages=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["states", "pages"])
def _project_latents(
    keys, basis, mean, step, widths, states, latents, pages,
    key_layer, key_page, key_token, key_head, basis_layer, basis_state, mean_layer, mean_state, step_layer, step_state,
    width_layer, width_state, latent_layer, latent_page,
    SHARED: tl.constexpr, MIXED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, PACKED: tl.constexpr,
    STRONG: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    STRETCH: tl.constexpr,
):  # fmt: skip
    """Projects one page of one layer. If latents are packed, rank dimensions from ``STRONG`` on have 4 bits."""
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, within = tl.arange(0, TOKENS), tl.arange(0, STRETCH)
    rank = tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    state = tl.load(states) if SHARED else tl.load(states + page)
    row = keys + layer * key_layer + page * key_page + token[:, None] * key_token
    direction = basis + layer * basis_layer + state * basis_state + rank[None, :] * (HEADS * DIM)
    PARTS: tl.constexpr = (DIM + STRETCH - 1) // STRETCH
    total = tl.zeros((TOKENS, RANK_BLOCK), tl.float32)
    for part in range(HEADS * PARTS):
        head, dim = part // PARTS, part % PARTS * STRETCH + within
        lives = dim < DIM
        column = head * DIM + dim
        x = tl.load(row + head * key_head + dim[None, :], mask=lives[None, :], other=0.0)
        b = tl.load(direction + column[:, None], mask=lives[:, None] & (rank < RANK)[None, :], other=0.0)
        total = tl.dot(x, b, total, input_precision="ieee")
    target = latents + layer * latent_layer + tl.load(pages + page) * latent_page
    if LARGEST > 0:
        size = tl.load(step + layer * step_layer + state * step_state + rank, mask=rank < RANK, other=1.0)
        centre = tl.load(mean + layer * mean_layer + state * mean_state + rank, mask=rank < RANK, other=0.0)
        ratio = (total - centre[None, :]) / (size * size)[None, :]
        largest = tl.where(rank < STRONG, LARGEST, 7.0)[None, :]
        if MIXED:
            width = tl.load(widths + layer * width_layer + state * width_state + rank, mask=rank < RANK, other=0).to(
                tl.int32
            )
            middle = (1 << width) // 2
            largest = tl.maximum(middle - 1, 0).to(tl.float32)[None, :]
        # Rounds ties to even like torch.round: adding and subtracting 1.5 * 2^23 drops the fraction.
        ratio = tl.minimum(tl.maximum(ratio, -largest), largest)
        whole = (ratio + 12582912.0) - 12582912.0
        if MIXED:
            # Codes are offset by half their range and form one bit string per page. A code lies in at most two words of
            # it. One thread block writes all codes of the page, and no other block writes to the page.
            bits = tl.where(width > 0, whole.to(tl.int32) + middle[None, :], 0).to(tl.uint32)
            begin = token[:, None] * (8 * WIDTH) + (tl.cumsum(width, 0) - width)[None, :]
            word = target.to(tl.pointer_type(tl.int32), bitcast=True) + begin // 32
            shift = (begin % 32).to(tl.uint32)
            tl.store(target + token[:, None] * WIDTH + rank[None, :], 0, mask=(rank < WIDTH)[None, :])
            tl.debug_barrier()
            tl.atomic_or(word, (bits << shift).to(tl.int32, bitcast=True), mask=(width > 0)[None, :])
            over = begin % 32 + width[None, :] > 32
            tl.atomic_or(word + 1, (bits >> (32 - shift)).to(tl.int32, bitcast=True), mask=over)
        elif PACKED:  # codes offset by half their range: strong ones in one byte each, the others two per byte
            code = (whole + (largest + 1.0)).to(tl.int32)
            where = target + token[:, None] * WIDTH
            tl.store(where + rank[None, :], code.to(tl.uint8), mask=(rank < STRONG)[None, :])
            two = tl.reshape(code, (TOKENS, RANK_BLOCK // 2, 2))
            pair = tl.sum(two << (4 * tl.arange(0, 2))[None, None, :], 2).to(tl.uint8)
            byte = tl.program_id(2) * (RANK_BLOCK // 2) + tl.arange(0, RANK_BLOCK // 2) + STRONG // 2
            tl.store(where + byte[None, :], pair, mask=((byte >= STRONG) & (byte < WIDTH))[None, :])
        else:
            where = token[:, None] * RANK + rank[None, :]
            tl.store(target + where, whole.to(tl.int8), mask=(rank < RANK)[None, :])
    else:
        where = token[:, None] * RANK + rank[None, :]
        tl.store(target + where, total.to(latents.dtype.element_ty), mask=(rank < RANK)[None, :])
