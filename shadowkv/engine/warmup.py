"""Warm-up: compiles kernels and captures CUDA graphs, so that the first request is as fast as later ones.

A few requests go through the engine's own steps. Some requests have a later turn. These run to completion, and their
cached sequences are evicted at the end of the warm-up. The others are aborted. Then CUDA graphs of decode steps are
captured for all batch sizes (``GraphGrid``), also those of drafts. ``LLM`` and ``process/core.py`` call ``warm_up``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import NamedTuple

import torch
from tqdm import tqdm

from shadowkv.engine.engine import Engine, interrupts_deferred
from shadowkv.engine.execution.cuda_graphs import MAX_GRAPHS
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.startup.loading import current
from shadowkv.engine.startup.sizing import GRAPH_BYTES, MIB
from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.decode.planning import MIN_EXACT_PAGES, round_up
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.free_memory import unreserved_bytes
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.layers.group import RankFailure
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

SHORT = 48
"""Tokens of a short prompt, which stays dense."""

MORE = 8
"""Tokens that a later turn adds."""

GRID_SECONDS = 15.0
"""Seconds of graph capture at start. Other shapes are captured later, when they have occurred often enough."""

SERVER_SECONDS = 3.0
"""Seconds of graph capture at the start of a server. While idle, the server captures more graphs, one at a time."""

GRID_BYTES = GRAPH_BYTES * 3 // 4
"""Device memory for the captured graphs of ``GraphGrid``."""


def warm_up(
    engine: Engine, stopped: Callable[[], bool] = lambda: False, seconds: float = GRID_SECONDS
) -> GraphGrid | None:
    """Warms up an engine on a GPU, unless the config skips it. Must be called on the thread that steps. Ends early when
    ``stopped`` returns True.

    Returns the grid with the graphs that are left to capture after ``seconds``, for idle times; None if none is left.
    """
    if engine.device.type != "cuda" or engine.config.skip_warmup:
        return None
    use_everything_once(engine, stopped)
    grid = GraphGrid(engine)
    return grid if grid.capture(seconds, stopped) else None


def use_everything_once(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
    """Runs the warm-up requests, on any device. The engine must have no requests; afterwards its cache is empty and its
    counts are zero.

    Ends early when ``stopped`` returns True, or on Ctrl-C with KeyboardInterrupt. Failures are only logged, except an
    error that leaves the device or another rank unusable.
    """
    began, shown = time.monotonic(), sys.stderr.isatty()
    if not shown:
        logger.info("warming up")
    stages = _stages(engine)
    bar = tqdm(total=len(stages), desc="warm-up", unit="", leave=False, disable=not shown)
    alone = engine.scheduler.prefix_cache.on_the_device_alone()
    try:
        with interrupts_deferred() as interruptible, bar, alone, closing(_pieces(stages)) as pieces:
            for done in pieces:
                bar.update(done)
                interruptible()
                if stopped():
                    return
    except (torch.AcceleratorError, RankFailure):
        raise
    except Exception as error:
        logger.warning("the warm-up ended early, first requests will be slower: %s", error, exc_info=error)
        return
    finally:
        while engine.scheduler.prefix_cache.evict():
            pass
        engine.scheduler.prefix_cache.counts.forget()
        engine.scheduler.prefix_cache.speeds.forget()  # the measured speeds include compilation
        engine.pace.forget()
        engine.cache.forget_fetches()
        engine.cache.take_attention_density()
    if not shown:
        logger.info("warmed up in %.1f s", time.monotonic() - began)


class _Shape(NamedTuple):
    """A pass that has a graph of its own. The runner captures it; the other attributes are the arguments of
    ``Runner.prepare``."""

    runner: Runner
    plan: DecodePlan
    batch: int | None = None
    rows: int = 0
    compressing: bool = False


class GraphGrid:
    """Captures CUDA graphs of an engine's decode steps before they are needed.

    It goes through the page counts of sequences, fewest first. For each page count it captures all batch sizes, with
    and without prompts, until ``GRID_BYTES`` are used. Of the mixed passes that read or write compressed pages of their
    prompts' sequences, it captures only one. If all sequences of a step draft together (``sparse`` and ``mtp``), it
    also captures the draft steps, and the steps that verify the longest drafts of all sequences. If drafts are from the
    text, it first captures the steps that verify drafts of a single sequence, for all page counts. The log says how far
    it came. A grid must be made while the engine has no sequences. Without CUDA graphs it does nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, config = engine, engine.config
        self._together = config.speculation is not None and config.speculation.by_the_model
        # Steps that verify drafts of all sequences have plans of their own.
        self._batches = self._up_to(config.max_num_seqs + (0 if self._together else config.drafted_rows))
        of_head = [] if engine.head is None else [plan for _, plan in _plans(engine.head.cache)]
        self._left, self._longest = self._captures(list(_plans(engine.cache)), of_head), 0
        self._count, self._seconds, self._bytes = 0, 0.0, 0

    def capture(self, seconds: float = 0.0, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Captures one graph, and more until ``seconds`` have passed. Returns whether graphs are left. Ends early when
        ``stopped`` returns True, or on Ctrl-C with KeyboardInterrupt."""
        began, more = time.monotonic(), not stopped()
        with interrupts_deferred() as interruptible, current(self.engine.device):
            while more and (more := next(self._left, None) is not None):
                interruptible()
                if stopped() or time.monotonic() - began >= seconds:
                    break
        self._seconds += time.monotonic() - began
        if seconds or not more:
            self._log(more)
        return more

    def _up_to(self, rows: int) -> list[int]:
        """Returns the numbers of rows of steps with up to ``rows`` rows, rounded as those of steps, the largest
        first."""
        return sorted({min(round_up(count), self.engine.config.max_rows) for count in range(1, rows + 1)}, reverse=True)

    def _captures(self, plans: list[tuple[int, DecodePlan]], of_head: list[DecodePlan]) -> Iterator[int]:
        """Captures graph after graph; yields the number of captured graphs after each. ``plans`` are those of
        ``_plans``, and ``of_head`` those of the draft head."""
        device = self.engine.device
        for runner, plan, batch, rows, compressing in self._shapes(plans, of_head):
            graphs = runner.graphs
            if graphs is None or graphs.has(plan, batch, rows, compressing):
                continue
            free = unreserved_bytes(device)
            if len(graphs.graphs) >= MAX_GRAPHS // 2 or self._bytes > GRID_BYTES:
                return
            runner.prepare(plan, batch, rows, compressing)
            self._count, self._bytes = self._count + 1, self._bytes + free - unreserved_bytes(device)
            yield self._count

    def _shapes(self, plans: list[tuple[int, DecodePlan]], of_head: list[DecodePlan]) -> Iterator[_Shape]:
        """Yields all shapes in the order of their capture. Arguments are as in ``_captures``."""
        config, runner, head = self.engine.config, self.engine.runner, self.engine.head
        if runner.graphs is None:
            return
        # The largest pass goes first: all graphs share its memory.
        mixed = [(batch, rows, False) for rows, batch in reversed(runner.graphs.mixed_shapes())]
        shapes = [*mixed[:1], *((batch, 0, False) for batch in self._batches), *mixed[1:]]
        # One mixed pass with compressed sequences is enough: its capture compiles the kernels for all such passes.
        able = self.engine.cache.captures_compressing
        compressing = [(batch, rows, True) for batch, rows, _ in mixed[-1:] if able]
        if config.speculation is not None and not self._together:
            yield from (_Shape(runner, plan, *shapes[0]) for _, plan in plans[:1])
            for _, plan in plans:
                yield from self._of_drafts_from_text(plan)
        for number, (tokens, plan) in enumerate(plans):
            yield from (_Shape(runner, plan, *shape) for shape in (shapes if number else (*shapes, *compressing)))
            if self._together:
                yield from self._of_drafts_together(plan)
            if head is not None and not number:
                batches = self._up_to(config.max_num_seqs * (config.drafted_tokens + 1))
                yield from (_Shape(head, own, batch) for own in of_head for batch in batches)
            self._longest = tokens

    def _of_drafts_from_text(self, plan: DecodePlan) -> Iterator[_Shape]:
        """Yields the steps that verify drafts of one sequence, which is as long as that of ``plan``. Numbers of rows
        are rounded up to powers of 2 (``KVCache.rounded``)."""
        drafted, cache = self.engine.config.drafted_tokens, self.engine.cache
        for bits in range(drafted.bit_length(), 0, -1):
            yield _Shape(self.engine.runner, cache.forecast_rows(plan, 1, min(1 << bits, drafted + 1)))

    def _of_drafts_together(self, plan: DecodePlan) -> Iterator[_Shape]:
        """Yields the model's draft steps, and the steps that verify drafts. Their sequences are as long as that of
        ``plan``."""
        config, cache, runner = self.engine.config, self.engine.cache, self.engine.runner
        if cache.spec.drafts:
            if not any(group.compressed_pages for group in plan.groups):
                return  # such sequences have no drafts
            drafting = cache.forecast_rows(plan, 1, 1, drafting=True)
            yield from (_Shape(runner, drafting, batch) for batch in self._batches)
        for count in range(config.max_num_seqs, 0, -1):
            yield _Shape(runner, cache.forecast_rows(plan, count, config.drafted_tokens + 1))

    def _log(self, more: bool) -> None:
        if self.engine.runner.graphs is None:
            return
        logger.info(
            "graphs: %d, for %s up to %d and sequences of up to %s tokens, in %.1f s, %.0f MiB; "
            "other graphs are captured when %s",
            self._count,
            counted(len(self._batches), "batch size"),
            self._batches[0],
            f"{self._longest:,}",
            self._seconds,
            self._bytes / MIB,
            "the engine is idle or they are needed" if more else "they are needed",
        )


def _plans(cache: KVCache) -> Iterator[tuple[int, DecodePlan]]:
    """Yields pairs: a sequence length that has graphs of its own, and the plan of a step of one such sequence. Lengths
    are in ascending order. Stops at a length that does not fit into the cache."""
    for tokens in _lengths(cache.max_model_len):
        if not cache.demand(tokens, tokens + 1).within(cache.free):
            return
        sequence = cache.allocate(tokens, tokens + 1)
        try:
            plan = cache.forecast_decode([], [(sequence, tokens)])
        finally:
            cache.release(sequence)
        if plan is None:
            return
        yield tokens, plan


def _lengths(max_model_len: int) -> list[int]:
    """Returns the sequence lengths that have graphs of their own, in ascending order."""
    pages = {round_up(count) for count in range(MIN_EXACT_PAGES, max_model_len // PAGE + 1)}
    longest = max_model_len - 1
    return sorted({min(PAGE * count - 1, longest) for count in pages or {MIN_EXACT_PAGES}})


def _stages(engine: Engine) -> list[Generator[None, None, object]]:
    """Returns the stages of the warm-up. Each is a generator that yields after every engine step.

    1. A short prompt.
    2. A pack of two short prompts.
    3. A prompt of more than two blocks, long enough to be compressed if the policy compresses, and a second one that
       shares its prefix. Their answers are so long that a page is compressed during decode. Then a later turn of the
       first.
    4. A later turn of a short prompt.
    5. A short prompt that joins another one's decode step.
    """
    spec, longest = engine.cache.spec, 2 * BLOCK_TOKENS[engine.device.type] + SHORT
    room = engine.max_model_len - (PAGE + 1) - MORE - 2  # leaves room for the answer, a later turn and its answer
    if room < SHORT:
        return []
    if spec.compresses and spec.dense_limit + PAGE <= room:
        longest = max(longest, spec.dense_limit + PAGE)
    pack = [SHORT, SHORT // 2][: engine.config.max_num_seqs]
    again = min(longest, room - 2 * PAGE)  # length of the second prompt, a prefix of the first or equal to it
    shared = [min(longest, room), again] if engine.config.max_num_seqs > 1 and again > PAGE else [min(longest, room)]
    of_lengths = (([SHORT], 3), (pack, 3))
    answered = [_answered(engine, [_prompt(engine, n) for n in lengths], tokens) for lengths, tokens in of_lengths]
    turns = [_later_turn(engine, shared, PAGE + 1), _later_turn(engine, [SHORT], 2)]
    joining = _answered(engine, [_prompt(engine, n) for n in pack], 6, one_by_one=True)
    return [*answered, *turns, joining]


def _prompt(engine: Engine, length: int) -> list[int]:
    return [token % engine.model_config.vocab_size for token in range(length)]


def _pieces(stages: list[Generator[None, None, object]]) -> Generator[int, None, None]:
    """Runs all stages. Yields 0 after each step, and 1 after each stage."""
    for stage in stages:
        with closing(stage):  # the stage's requests are removed before anything is evicted, however this ends
            for _ in stage:
                yield 0
        yield 1


def _later_turn(engine: Engine, lengths: list[int], tokens: int) -> Generator[None, None, None]:
    """Answers prompts until their requests end, so that they stay cached. Then answers a later turn of the first
    one."""
    prompts = [_prompt(engine, length) for length in lengths]
    answers = yield from _answered(engine, prompts, tokens, ends=True)
    yield from _answered(engine, [prompts[0] + answers[0] + prompts[0][:MORE]], 1)


def _answered(
    engine: Engine, prompts: list[list[int]], tokens: int, ends: bool = False, one_by_one: bool = False
) -> Generator[None, None, list[list[int]]]:
    """Answers each prompt with ``tokens`` tokens, yields after each engine step, and returns the answers' tokens.

    With ``ends`` the requests end and stay cached; otherwise they are aborted. With ``one_by_one`` a prompt is added
    when the one before has its first token. At the end no request is left, even after an error.
    """
    most = tokens if ends else tokens + 1
    sampled = SamplingParams(max_tokens=most, temperature=1.0, top_k=50, top_p=0.9, seed=0, ignore_eos=True)
    answers: dict[str, list[int]] = {f"warm-up-{number}": [] for number in range(len(prompts))}
    try:
        for name, prompt in zip(answers, prompts, strict=True):
            engine.add_request(name, prompt, sampled)
            while one_by_one and not answers[name]:
                _take(engine.step(), answers)
                yield
        while any(len(answer) < tokens for answer in answers.values()):
            _take(engine.step(), answers)
            yield
    finally:
        for name in answers:
            engine.abort(name)
    return [*answers.values()]


def _take(outputs: list[TokenOutput], answers: dict[str, list[int]]) -> None:
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
        answers[output.request_id] += output.token_ids
