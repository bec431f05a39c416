"""Numbers on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """``numbers`` of the host on the device, without waiting for what it does before: a copy from memory that is not
    pinned would be waited for, and the device would have nothing to do when the host goes on."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
