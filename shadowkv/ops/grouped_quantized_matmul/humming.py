"""Products of sorted rows with experts' quantized matrices on a GPU by a kernel of github.com/vllm-project/humming. The
kernel reads ``offsets`` on the device, so the host does not wait. It reads only the weights of experts that have
rows."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.quantized_matmul.humming import PackedExperts, launch, missing

__all__ = ["grouped_quantized_matmul", "missing"]


def grouped_quantized_matmul(x: Tensor, weight: PackedExperts, offsets: Tensor) -> Tensor:
    """Same as the reference, in bfloat16, with packed matrices. Rounds like ``quantized_matmul`` of this backend.

    Raises:
        ValueError: rows are not bfloat16 [S, K], or offsets are not int32 [E + 1].
    """
    if offsets.shape != (weight.experts + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"offsets have shape {tuple(offsets.shape)} and dtype {offsets.dtype}: {weight.experts} experts need "
            f"{weight.experts + 1} offsets in int32"
        )
    return launch(x, weight, offsets)
