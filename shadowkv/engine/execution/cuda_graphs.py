"""CUDA graphs of decode steps and mixed passes: one launch per step instead of a thousand. ``Runner`` has them.

There is one graph for each shape of a batch. The numbers that change from step to step are in one array, which is
copied to the device before the replay. Shapes are rounded up (``kvcache/decode/planning.py``), so that few graphs serve
many steps. Graphs of short sequences are captured at start (``warmup.py``). A shape that occurs later runs its first
steps without a graph, because a capture would not pay off for a few steps. A shape without memory for its graph always
runs without one.
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

from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.prefill.exact import MAX_PROMPTS
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.group import RankFailure

logger = logging.getLogger(__name__)

MAX_GRAPHS = 320
"""Maximum number of graphs that are kept. The least recently used graph is dropped first."""

EAGER_STEPS = 8
"""Steps of a shape that run without a graph before it is captured. A capture takes as long as several eager steps, and
all running sequences wait for it. After this many steps, eager steps have lost about as much time as a capture takes. A
shape that occurs only briefly costs no capture. Steps are counted and not timed, because all ranks must decide alike,
and their times differ."""

Function = Callable[[Tensor], Any]
"""The captured function. Its argument is the array of numbers on the device."""

Step = Callable[[DecodePlan, Tensor, Tensor, "PromptInputs | None", bool], Tensor]

PROMPT_ROWS = (128, 256, 512, 768, 1024, 1536, 2048)
"""Sizes to which the prompts' tokens are padded in a captured mixed pass. There is a graph for each pair of a size here
and a size in ``STEP_ROWS``."""

STEP_ROWS = (8, 32, 64, 128, 256)
"""Sizes to which a decode step's rows are padded in a captured mixed pass. They are coarse, because rows cost little
beside the prompts' tokens."""


class PromptInputs(NamedTuple):
    """Prompts in a captured pass, int64 on the device. T is the padded number of the prompts' tokens, and B the padded
    number of the step's rows.

    Attributes:
        numbers: the m numbers that describe the prompts to the cache [m] (``KVCache.exact_prompts``).
        ids: token ids [T].
        rows: rows of the pass whose logits are needed [B + MAX_PROMPTS].
        compressing: whether the pass reads or writes compressed pages of the prompts' sequences, or learns from the
            prompts' queries (``KVCache.compressing``).
    """

    numbers: Tensor
    ids: Tensor
    rows: Tensor
    compressing: bool


class PromptShape(NamedTuple):
    """The shape of the prompts in a captured pass.

    Attributes:
        rows: T, the padded number of their tokens; 0 for a step without prompts.
        compressing: as in ``PromptInputs``.
    """

    rows: int = 0
    compressing: bool = False


class Pass(NamedTuple):
    """The inputs of a pass.

    Attributes:
        plan: shapes and numbers of the step.
        tokens, sources: the step's token ids, or the rows of ``Runner.chosen`` that hold them, as in ``Runner.decode``.
        sequences: sequences of the prompts.
        ids: new token ids of each prompt.
    """

    plan: DecodePlan
    tokens: list[int]
    sources: list[int]
    sequences: Sequence[CachedSequence]
    ids: Sequence[list[int]]


