"""The causal convolution in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.recurrence import Spans


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Convolves each channel over its newest W inputs and applies SiLU. Writes the states after each span.

    Args:
        x: [T, C], the C channels of T packed tokens.
        weight: [C, W], the weight of the oldest input first, in the dtype of ``x``.
        states: float32 [N, C, W - 1], the last W - 1 inputs of each of N states, oldest first. The rows ``spans.read``
            are read, the rows ``spans.write`` are written.
        spans: where each sequence's tokens and state are.

    Returns:
        [T, C], in the dtype of ``x``.
    """
    before = states[spans.read].to(x.dtype)
    if spans.lengths is None:
        window = torch.cat((before, x.unsqueeze(-1)), dim=-1)
        states[spans.write] = window[..., 1:].to(states.dtype)
        return F.silu(torch.einsum("bcw,cw->bc", window, weight))
    outs = []
    for number, tokens in enumerate(x.split(spans.lengths)):
        window = torch.cat((before[number], tokens.mT), dim=-1)
        states[spans.write[number : number + 1]] = window[:, tokens.shape[0] :].to(states.dtype).unsqueeze(0)
        outs.append(F.conv1d(window.unsqueeze(0), weight.unsqueeze(1), groups=len(weight)).squeeze(0).mT)
    return F.silu(torch.cat(outs))
