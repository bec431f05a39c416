"""Scores of blocks of tokens by pooled keys, in PyTorch. The formulas are those of transformers' ``qwen4_exp``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.page import PAGE


@dataclass(frozen=True)
class KeyNorm:
    """The RMSNorm of blocks' keys.

    Attributes:
        weight: [d].
        dim: number of dimensions of an index key, at most d. Keys are filled up with zeros, which do not count in the
            mean square.
        eps: added to the mean square.
    """

    weight: Tensor
    dim: int
    eps: float


def pooled_scores(
    queries: Tensor, keys: Tensor, pages: Tensor, first: Tensor, norm: KeyNorm, rotary: RotaryTables, size: int
) -> Tensor:
    """Computes the scores of blocks of tokens in pages. A block's key is the mean of its tokens' raw index keys,
    normalised, and rotated to the position of the block's first token. A block's score is the sum over index heads of
    the positive products with its key.

    There are R rows with P pages each.

    Args:
        queries: [R, H, d], index queries after RoPE.
        keys: [N, 64, d], views over all pages: raw index keys of tokens, in the dtype of ``queries``.
        pages: int64 [R, P].
        first: int64 [R, P], position of the first token of each page. Rows of a page that are not written may have any
            content, and so have their blocks' scores.
        norm: norm of the blocks' keys.
        rotary: RoPE of the keys.
        size: number of tokens of a block, a divisor of 64.

    Returns:
        float32 [R, P, 64 / size].
    """
    of_tokens = keys[pages].unflatten(2, (-1, size))  # [R, P, blocks, size, d]
    within = torch.arange(0, PAGE, size, device=pages.device)
    blocks = pooled_keys(of_tokens, first.unsqueeze(-1) + within, norm, rotary)
    return block_scores(queries, blocks.flatten(1, 2)).unflatten(-1, (-1, PAGE // size))


def pooled_keys(
    keys: Tensor, first: Tensor, norm: KeyNorm, rotary: RotaryTables, rope: Callable[..., Tensor] = apply_rope
) -> Tensor:
    """Returns the keys of blocks, [..., d].

    Args:
        keys: [..., size, d], raw index keys of the blocks' tokens.
        first: int64 [...], position of each block's first token.
        norm, rotary: as in ``pooled_scores``.
        rope: the op ``apply_rope``.
    """
    means = keys.float().mean(-2).to(keys.dtype).float()
    scale = torch.rsqrt(means.square().sum(-1, keepdim=True) / norm.dim + norm.eps)
    normed = (means * scale * norm.weight.float()).to(keys.dtype)
    return rope(normed.reshape(-1, 1, keys.shape[-1]), first.reshape(-1), rotary).view(normed.shape)


def block_scores(queries: Tensor, blocks: Tensor) -> Tensor:
    """Returns the scores of blocks, float32 [..., N], from index queries [..., H, d] and keys of blocks [..., N, d]."""
    return (queries.float() @ blocks.float().mT).relu_().sum(-2)
