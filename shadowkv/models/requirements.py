"""A model's hardware and memory requirements: unmet ones are refused in one line before any weight is read or made."""

from __future__ import annotations

import torch

from shadowkv.kvcache.memory.free_memory import free_bytes
from shadowkv.models.decoder import Decoder
from shadowkv.models.fp8 import unfit
from shadowkv.wording import GIB, OutOfMemory, SettingsError


def check_hardware(quantization: str | None, device: torch.device, dtype: torch.dtype, who: str, remedy: str) -> None:
    """Raises SettingsError if weights cannot run as they are quantised: for whom, why, and what to do."""
    reason = unfit(device, dtype) if quantization == "fp8" else None
    if reason is not None:
        raise SettingsError(f"{who} {reason}; {remedy}", ["dtype", "quantization"])


def check_memory(outline: Decoder, device: torch.device) -> None:
    """Raises MemoryError if the weights, wherever they come from, need more than is free.

    Missing host memory would be granted, and the process killed while it is filled.
    """
    need, free = outline.num_bytes, free_bytes(device)
    if need > free:
        plain = sum(parameter.nbytes for parameter in outline.parameters() if parameter.dtype == torch.float32)
        halved = need - plain // 2 <= free
        advice = ("pass dtype='bfloat16', " if halved else "") + "use a smaller model or free memory"
        raise OutOfMemory(
            f"the weights need {need / GIB:.2f} GiB as {outline.weights_in_words} on {device}, "
            f"{free / GIB:.2f} GiB are free; {advice}",
            ["dtype"],
        )
