"""Decode steps, also with prompts beside them, as CUDA graphs: one launch per step instead of a thousand, one graph
per shape of a batch.

Everything that changes from step to step is in one array of numbers that is copied before the replay; the shapes are
rounded up (``kvcache/decode/planning.py``), so that few graphs serve many steps. Those of short sequences are captured
at start (``warmup.py``). A shape that is met later runs without a graph at first: nobody waits for a capture that a few
steps would need. Shapes for whose graph there is no memory run without one for good.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.decode.batch import DecodePlan
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.prefill.exact import MAX_CACHED, MAX_PROMPTS
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.group import RankFailure

logger = logging.getLogger(__name__)

MAX_GRAPHS = 320
"""Graphs kept; the least recently used goes first."""

EAGER_STEPS = 8
"""Steps of a shape that run without a graph before it is captured. A capture takes as long as several eager steps, in
which all who decode wait for one token: by then they have lost to eager steps about what it costs, and a shape that a
batch only passes through costs no capture. Counted and not timed, as all ranks must decide alike."""

Function = Callable[[Tensor], Any]
"""What is captured, as a function of numbers on the device."""

Step = Callable[[DecodePlan, Tensor, Tensor, "PromptInputs | None", bool], Tensor]

PROMPT_ROWS = (128, 256, 512, 768, 1024, 1536, 2048)
"""Tokens that prompts are padded to in a captured pass: a graph for each, times as many as there are batches below."""

STEP_ROWS = (8, 32, 64, 128, 256)
"""Rows that a decode step is padded to beside prompts, among whose tokens they hardly count."""


class PromptInputs(NamedTuple):
    """Prompts in a captured pass, int64 on the device: their numbers (``KVCache.exact_prompts``) [m], their token ids
    [T], and the rows of the pass whose logits are needed [B + MAX_PROMPTS]."""

    numbers: Tensor
    ids: Tensor
    rows: Tensor


class Pass(NamedTuple):
    """What a graph runs: a step's shapes and numbers, its tokens and where else they come from, and prompts."""

    plan: DecodePlan
    tokens: list[int]
    sources: list[int]
    sequences: Sequence[CachedSequence]
    ids: Sequence[list[int]]


