"""The 2-bit key sketch, and the scores of its sign plane, in PyTorch.

A random rotation makes the coordinates of every key nearly Gaussian, so that one uniform quantizer with 4 levels fits
all keys (TurboQuant, arXiv:2504.19874). A key's scale is chosen so that the product of the key with its own sketch is
exact. The two bits are stored in two planes: signs are read for all tokens, the other bits only for runs with good sign
scores (``select_by_sketch``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.ops.page import PAGE
from shadowkv.ops.sketch_queries.reference import SketchQueries, plane_bytes

STEP = 0.9957
"""Distance between levels, in standard deviations, of the uniform 4-level quantizer with the least error for a
Gaussian."""

RUN = 8
"""Number of tokens in a run. The tokens of a run share a sign score."""

SCALE_SHIFT = 7
"""A scale's code, shifted left by this, is a float16. The code has 5 bits of exponent, 3 of mantissa and no sign."""

LARGEST_SCALE = 61440.0
"""The largest scale, with code 247."""

EXCLUDED_SCALE = 0
"""Code of tokens that may not be selected. No scale has this code."""

UNPACKED_AT_ONCE = 512
"""Pages that are unpacked at a time, to limit the memory of copies."""


def pack_sketch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes the sketches of keys, which are codes and scales.

    Args:
        x: float32 [..., d] with d a multiple of 8, centred keys, multiplied by their sequence's matrix in ``maps``
            (``sketch_queries``).

    Returns:
        Three tensors. The first two are planes, uint8 [..., S] with S = ``plane_bytes(d)``. Codes are from 0 to 3. The
        first plane has the upper bit of each code, which is 1 for numbers of at least 0. The second plane has the lower
        bit. Bit j of byte b < d/8 belongs to dimension j d/8 + b. Other bytes are 0. The third tensor has the scales,
        uint8 [...], from ``encode_scale``. ``x`` is about (code - 1.5) * scale. A key that is 0 or not finite has the
        least scale.
    """
    norm = x.norm(dim=-1, keepdim=True)
    sigma = (norm / math.sqrt(x.shape[-1])).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / (STEP * sigma)).floor().add(2).clamp(0, 3)
    overlap = (x * (codes - 1.5)).sum(-1)
    scale = (norm.squeeze(-1).square() / overlap).where(overlap > 0, 0)
    whole = codes.to(torch.uint8)
    return _plane(whole >> 1), _plane(whole & 1), encode_scale(scale)


def encode_scale(scale: Tensor) -> Tensor:
    """Encodes each scale in one byte: the upper 8 of the lower 15 bits of a float16.

    A scale has only one byte, because a step reads the scales of all tokens. Rounding a scale to 3 bits of mantissa
    causes far less error than reducing a key to signs.

    Args:
        scale: float32 [...].

    Returns:
        uint8 [...] from 1 to 247, rounded to nearest after rounding to float16. From 2**-14 to 61440, the largest, the
        relative error is at most 1/16. From 2**-18 to 2**-14, the error is at most 2**-18 + 2**-25. Smaller numbers,
        negative ones and NaN become 2**-17, the least scale.
    """
    half = scale.nan_to_num(0.0).clamp(0.0, LARGEST_SCALE).half().view(torch.int16)
    return (((half >> SCALE_SHIFT - 1) + 1) >> 1).clamp(min=1).to(torch.uint8)


def decode_scale(codes: Tensor) -> Tensor:
    """Returns the scales float32 [...] of codes uint8 [...] from ``encode_scale``, 0 for ``EXCLUDED_SCALE``."""
    return (codes.to(torch.int16) << SCALE_SHIFT).view(torch.float16).float()


def _plane(bits: Tensor) -> Tensor:
    dim = bits.shape[-1]
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device).unsqueeze(-1)
    plane = bits.new_zeros(*bits.shape[:-1], plane_bytes(dim))
    plane[..., : dim // 8] = (bits.unflatten(-1, (8, dim // 8)) << shifts).sum(-2, dtype=torch.uint8)
    return plane


def plane_bits(plane: Tensor, dim: int) -> Tensor:
    """Bits uint8 [..., dim] of a plane, in the order of dimensions."""
    shifts = torch.arange(8, dtype=torch.uint8, device=plane.device).unsqueeze(-1)
    return ((plane[..., None, : dim // 8] >> shifts) & 1).flatten(-2)


def sign_scores(queries: SketchQueries, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    """Scores runs of 8 tokens. Queries are rounded to 4 bits. A token's score for a query is the product of its signs
    and the query, times its scale. A run's score is the largest score of its tokens, for any query of its kv head.

    Queries are scaled to length 1, so that the query heads of a kv head are comparable without a softmax. On real
    prompts, the best 1/8 of the runs by these scores have as much attention weight as the best 1/8 by exact softmax
    weights.

    Args:
        queries: of B sequences and H_q query heads.
        signs: uint8 [N, H, 64, S], the upper plane from ``pack_sketch``, views over all N pages and their H kv heads.
        scale: uint8 [N, H, 64], from ``encode_scale``. Excluded tokens have score 0.
        pages: int64 [B, P], page ids. Those from ``num_pages`` on may be of any page.
        num_pages: int64 [B], valid pages of each row, 0 to P.

    Returns:
        float16 [B, H, 8 P], -inf for runs of pages from ``num_pages`` on.
    """
    whole, unit = queries.rounded_of_heads(signs.shape[1])
    batch, bits = len(whole), whole.shape[-1]
    parts = []
    for page_ids in pages.split(max(1, UNPACKED_AT_ONCE // max(1, batch)), dim=1):
        levels = 2 * plane_bits(signs[page_ids], bits).float().transpose(1, 2).flatten(2, 3) - 1  # [B, H, tokens, 8 S]
        scores = (unit.unsqueeze(-1) * (whole @ levels.transpose(-1, -2))).amax(2)  # products of whole numbers: exact
        scores *= decode_scale(scale[page_ids]).transpose(1, 2).flatten(2)
        parts.append(scores.unflatten(-1, (-1, RUN)).amax(-1))
    best = torch.cat(parts, dim=-1).clamp(*(sign * torch.finfo(torch.float16).max for sign in (-1, 1))).half()
    beyond = torch.arange(best.shape[-1], device=best.device) >= PAGE // RUN * num_pages[:, None, None]
    return best.masked_fill_(beyond, float("-inf"))
