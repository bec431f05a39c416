"""Products of sorted rows with experts' quantised matrices on a GPU, by one kernel of
github.com/vllm-project/humming, which finds on the device where experts' rows end. Of the weights it reads those of
experts that have any rows."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.quantised_matmul.humming import PackedExperts, launch, missing

__all__ = ["grouped_quantised_matmul", "missing"]


def grouped_quantised_matmul(x: Tensor, weight: PackedExperts, offsets: Tensor) -> Tensor:
    """Same as the reference, in bfloat16, with matrices that were packed, rounded as ``quantised_matmul`` says.

    Raises ValueError for rows that are not bfloat16 [S, K], and for offsets that are not int32 [E + 1].
    """
    if offsets.shape != (weight.experts + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"offsets have shape {tuple(offsets.shape)} and {offsets.dtype}: {weight.experts} experts need "
            f"{weight.experts + 1} in int32"
        )
    return launch(x, weight, offsets)
