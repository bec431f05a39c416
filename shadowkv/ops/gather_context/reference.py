"""Gathers cached and new rows of packed sequences in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.page import PAGE


def gather_context(
    rope_keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, sources: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the K rows of keys and of values, [K, H, d] each, that packed sequences attend to: cached and new tokens.

    Args:
        rope_keys, values: [T, H, d], keys (after RoPE) and values of the T new tokens.
        k_pages, v_pages: [N, H, 64, d], views over all exact pages.
        sources: int64 [K], where each row comes from: ``64 * page + offset`` for a cached token, ``-1 - t`` for new
            token t.
        count: int32 [1], number of rows that are needed, at most K. Later rows of the result are arbitrary.
    """
    new = sources < 0
    page, offset = sources.clamp(min=0) // PAGE, sources.clamp(min=0) % PAGE
    token = (-1 - sources).clamp(min=0)
    keys, gathered = (
        torch.where(new[:, None, None], own[token], pages[page, :, offset])
        for own, pages in ((rope_keys, k_pages), (values, v_pages))
    )
    return keys, gathered