class CudaGraphs:
    """Runs the decode steps and page compressions of one cache as CUDA graphs, and captures missing graphs.

    Args:
        step: ``Runner.step``. It computes logits of any dtype. Its arguments are the plan, whose shapes it reads; the
            plan's numbers on the device; the newest tokens and their sources, int64 [2, B]; prompts or None; and
            whether it is a dry run. A dry run loads the kernels that the capture needs, because a capture must not load
            any. The dry run computes only a few layers, because the next token waits for it.
        max_batch: maximum number of rows of a decode step.
        vocabulary: V, the columns of the logits.
        together: whether other ranks run the same graphs. A rank without memory for a graph then raises RankFailure,
            because it does not know whether the other ranks have run theirs.
        logits: the attribute ``logits`` of another ``CudaGraphs`` of the same size, to share it; None to allocate one.

    Attributes:
        captures: number of captures so far, including failed ones.
        graphs: graphs by shape, the most recently used last.
        without: shapes that had no memory for a graph.
        eager: number of eager runs by shape, for shapes without a graph.
        eager_runs: number of eager runs so far, of shapes that will have a graph if they occur more often.
        logits: float32 [rows, V]. All graphs write their logits here, for sampling. If each graph had its own tensor,
            it would keep 0.5 MB for each row: 128 MB for 256 rows.
    """

    def __init__(
        self,
        cache: KVCache,
        step: Step,
        max_batch: int,
        vocabulary: int,
        together: bool = False,
        logits: Tensor | None = None,
    ) -> None:
        self.cache, self._step, self.max_batch, self.captures = cache, step, max_batch, 0
        self._together = together
        self.graphs: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self.without: set[tuple[int, ...]] = set()
        self.eager: Counter[tuple[int, ...]] = Counter()
        self.eager_runs = 0
        if logits is None:
            logits = torch.empty(max_batch + MAX_PROMPTS, vocabulary, device=cache.device)
        self.logits = logits
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(cache.device)

    def run(
        self,
        plan: DecodePlan,
        tokens: list[int],
        sources: list[int],
        sequences: Sequence[CachedSequence] = (),
        ids: Sequence[list[int]] = (),
    ) -> Tensor | None:
        """Runs a decode step. If ``sequences`` and their new token ids ``ids`` are given, it also computes these n
        prompts (``KVCache.can_capture``).

        Returns float32 logits [B + n, V] of the B sequences of the step and the n prompts. The next call overwrites
        them. Returns None if there are prompts and no graph for them: mixed passes are captured only when their shape
        has occurred ``EAGER_STEPS`` times.
        """
        given = Pass(plan, tokens, sources, sequences, ids)
        if not sequences:
            return self._run_pass(given, self.cache.rounded(plan, self.max_batch), PromptShape(), at_once=False)
        prompts = self.prompt_shape(sequences, [len(prompt) for prompt in ids])
        batch = next((batch for batch in self._step_rows() if batch >= len(tokens)), None)
        fits = plan.micro_batches == 1 and all(group.of_sequence is None for group in plan.groups)
        if prompts is None or batch is None or not fits:
            return None
        shape = self.cache.rounded(plan, self.max_batch, batch)
        key = _key(shape, prompts)
        if key in self.without:
            return None
        if key not in self.graphs and self.eager[key] < EAGER_STEPS:
            self.eager[key] += 1
            return None
        return self._run_pass(given, shape, prompts, at_once=True)

    def compress(self, number: int, numbers: np.ndarray, function: Function) -> None:
        """Compresses due pages. ``KVCache.plan_decode`` calls it as its argument ``compress``."""
        self._run((number, *numbers.shape), numbers, function, function)

    def prompt_shape(self, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> PromptShape | None:
        """Returns the padded shape of prompts with ``lengths`` new tokens; None if a pass cannot have all of them."""
        rows = next((rows for rows in PROMPT_ROWS if rows >= sum(lengths)), None)
        compressing = self.cache.compressing(sequences)
        return None if rows is None or compressing is None else PromptShape(rows, compressing)

    def prepare(self, plan: DecodePlan, batch: int | None = None, rows: int = 0, compressing: bool = False) -> None:
        """Captures the graph of a plan's shapes by running a pass of padding rows, unless the graph exists.

        Args:
            batch: rows of the step; None for the plan's.
            rows, compressing: shape of the prompts; 0 rows for a step without prompts (``PromptShape``).
        """
        if not self.has(plan, batch, rows, compressing):
            shape = self.cache.rounded(plan, self.max_batch, batch)
            self._run_pass(Pass(plan, [], [], [], []), shape, PromptShape(rows, compressing), at_once=True)

    def mixed_shapes(self) -> list[tuple[int, int]]:
        """Returns all pairs of padded prompt tokens and step rows for captured mixed passes. There are none if the
        prompts' attention is planned on the host."""
        if not self.cache.captures_prompts:
            return []
        return [(rows, batch) for batch in self._step_rows() for rows in PROMPT_ROWS]

    def _step_rows(self) -> list[int]:
        return sorted({min(rows, self.max_batch) for rows in STEP_ROWS})

    def _run_pass(self, given: Pass, shape: DecodePlan, padded: PromptShape, at_once: bool) -> Tensor:
        """Runs a pass whose step is padded to ``shape`` and whose prompts are padded to ``padded``. ``at_once``
        captures a missing graph without eager steps."""
        batch, count, new, rows = shape.num_rows, len(given.tokens), len(given.ids), padded.rows
        inputs = np.full((2, batch), -1, np.int64)
        inputs[0], inputs[0, :count], inputs[1, :count] = 0, given.tokens, given.sources
        of_prompts = [np.empty(0, np.int64)] * 3
        if rows:
            lengths = [len(prompt) for prompt in given.ids]
            ids, needed = np.zeros(rows, np.int64), np.zeros(batch + MAX_PROMPTS, np.int64)
            ids[: sum(lengths)] = [token for prompt in given.ids for token in prompt]
            needed[:count], needed[count : count + new] = np.arange(count), batch - 1 + np.cumsum(lengths)
            of_prompts = [self.cache.exact_numbers(given.sequences, lengths, rows), ids, needed]
        parts = [shape.packed(), inputs.ravel(), *of_prompts]
        sizes = [part.size for part in parts]

        def run(static: Tensor, dry_run: bool = False) -> Tensor:
            # A dry run with prompts changes its numbers, so it gets a copy. The copy has the same alignment, because
            # the choice of kernels depends on it.
            numbers, step_inputs, prompt_numbers, prompt_ids, prompt_rows = (
                static.clone() if dry_run and rows else static
            ).split(sizes)
            prompts = None
            if rows:
                # Without this, the dry run would write new tokens into the ring of a sliding window, over tokens that
                # the real pass must still read.
                if dry_run:
                    padding = self.cache.exact_numbers((), (), rows)
                    prompt_numbers.copy_(upload(torch.from_numpy(padding), self.cache.device))
                prompts = PromptInputs(prompt_numbers, prompt_ids, prompt_rows, padded.compressing)
            logits = self._step(shape, numbers, step_inputs.view(2, -1), prompts, dry_run)
            return self.logits[: len(logits)].copy_(logits)

        dry = functools.partial(run, dry_run=True)
        logits: Tensor = self._run(_key(shape, padded), np.concatenate(parts), run, dry, at_once)
        return logits[: count + new]

    def drop(self) -> None:
        """Frees all graphs, even if other objects refer to them. None can run again."""
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()

    def has(self, plan: DecodePlan, batch: int | None = None, rows: int = 0, compressing: bool = False) -> bool:
        """Whether a plan's shapes have a graph, or had no memory for one. Arguments are as in ``prepare``."""
        key = _key(self.cache.rounded(plan, self.max_batch, batch), PromptShape(rows, compressing))
        return key in self.graphs or key in self.without

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
            self.eager_runs += 1
        elif key not in self.without:
            self.captures += 1
            del self.eager[key]
            try:
                captured = self._capture(key, numbers, function, dry_run)
            except torch.OutOfMemoryError as error:
                if self._together:
                    raise RankFailure(f"no memory for a CUDA graph that all ranks run: {error}") from error
                if not self.without:
                    logger.warning("no memory for a CUDA graph; steps of this shape run without one: %s", error)
                self.without.add(key)
        if captured is None:
            return function(upload(torch.from_numpy(numbers), self.cache.device))
        self.graphs.move_to_end(key)
        return captured.result

    def _capture(self, key: tuple[int, ...], numbers: np.ndarray, function: Function, dry_run: Function) -> _Captured:
        """Captures a graph and runs it once."""
        function, dry_run = self._joining(function), self._joining(dry_run)
        with _capturing:
            captured = self.graphs[key] = _Captured(numbers, function, dry_run, self._pool, self._stream)
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)
        return captured

    def _joining(self, function: Function) -> Function:
        """Wraps ``function``. If it runs out of memory, the wrapper joins the other captured streams, because a
        capture can end only after they are joined."""

        def run(numbers: Tensor) -> Any:
            try:
                return function(numbers)
            except torch.OutOfMemoryError:
                self.cache.join_capture()
                raise

        return run


