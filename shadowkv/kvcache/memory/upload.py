"""Numbers on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies ``numbers`` from the host to the device without waiting for its earlier work: the host would wait for a
    copy from memory that is not pinned, and the device would be idle when the host goes on."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
