"""Where an engine computes, and making that device the current one of the thread that steps the engine.

Tensors know where they are; events, streams, graphs and Triton's launches go to the thread's current device.
"""

from __future__ import annotations

import torch

from shadowkv.engine.sizing import DEFAULT_UTILIZATION
from shadowkv.wording import SettingsError, counted


def device_of(name: str) -> torch.device:
    """The device named ``name``, a GPU with its number; raises ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device={name!r} is not auto, cpu, cuda or cuda:N", ["device"]) from error
    if device.type not in DEFAULT_UTILIZATION:
        raise SettingsError(f"device={name!r} is not supported; use cpu or cuda", ["device"])
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        there = counted(count, "CUDA device")
        raise SettingsError(f"device={name!r} is not there: this machine has {there}", ["device"])
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def current(device: torch.device) -> torch.accelerator.device_index:
    """A context in which ``device`` is the thread's current one."""
    return torch.accelerator.device_index(None if device.type == "cpu" else device.index)
