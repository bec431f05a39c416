"""Sinks in the merge of attention parts, in PyTorch (gpt-oss, arXiv:2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """An attention part, out [n, H_q, d] with its log-sum-exp, float32 [n, H_q], together with a position whose score
    is ``sinks``, float32 [H_q], and whose value is 0: the same two. A part without tokens, -inf, becomes the sinks."""
    return (out.float() * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)
