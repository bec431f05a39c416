"""Work beside the current stream: kernels on a CUDA stream of their own, and numbers on their way to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

Result = TypeVar("Result")


class SideStream:
    """Where there is no GPU, or nothing to gain, work is done at once.

    The stream has high priority: kernels of few thread blocks find room between the blocks of kernels that take all.
    Memory that the work allocates is reused by later work of this stream only, which begins after the current one.

    Args:
        wanted: False to do all work at once.
        captured: True to do work at once unless it is captured in a graph: launched one by one, kernels hardly overlap,
            and where a graph found no memory there may be none for this stream either.
    """

    def __init__(self, device: torch.device, wanted: bool = True, captured: bool = False) -> None:
        self.device, self.captured = device, captured
        self.stream = torch.cuda.Stream(device, priority=-1) if wanted and device.type == "cuda" else None

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Launches ``work`` after everything on the current stream; the returned function makes the current stream
        wait for it and returns its result."""
        if self.stream is None or (self.captured and not torch.cuda.is_current_stream_capturing()):
            result = work()
            return lambda: result
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            result = work()
        done = self.stream.record_event()

        def wait() -> Result:
            main.wait_event(done)
            return result

        return wait

    def join_capture(self) -> None:
        """Joins the stream to the current one, if it is being captured with it."""
        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies ``numbers`` from the host to the device without waiting for its earlier work: the host would wait for a
    copy from memory that is not pinned, and the device would be idle when the host goes on."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


class Numbers:
    """Numbers on their way to the device: each array that is added is a part of the one that is copied."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, numbers: ArrayLike) -> slice:
        """Adds ``numbers``; returns where they will be in the copy."""
        array = np.asarray(numbers, np.int64).ravel()
        self._arrays.append(array)
        self._size += len(array)
        return slice(self._size - len(array), self._size)

    def on(self, device: torch.device) -> Tensor:
        """All of them, int64 [n]."""
        return upload(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *self._arrays])), device)
