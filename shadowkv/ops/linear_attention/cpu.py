"""The causal convolution, the gated delta rule, and decode steps of Mamba-2's state space model in C++, token by token
(``csrc/cpu/recurrence/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.linear_attention.reference import EPS, ssd_in_chunks
from shadowkv.ops.paged_attention.cpu import supports
from shadowkv.ops.recurrence import Spans

__all__ = ["causal_convolution", "gated_delta_rule", "missing", "ssd", "supports"]


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans, bias: Tensor | None = None) -> Tensor:
    """Same as the reference, for float32 or bfloat16. Sums and SiLU are always float32."""
    return torch.ops.shadowkv.causal_convolution(x, weight, states, spans.lengths, spans.read, spans.write, bias)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Same as the reference, for float32 or bfloat16 numbers and states.

    Prompts are computed token by token, too: the state stays in the core's caches, and computing in chunks would need
    more products. Results are bitwise equal for any number of threads.
    """
    return torch.ops.shadowkv.gated_delta_rule(
        q, k, v, log_decay, beta, states, spans.lengths, spans.read, spans.write, EPS
    )


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Same as the reference, for float32 or bfloat16 numbers and states. A step is computed as ``gated_delta_rule`` is,
    without the correction.

    Prompts are computed in PyTorch's chunks. Token by token, the sums of a head that keeps thousands of tokens would
    lose four times as much, because nothing corrects them.
    """
    if spans.lengths is not None:
        return ssd_in_chunks(x, dt, a, b, c, d, states, spans)
    return torch.ops.shadowkv.ssd(x, dt, dt * a, b, c, d, states, spans.read, spans.write)