def _key(shape: DecodePlan, prompts: PromptShape) -> tuple[int, ...]:
    """The key of a pass's graph."""
    return (*prompts, *shape.shape) if prompts.rows else shape.shape


_capturing = threading.Lock()
"""Lock around a capture. Engines on several threads share the capture stream, and one must not capture another's
work."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The capture stream of a device. All graphs share it, because a pool's memory and the workspaces of matrix
    products exist once per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A context without garbage collections. A collection during a capture could free, for example, another cache's
    pinned memory, which a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Captured:
    """A captured graph, the buffers of its numbers, and its result."""

    def __init__(
        self, numbers: np.ndarray, function: Function, dry_run: Function, pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.staging = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
        self.static = torch.empty(numbers.shape, dtype=torch.int64, device=stream.device)
        self.graph = torch.cuda.CUDAGraph()
        self.uploaded = torch.cuda.Event()
        self._upload(numbers)
        # The dry run loads libraries and kernels, which must not load during a capture.
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
        """Runs the graph on new numbers of the same shape."""
        self._upload(numbers)
        self.graph.replay()

    def _upload(self, numbers: np.ndarray) -> None:
        self.uploaded.synchronize()  # the last copy out of the buffer can still be in progress
        self.staging.numpy()[:] = numbers
        self.static.copy_(self.staging, non_blocking=True)
        self.uploaded.record()
