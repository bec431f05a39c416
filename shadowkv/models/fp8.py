"""Weights in 8-bit floats: where they can run, and how tensors of any kind are stored in a quantised projection."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.models.checkpoints.stored_weight import FP8Weight, Stored, dense
from shadowkv.ops.quantise_tokens.reference import quantise_tokens
from shadowkv.ops.scaled_matmul.cuda import LEAST_CAPABILITY

ROWS_AT_ONCE = 1024
"""Rows that are quantised at a time: their size in float32 is small compared with the weights."""


@torch.no_grad()
def fill_quantised(weight: Tensor, scale: Tensor, stored: Stored) -> None:
    """Writes rows [N, K] of a projection and their scales [N, 1]: codes unchanged, other numbers quantised per row."""
    if isinstance(stored, FP8Weight):
        weight.copy_(stored.codes)
        scale.copy_(stored.scale)
        return
    numbers = dense(stored)
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        run = slice(start, start + ROWS_AT_ONCE)
        codes, scales = quantise_tokens(numbers[run].to(weight.device))
        weight[run].copy_(codes)
        scale[run].copy_(scales)


def unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model cannot run there with fp8 weights and everything else in ``dtype``; None if it can."""
    least = "fp8 needs a GPU of compute capability {}.{} or more (Ada, Hopper or newer)".format(*LEAST_CAPABILITY)
    if device.type != "cuda":
        return f"{least}, and the device is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{least}, and {torch.cuda.get_device_name(device)} ({device}) has {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"fp8 goes with dtype='bfloat16', not {str(dtype).removeprefix('torch.')}"
    return None
