"""``SideStream``: work on another CUDA stream. ``upload`` and ``Numbers``: copies to the device without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

Result = TypeVar("Result")


class SideStream:
    """A CUDA stream beside the current one. Without a GPU, work runs at once.

    The stream has high priority, so its small kernels get room between the thread blocks of large kernels. Memory that
    work on this stream has allocated is given only to later work on this stream. That work starts after all earlier
    work on the current stream, so results are not overwritten while the current stream reads them.

    Args:
        wanted: False to run all work at once.
        captured: True to use the stream only while a CUDA graph is captured, and to run other work at once. Outside of
            graphs, kernels hardly overlap. Also, a step may run without a graph because there was no memory for one,
            and then there may be no memory for this stream either.
    """

    def __init__(self, device: torch.device, wanted: bool = True, captured: bool = False) -> None:
        self.device, self.captured = device, captured
        self.stream = torch.cuda.Stream(device, priority=-1) if wanted and device.type == "cuda" else None

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Launches ``work``, which starts after all work on the current stream. The returned function makes the current
        stream wait for ``work`` and returns the result of ``work``."""
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
        """Makes the current stream wait for this one, if both are being captured."""
        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies ``numbers`` from the host to the device, through pinned memory. A copy from other memory would make the
    host wait for the device's earlier work, and the device would be idle afterwards."""
    if device.type != "cuda" or not numbers.numel():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


class Numbers:
    """Collects arrays of numbers, and copies them to the device as one array."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, numbers: ArrayLike) -> slice:
        """Adds ``numbers``. Returns their place in the copied array."""
        array = np.asarray(numbers, np.int64).ravel()
        self._arrays.append(array)
        self._size += len(array)
        return slice(self._size - len(array), self._size)

    def on(self, device: torch.device) -> Tensor:
        """Copies all numbers to the device, int64 [n]."""
        return upload(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *self._arrays])), device)
