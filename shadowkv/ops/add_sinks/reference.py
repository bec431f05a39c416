"""Adds learned sinks to partial attention in PyTorch (gpt-oss, arXiv:2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a position with score ``sinks`` and value 0 to a partial attention.

    Args:
        out: [n, H_q, d], the partial attention.
        lse: float32 [n, H_q], its log-sum-exp, -inf where it has no tokens.
        sinks: float32 [H_q].

    Returns:
        out and lse with the sinks, of the same shapes. Without tokens, out is 0 and lse is the sinks.
    """
    return (out.float() * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)
