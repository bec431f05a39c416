"""The causal convolution in C++, ``csrc/cpu/recurrence/``."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.paged_attention.cpu import supports
from shadowkv.ops.recurrence import Spans

__all__ = ["causal_convolution", "missing", "supports"]


def causal_convolution(x: Tensor, weight: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """Same as the reference, for float32 or bfloat16. Sums and SiLU are always float32."""
    return torch.ops.shadowkv.causal_convolution(x, weight, states, spans.lengths, spans.read, spans.write)
