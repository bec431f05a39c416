"""The 2-bit key sketch and its chunk scores in PyTorch.

A fixed random rotation makes the coordinates of every key nearly Gaussian, so that one uniform quantiser with 4 levels
serves all keys; the scale of a key makes its inner product with itself exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP = 0.9957
"""Distance of the levels in standard deviations: the uniform 4-level quantiser of a Gaussian with the least error."""

PAGES_AT_ONCE = 512
"""Pages unpacked at a time, to bound the copies."""


def code_bytes(dim: int) -> int:
    """Bytes of a key's codes: 2 bits a dimension, padded to 16 bytes."""
    return -(-dim // 64) * 16


def pack_sketch(keys: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys.

    Args:
        keys: [..., d] with d a multiple of 4, rotated by RoPE.
        rotation: float32 [d, d].

    Returns:
        uint8 [..., R] with R = ``code_bytes(d)``: byte i < d/4 holds at bits 2j and 2j + 1 the code of dimension
        j d/4 + i, the others are 0; and float16 [...], 0 for a key that is 0.
    """
    dim = keys.shape[-1]
    x = keys.float() @ rotation
    norm = keys.float().norm(dim=-1, keepdim=True)
    sigma = (norm / math.sqrt(dim)).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / (STEP * sigma)).floor().add(2).clamp(0, 3)
    overlap = (x * (codes - 1.5)).sum(-1)
    scale = (norm.squeeze(-1).square() / overlap).where(overlap > 0, 0)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=keys.device)
    planes = codes.to(torch.uint8).unflatten(-1, (4, dim // 4)) << shifts.unsqueeze(-1)
    packed = keys.new_zeros(*keys.shape[:-1], code_bytes(dim), dtype=torch.uint8)
    packed[..., : dim // 4] = planes.sum(-2, dtype=torch.uint8)
    return packed, scale.clamp(max=torch.finfo(torch.float16).max).half()


def _levels(codes: Tensor, dim: int) -> Tensor:
    """Codes less their mean, 1.5: float32 [..., dim]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    return ((codes[..., None, : dim // 4] >> shifts.unsqueeze(-1)) & 3).flatten(-2).float() - 1.5


def unpack_sketch(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """The keys that a sketch stands for, float32 [..., dim], times the rotation."""
    return _levels(codes, dim) * scale.float().unsqueeze(-1)


def quantise_queries(q: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """``q @ rotation`` in whole numbers from -127 to 127, float32 [..., d], and what they are multiples of, [...]."""
    x = q.float() @ rotation
    unit = (x.abs().amax(-1) * (1 / 127)).clamp_min(1e-30)
    return (x * unit.reciprocal().unsqueeze(-1)).round(), unit


def sketch_scores(
    q: Tensor,
    codes: Tensor,
    scale: Tensor,
    excluded: Tensor,
    pages: Tensor,
    num_chunks: Tensor,
    rotation: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of q . k / sqrt(d) over the tokens of each chunk, k from the sketch and q rounded to int8.

    Args:
        q: [B, H_q, d], rotated by RoPE.
        codes: uint8 [N, H, C, c, R], views over all pages, as ``pack_sketch`` makes them; C c = 64.
        scale: float16 [N, H, 64].
        excluded: bool [N, H, C], chunks that may not be selected.
        pages: int64 [B, P]; a name past the valid chunks may be any that there is.
        num_chunks: int64 [B], valid chunks of each row, 0 to P C.
        rotation: float32 [d, d].

    Returns:
        logits float32 [B, H, G, P C], -inf where excluded or not valid, and their log-sum-exps over T disjoint sets of
        chunks that make up the row, float32 [B, H, G, T], -inf where a set has nothing to select. T is 1 here.
    """
    batch, dim = q.shape[0], q.shape[-1]
    heads, chunks = codes.shape[1:3]
    whole, unit = (x.unflatten(1, (heads, -1)) for x in quantise_queries(q, rotation))
    parts = []
    for names in pages.split(max(1, PAGES_AT_ONCE // batch), dim=1):
        levels = _levels(codes[names], dim).transpose(1, 2).flatten(2, 4)  # [B, H, tokens, d]
        # Products of whole and half numbers: exact.
        scores = (whole @ levels.transpose(-1, -2)) * scale[names].transpose(1, 2).flatten(2).float().unsqueeze(2)
        scores *= unit.unsqueeze(-1) / math.sqrt(dim)
        logits = scores.unflatten(-1, (-1, 64 // chunks)).logsumexp(-1)
        parts.append(logits.masked_fill_(excluded[names].transpose(1, 2).flatten(2).unsqueeze(2), float("-inf")))
    logits = torch.cat(parts, dim=-1)
    beyond = torch.arange(logits.shape[-1], device=q.device) >= num_chunks[:, None, None, None]
    logits.masked_fill_(beyond, float("-inf"))
    return logits, logits.logsumexp(-1, keepdim=True)
