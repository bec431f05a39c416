"""Learned sinks (gpt-oss, arXiv:2508.10925) and the merge of partial attentions by their log-sum-exps (FlashInfer's
cascade operator, arXiv:2501.01005) in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a position with score ``sinks`` and value 0 to a partial attention.

    Args:
        out: [n, H_q, d], the partial attention.
        lse: float32 [n, H_q], its log-sum-exp, -inf for rows that attend to no tokens.
        sinks: float32 [H_q], one score per query head.

    Returns:
        out and lse with the sinks, in the shapes of the arguments. For rows without tokens, out is 0 and lse is the
        sinks.
    """
    return (out.float() * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merges attention over disjoint sets of tokens into attention [..., d] over all of them. Each part is a result
    [..., d] and its log-sum-exp, float32 [...]. In every row, the log-sum-exp of at least one part is finite."""
    lse = torch.stack([part[1] for part in parts])
    weights = torch.softmax(lse, dim=0).unsqueeze(-1)
    out = sum(weight * part[0].float() for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype)
