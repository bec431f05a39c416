"""Log-sum-exp merge in PyTorch (FlashInfer's cascade operator, arXiv:2501.01005)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merges attention over disjoint sets of tokens into attention [..., d] over all of them. Each part is a result
    [..., d] and its log-sum-exp, float32 [...]. In every row, the log-sum-exp of at least one part is finite."""
    lse = torch.stack([part[1] for part in parts])
    weights = torch.softmax(lse, dim=0).unsqueeze(-1)
    out = sum(weight * part[0].float() for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype)
