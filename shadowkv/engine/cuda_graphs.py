"""Decode steps as CUDA graphs: one launch a step instead of a thousand, one graph per shape of a batch.

Everything that changes from step to step is in one array of numbers that is copied before the replay; the shapes are
rounded up (``kvcache/rounding.py``), so that few graphs serve many steps. Shapes
whose graph the memory has no room for run without one.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import DecodePlan
from shadowkv.kvcache.cache import KVCache

logger = logging.getLogger(__name__)

MOST_GRAPHS = 48
"""Graphs kept; the one not used for longest goes first."""


class CudaGraphs:
    """Runs decode steps and seals of one cache from graphs, capturing those it does not have.

    Args:
        step: computes logits from a plan's shapes, its numbers on the device and the inputs int64 [2, B]: newest
            tokens and where else they come from.
        max_batch: sequences that decode together at the most.

    Attributes:
        captures: how many there have been, those that found no room included.
    """

    def __init__(self, cache: KVCache, step: Callable[[DecodePlan, Tensor, Tensor], Tensor], max_batch: int) -> None:
        self.cache, self._step, self.max_batch, self.captures = cache, step, max_batch, 0
        self._graphs: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self._without: set[tuple[int, ...]] = set()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(cache.device)

    def decode(self, plan: DecodePlan, tokens: list[int], sources: list[int]) -> Tensor:
        """float32 logits [B, V]; overwritten by the next call with the same shapes."""
        if plan.sealing is not None:
            self._seal(plan.sealing)
        count, shape = len(tokens), self.cache.rounded(plan, self.max_batch)
        inputs = np.full((2, shape.shape[0]), -1, np.int64)
        inputs[0], inputs[0, :count], inputs[1, :count] = 0, tokens, sources
        numbers, split = np.concatenate((shape.packed(), inputs.ravel())), -inputs.size
        logits: Tensor = self._run(
            shape.shape, numbers, lambda static: self._step(shape, static[:split], static[split:].view(2, -1))
        )
        return logits[:count]

    def _seal(self, numbers: np.ndarray) -> None:
        padded = self.cache.padded_sealing(numbers)
        self._run(padded.shape, padded, self.cache.seal_pages)

    def _run(self, key: tuple[int, ...], numbers: np.ndarray, function: Callable[[Tensor], Any]) -> Any:
        captured = self._graphs.get(key)
        if captured is not None:
            captured.replay(numbers)
        elif key not in self._without:
            captured = self._capture(key, numbers, function)
        if captured is None:
            return function(torch.from_numpy(numbers).to(self.cache.device))
        self._graphs.move_to_end(key)
        return captured.result

    def _capture(self, key: tuple[int, ...], numbers: np.ndarray, step: Callable[[Tensor], Any]) -> _Captured | None:
        """The new graph, which has run; None where it does not fit in memory."""
        self.captures += 1
        try:
            with _capturing:
                captured = self._graphs[key] = _Captured(numbers, self._joining(step), self._pool, self._stream)
        except torch.OutOfMemoryError as error:
            if not self._without:
                logger.warning("no memory for a CUDA graph, such steps run without: %s", error)
            self._without.add(key)
            return None
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return captured

    def _joining(self, function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """``function``; where it fails, what is captured beside it is joined, without which a capture cannot end."""

        def run(numbers: Tensor) -> Any:
            try:
                return function(numbers)
            except torch.OutOfMemoryError:
                self.cache.join_capture()
                raise

        return run


_capturing = threading.Lock()
"""Engines on threads of their own share that stream: what one runs on it another must not capture."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of a device: they share a pool's memory, and the workspaces of matrix products, by stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection may free, another cache's pinned memory say, may not be freed while a graph is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Captured:
    """One graph, the buffer that its numbers come through and what it leaves behind."""

    def __init__(
        self, numbers: np.ndarray, function: Callable[[Tensor], Any], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.staging = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
        self.static = torch.empty(numbers.shape, dtype=torch.int64, device=stream.device)
        self.graph = torch.cuda.CUDAGraph()
        self.uploaded = torch.cuda.Event()
        self._upload(numbers)
        # Once as it is: libraries and kernels that load on first use may not do so in a capture.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            with torch.cuda.stream(stream):
                function(self.static)
        finally:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        with _no_garbage_collection(), torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.result = function(self.static)
        self.graph.replay()

    def replay(self, numbers: np.ndarray) -> None:
        """Runs the graph on other numbers of the same shape."""
        self._upload(numbers)
        self.graph.replay()

    def _upload(self, numbers: np.ndarray) -> None:
        self.uploaded.synchronize()  # the last copy out of the buffer, if it is still on its way
        self.staging.numpy()[:] = numbers
        self.static.copy_(self.staging, non_blocking=True)
        self.uploaded.record()