class CudaGraphs:
    """Runs decode steps and seals of one cache from graphs, capturing those it does not have.

    Args:
        step: computes logits, in any dtype, from a plan's shapes, its numbers on the device, the inputs int64 [2, B],
            newest tokens and where else they come from, and prompts beside it or None. Or it makes a dry run: runs
            whatever a capture must not load for the first time, a few layers, because a token waits for this and for
            the capture.
        max_batch: most sequences that decode together.
        vocabulary: V, the columns of the logits.
        together: whether other ranks run the same graphs: without room for a graph, a rank then cannot go on
            (RankFailure), as it does not know what the others have run.

    Attributes:
        captures: how many there have been, including those without room.
        graphs: those that are kept, by their shapes, the most recently used last.
        without: shapes whose graph had no room.
        eager: steps and seals that ran without a graph, by their shapes, until it was captured.
    """

    def __init__(self, cache: KVCache, step: Step, max_batch: int, vocabulary: int, together: bool = False) -> None:
        self.cache, self._step, self.max_batch, self.captures = cache, step, max_batch, 0
        self._together = together
        self.graphs: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self.without: set[tuple[int, ...]] = set()
        self.eager: Counter[tuple[int, ...]] = Counter()
        # In float32, for sampling. All graphs write here: each would keep logits of its own otherwise, 0.5 MB a row and
        # 128 MB for 256 of them.
        self._logits = torch.empty(max_batch + MAX_PROMPTS, vocabulary, device=cache.device)
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(cache.device)

    def run(
        self,
        plan: DecodePlan,
        tokens: list[int],
        sources: list[int],
        sequences: Sequence[CachedSequence] = (),
        ids: Sequence[list[int]] = (),
    ) -> Tensor | None:
        """float32 logits [B + n, V] of a step and of ``ids``, what n prompts that stay exact add to their
        ``sequences``; overwritten by the next call. None where there is no graph for prompts: these are captured only
        where such passes come again and again."""
        given = Pass(plan, tokens, sources, sequences, ids)
        if not sequences:
            self._seal_due(plan)
            return self._run_pass(given, self.cache.rounded(plan, self.max_batch), 0, at_once=False)
        count = sum(map(len, ids))
        rows = next((rows for rows in PROMPT_ROWS if rows >= count), None)
        batch = next((batch for batch in self._step_rows() if batch >= len(tokens)), None)
        fits = plan.micro_batches == 1 and all(group.of_sequence is None for group in plan.groups)
        fits = fits and len(sequences) <= MAX_PROMPTS and sum(sequence.length for sequence in sequences) <= MAX_CACHED
        if rows is None or batch is None or not fits:
            return None
        shape = self.cache.rounded(plan, self.max_batch, batch)
        key = _key(shape, rows)
        if key in self.without:
            return None
        if key not in self.graphs and self.eager[key] < EAGER_STEPS:
            self.eager[key] += 1
            return None
        self._seal_due(plan)
        return self._run_pass(given, shape, rows, at_once=True)

    def prepare(self, plan: DecodePlan, batch: int | None = None, rows: int = 0) -> None:
        """Captures the graph of a pass of padding rows, with ``rows`` of prompts, if there is none."""
        if not self.has(plan, batch, rows):
            shape = self.cache.rounded(plan, self.max_batch, batch)
            self._run_pass(Pass(plan, [], [], [], []), shape, rows, at_once=True)

    def mixed_shapes(self) -> list[tuple[int, int]]:
        """Rows of prompts and of a step that passes are captured for; none where prompts' attention is planned on the
        host."""
        if not self.cache.captures_prompts:
            return []
        return [(rows, batch) for batch in self._step_rows() for rows in PROMPT_ROWS]

    def _step_rows(self) -> list[int]:
        return sorted({min(rows, self.max_batch) for rows in STEP_ROWS})

    def _run_pass(self, given: Pass, shape: DecodePlan, rows: int, at_once: bool) -> Tensor:
        """Runs a pass in the ``shape`` of a graph, with ``rows`` of prompts."""
        batch, count, new = shape.num_rows, len(given.tokens), len(given.ids)
        inputs = np.full((2, batch), -1, np.int64)
        inputs[0], inputs[0, :count], inputs[1, :count] = 0, given.tokens, given.sources
        of_prompts = [np.empty(0, np.int64)] * 3
        if rows:
            lengths = [len(own) for own in given.ids]
            ids, needed = np.zeros(rows, np.int64), np.zeros(batch + MAX_PROMPTS, np.int64)
            ids[: sum(lengths)] = [token for own in given.ids for token in own]
            needed[:count], needed[count : count + new] = np.arange(count), batch - 1 + np.cumsum(lengths)
            of_prompts = [self.cache.exact_numbers(given.sequences, lengths, rows), ids, needed]
        parts = [shape.packed(), inputs.ravel(), *of_prompts]
        sizes = [part.size for part in parts]

        def run(static: Tensor, dry_run: bool = False) -> Tensor:
            own, of_step, *beside = static.split(sizes)
            prompts = PromptInputs(*beside) if rows else None
            logits = self._step(shape, own, of_step.view(2, -1), prompts, dry_run)
            return self._logits[: len(logits)].copy_(logits)

        dry = functools.partial(run, dry_run=True)
        logits: Tensor = self._run(_key(shape, rows), np.concatenate(parts), run, dry, at_once)
        return logits[: count + new]

    def drop(self) -> None:
        """Frees all graphs, even those referred to elsewhere; none can run again."""
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()

    def has(self, plan: DecodePlan, batch: int | None = None, rows: int = 0) -> bool:
        """Whether a plan's shapes, for as many sequences or for ``batch``, with ``rows`` of prompts, have a graph, or
        no room for one."""
        key = _key(self.cache.rounded(plan, self.max_batch, batch), rows)
        return key in self.graphs or key in self.without

    def _seal_due(self, plan: DecodePlan) -> None:
        for number, of_group in enumerate(plan.groups):
            if of_group.compression is not None:
                self._seal(number, of_group.compression)

    def _seal(self, number: int, numbers: np.ndarray) -> None:
        padded = self.cache.padded_compression(number, numbers)
        seal = functools.partial(self.cache.compress_pages, number)
        self._run((number, *padded.shape), padded, seal, seal)

    def _run(
        self,
        key: tuple[int, ...],
        numbers: np.ndarray,
        function: Function,
        dry_run: Function,
        at_once: bool = False,
    ) -> Any:
        captured = self.graphs.get(key)
        if captured is not None:
            captured.replay(numbers)
        elif key not in self.without and not at_once and self.eager[key] < EAGER_STEPS:
            self.eager[key] += 1
        elif key not in self.without:
            self.captures += 1
            del self.eager[key]
            try:
                captured = self._capture(key, numbers, function, dry_run)
            except torch.OutOfMemoryError as error:
                if self._together:
                    raise RankFailure(f"no memory for a CUDA graph that all ranks run: {error}") from error
                if not self.without:
                    logger.warning("no memory for a CUDA graph, such steps run without: %s", error)
                self.without.add(key)
        if captured is None:
            return function(upload(torch.from_numpy(numbers), self.cache.device))
        self.graphs.move_to_end(key)
        return captured.result

    def _capture(self, key: tuple[int, ...], numbers: np.ndarray, function: Function, dry_run: Function) -> _Captured:
        """The new graph, already run once."""
        function, dry_run = self._joining(function), self._joining(dry_run)
        with _capturing:
            captured = self.graphs[key] = _Captured(numbers, function, dry_run, self._pool, self._stream)
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)
        return captured

    def _joining(self, function: Function) -> Function:
        """``function``; if it fails, the streams captured beside it are joined, without which a capture cannot end."""

        def run(numbers: Tensor) -> Any:
            try:
                return function(numbers)
            except torch.OutOfMemoryError:
                self.cache.join_capture()
                raise

        return run


def _key(shape: DecodePlan, rows: int) -> tuple[int, ...]:
    """What a pass's graph is found by."""
    return (rows, *shape.shape) if rows else shape.shape


_capturing = threading.Lock()
"""Engines on separate threads share that stream: what one runs on it, another must not capture."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all graphs of a device: they share a pool's memory, and matrix product workspaces, per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection may free, for example another cache's pinned memory, must not be freed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Captured:
    """One graph, the buffer for its numbers, and its outputs."""

    def __init__(
        self, numbers: np.ndarray, function: Function, dry_run: Function, pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.staging = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
        self.static = torch.empty(numbers.shape, dtype=torch.int64, device=stream.device)
        self.graph = torch.cuda.CUDAGraph()
        self.uploaded = torch.cuda.Event()
        self._upload(numbers)
        # Libraries and kernels that load on first use must not do so in a capture.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            with torch.cuda.stream(stream):
                dry_run(self.static)
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
        self.uploaded.synchronize()  # the last copy out of the buffer may still be in progress
        self.staging.numpy()[:] = numbers
        self.static.copy_(self.staging, non_blocking=True)
        self.uploaded.record()
