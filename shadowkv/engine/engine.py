"""The engine: admits, prefills, decodes and finishes requests, one step at a time.

A step decodes one token for every running sequence. Admitted short prompts are prefilled in the same pass. A longer
prompt is prefilled in rounds. Each step runs one round before its decode pass. The round takes the rest of
``TOKEN_GAP``. Requests join and leave between steps. ``LLM`` and ``process/core.py`` call ``Engine.step``.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.execution.sampler import NO_TOKEN
from shadowkv.engine.outputs import NOTHING_FOLLOWS, CheckedTokens, ErrorCode, TokenLogprobs, TokenOutput
from shadowkv.engine.parallel.driver import load_driver
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.parallel.tiers import open_mover as open_rank_mover
from shadowkv.engine.request import Request, RequestError, SchemaTimeout
from shadowkv.engine.request_factory import RequestFactory
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.decode_steps import DecodeSteps
from shadowkv.engine.scheduling.held_rows import Chosen, ChosenRows, Selected
from shadowkv.engine.scheduling.pacing import Pace
from shadowkv.engine.scheduling.prefill_queue import PrefillInFlight, PrefillQueue
from shadowkv.engine.scheduling.quality_meter import QualityMeter
from shadowkv.engine.scheduling.scheduler import Running, Scheduler
from shadowkv.engine.speculation.speculation import SpeculationStats
from shadowkv.engine.startup.draft_head import open_head
from shadowkv.engine.startup.loading import (
    checked_defaults,
    current,
    describe_defaults,
    device_of,
    graphs_up_to,
    load_engine_parts,
    sampling_of_directory,
)
from shadowkv.engine.startup.prefix_cache import check_disk_dir, open_mover, open_prefix_cache
from shadowkv.engine.startup.speculation import open_speculation
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.kv_cache import TierUse
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.group import RankFailure
from shadowkv.models.loader import LoadedModel
from shadowkv.prefix_cache.saves import Saves
from shadowkv.prefix_cache.stats import TierStats
from shadowkv.wording import SettingsError

logger = logging.getLogger(__name__)

Scores = list[TokenLogprobs | None]
"""Log-probabilities of a prompt's tokens, None for the first."""

TOKEN_GAP = 0.08
"""Target seconds between two tokens of a sequence while prompts are computed. With this target, 99 of 100 gaps are
below 0.1 s.

A round of prefill takes all the time of the gap that the decode step leaves, so that few decode steps run before the
prompts join them: a step of few sequences costs nearly as much as a step of many. Decode steps of 4 to 12 ms then take
5 to 15 % of the time. If a round took only three times as long as a decode step, decode steps would take 25 %. A prompt
that fits into the gap is computed in one step."""

QUEUED_TOKEN_GAP = 0.25
"""``TOKEN_GAP`` while more requests wait than run and the cache has room for them. Each step of the few running
requests delays all waiting ones, and steps of a full batch yield more tokens. On an H200 (fp8 weights), 48 prompts of
60K tokens with answers of 512 tokens take 70 s. With a gap of 0.08 s they take 76 s."""

PACKED_TOKEN_GAP = 0.03
"""``TOKEN_GAP`` for a step with several prompts. Packing prompts saves little, because a few hundred tokens already
keep a GPU's arithmetic busy, and each added prompt makes all requests wait longer. A burst is different: if all waiting
short prompts would take longer than ``QUEUED_TOKEN_GAP``, a step takes as many prompts as fit into
``QUEUED_TOKEN_GAP``. All of them are then computed sooner."""

PREFILL_PER_DECODE = {"cpu": 3.0, "cuda": 1.0}
"""Minimum time of a round of prefill, as a multiple of a decode step's time, by device type. It applies if a decode
step takes more than a quarter of the token gap on a CPU, or more than half of it on a GPU. Tokens then come later than
the gap says, but fuller batches soon make up for the delay."""

IDLE_PREFILL_SECONDS = 0.1
"""Seconds of a round of prefill while no sequence decodes. The round is limited because aborts and Ctrl-C take effect
only between steps."""


@dataclass(frozen=True)
class EngineStats:
    """Requests in flight, and the use of the KV cache and of the prefix cache.

    Attributes:
        running: requests that own a sequence.
        waiting: requests in the waiting queue.
        tiers: use of each tier of the KV cache. Finished sequences that the prefix cache keeps count as used.
        fetches: fetches from host memory since the start, without those of the current step.
        prefixes: use of each tier of the prefix cache; empty if it is off. The prefix cache's host memory does not
            count in ``tiers``.
        deferred: waiting requests whose prefix is being read from the disk.
        usage: share of the KV cache that requests in flight hold, 0 to 1; None unless requested.
        checkpoint_bytes: bytes of checkpoints of recurrent states, part of the tier ``recurrent_states``; None if no
            layer has such a state.
        speculation: counts of drafts; None without speculative decoding.
        checked: tokens that the quality meter has checked; None without ``quality_meter``.
        step_seconds: seconds that the current step has taken so far, if the engine is in a process of its own.
    """

    running: int
    waiting: int
    tiers: dict[str, TierUse]
    fetches: FetchCounts
    prefixes: dict[str, TierStats]
    deferred: int = 0
    usage: float | None = None
    checkpoint_bytes: int | None = None
    speculation: SpeculationStats | None = None
    checked: CheckedTokens | None = None
    step_seconds: float = 0.0


class Engine:
    """A model, its KV cache and the requests in flight. Not thread-safe, except where a method or property
    says so.

    Args:
        loaded: the model, if it is already loaded.
        backends: backend by op name, for tests and comparisons. The engine chooses the backends of all other ops.

    Attributes:
        runner: computes prefills and decode steps.
        head: runs the draft head; None if it does not draft.
        scheduler: decides which requests run.
        pace: measured prefill speed of this device.
        prefill_queue, decode_steps: the work in progress.

    Raises ValueError for invalid settings, MemoryError if memory is too small, RankFailure if another rank cannot
    start.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel | None = None, *, backends: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        check_disk_dir(config)
        asked = sampling_of_directory(config.generation_config)
        if config.tensor_parallel_size > 1 and (loaded is not None or backends):
            reason = "a loaded model cannot be sharded" if loaded else "other ranks choose their backends themselves"
            value = f"tensor_parallel_size={config.tensor_parallel_size} must be 1"
            raise SettingsError(f"{value}: {reason}", ["tensor_parallel_size"])
        self._ranks = None if config.tensor_parallel_size == 1 else Ranks(config)
        self.device = device_of(config.device) if self._ranks is None else self._ranks.device
        if self._ranks is not None and self.device.type == "cpu":
            many = f"tensor_parallel_size={config.tensor_parallel_size}"
            logger.warning("%s has no benefit without GPUs: all ranks share the memory of one CPU", many)
        with ExitStack() as stack:
            if self._ranks is not None:
                stack.callback(self._ranks.close)
            self._build(config, loaded, asked, backends)
            stack.pop_all()

    def _build(
        self,
        config: EngineConfig,
        loaded: LoadedModel | None,
        asked: Mapping[str, float] | None,
        backends: Mapping[str, str] | None,
    ) -> None:
        with current(self.device):
            if self._ranks is None:
                loaded, self.cache, self.notes = load_engine_parts(config, loaded, backends=backends)
                self.runner = Runner(loaded.model, self.cache, graphs_up_to(config, self.cache))
                self.head = open_head(config, loaded, self.runner, backends=backends)
            else:
                loaded, self.cache, self.runner, self.head, self.notes = load_driver(config, self._ranks)
            make = open_mover if self._ranks is None else partial(open_rank_mover, self._ranks)
            prefix_cache, origin = open_prefix_cache(config, loaded, self.cache, make)
        self.tokenizer, self.model_name = loaded.tokenizer, loaded.name
        self.model_path = str(loaded.path or config.model)
        self.model_config = loaded.config
        overrides = config.override_generation_config or {}
        self.sampling_defaults = checked_defaults(loaded.sampling if asked is None else asked, overrides)
        self.notes += describe_defaults(self.sampling_defaults, bool(overrides))
        self.pace = Pace()
        self.scheduler = Scheduler(
            self.cache,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            prefix_cache,
            config.scheduling_policy,
            self.pace,
        )
        run_ahead = self.runner.graphs is not None
        speculation = open_speculation(config, self.runner, self.head, self.scheduler)
        meter = QualityMeter(self.runner, config.quality_meter) if config.quality_meter else None
        self.decode_steps = DecodeSteps(self.runner, self.scheduler, run_ahead, self.pace, speculation, meter)
        self.prefill_queue = PrefillQueue(self.runner, self.scheduler, self.pace)
        self.max_model_len = self.cache.max_model_len
        stops = {*self.tokenizer.eos_token_ids, *loaded.config.eos_token_ids}
        self.requests = RequestFactory(config, loaded.config.vocab_size, self.tokenizer, stops, self.scheduler, origin)
        self._open: set[str] = set()
        self._aborted: set[str] = set()

    def when_a_rank_fails(self, callback: Callable[[RankFailure], None]) -> None:
        """Registers ``callback``. It is called on a separate thread when a tensor-parallel rank has ended."""
        if self._ranks is not None:
            self._ranks.when_failed(callback)

    # -- requests --------------------------------------------------------------------------------------------------

    def request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """Makes a request for ``add``, and waits until its grammar is compiled. Any thread can call it. Raises
        RequestError if the request can never be served."""
        if params.rules is not None:
            self.requests.grammars.compile(params.rules, params.one_line).result()
        return self.requests.request(request_id, prompt_token_ids, params)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if its id is in use."""
        self._enter(request)
        self.scheduler.add(request)

    def _enter(self, request: Request) -> None:
        name = request.request_id
        if name in self._open or name in self._aborted:
            raise RequestError(f"request id {name!r} is in use", "request_id")
        self._open.add(name)

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queues a request. Raises RequestError if it can never be served or its id is in use."""
        self.add(self.request(request_id, prompt_token_ids, params))

    def resume(self, request: Request, sequence: CachedSequence, token: int) -> TokenOutput:
        """Continues a request whose prompt was computed outside the engine. The engine owns ``sequence`` from then on.

        Args:
            sequence: a sequence of ``cache`` that holds the prompt.
            token: the first token of the answer.

        Returns the output for ``token``. Raises RequestError if the request's id is in use, ValueError if the length
        or capacity of the sequence is not the request's.
        """
        expected = len(request.prompt_token_ids), request.capacity
        if (sequence.length, sequence.capacity) != expected:
            raise ValueError(
                f"the sequence has {sequence.length} tokens and room for {sequence.capacity}; the request needs "
                f"{expected[0]} tokens and room for {expected[1]}"
            )
        self._enter(request)
        running = Running(request, sequence)
        if request.constraint is not None:
            request.constraint.start()
            request.constraint.is_ready(None)
        self.scheduler.waiting.start_elsewhere(request)
        self.scheduler.computed([running])
        request.cached_tokens, request.times.scheduled = sequence.length, time.monotonic()
        return self._take_token(running, token, None)

    def abort(self, request_id: str) -> None:
        """Ends a request, whether it waits, prefills or decodes. Unknown and finished ids are ignored."""
        if request_id not in self._open:
            return
        self._open.remove(request_id)
        if self.scheduler.cancel(request_id):
            return
        if (running := self._running(request_id)) is not None:
            self.scheduler.finish(running, keep=False)
        elif (prefill := self.prefill_queue.of(request_id)) is not None:
            self._aborted.add(request_id)
            if all(r.request.request_id in self._aborted for r in prefill.rows):
                self._drop_prefill(prefill)

    def stop(self, request_id: str) -> None:
        """Ends a running request whose text has reached a stop string. The engine has only tokens and cannot see that
        itself. Unknown and finished ids are ignored."""
        if request_id in self._open and (running := self._running(request_id)) is not None:
            self._finish(running)

    def _running(self, request_id: str) -> Running | None:
        return next((row for row in self.scheduler.running if row.request.request_id == request_id), None)

    @property
    def has_work(self) -> bool:
        """Whether a request waits, is prefilled or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running or self.prefill_queue.in_flight)

    @property
    def num_running(self) -> int:
        """Number of requests that own a sequence. Any thread can read it."""
        return len(self.scheduler.running) + self.prefill_queue.num_requests

    def num_running_of(self, tenant: str) -> int:
        """Number of one tenant's requests that own a sequence. Any thread can call it."""
        prefills = [*self.prefill_queue.in_flight]
        rows = [*self.scheduler.running, *(row for prefill in prefills for row in prefill.rows)]
        return sum(row.request.tenant == tenant for row in rows)

    def stats(self, usage: bool = False) -> EngineStats:
        """Returns the current statistics. Any thread can call it. With ``usage`` it is slow if the prefix cache keeps
        many sequences."""
        fetches = self.cache.fetches or FetchCounts()
        prefixes = self.scheduler.prefix_cache.stats() if self.config.enable_prefix_caching else {}
        return EngineStats(
            self.num_running,
            len(self.scheduler.waiting),
            self.cache.use(),
            fetches,
            prefixes,
            self.scheduler.deferred,
            self.scheduler.usage if usage else None,
            None if self.cache.recurrent is None else self.cache.recurrent.checkpoint_bytes,
            None if self.decode_steps.speculation is None else self.decode_steps.speculation.stats,
            None if self.decode_steps.meter is None else copy(self.decode_steps.meter.checked),
        )

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def waits_for_rules(self) -> bool:
        """Whether all running sequences wait for their grammars, and nothing is being prefilled."""
        return bool(self.scheduler.running) and self.decode_steps.idle and not self.prefill_queue.in_flight

    def step(self, wait: bool = True) -> list[TokenOutput]:
        """Runs a round of prefill and a decode step. Returns the output of each request that advanced.

        If all sequences wait for their grammars, the step waits for them for a moment, unless ``wait`` is False.
        """
        outputs: list[TokenOutput] = []
        with current(self.device):
            if (joining := self._start_prefill()) is not None:
                outputs += self._join(joining)
            elif self.prefill_queue.in_flight:
                outputs += self._advance_prefill()
            if self.scheduler.running:
                outputs += self._decode(wait and not outputs and not self.prefill_queue.in_flight)
            self.scheduler.prefix_cache.advance(idle=not self.num_running and not outputs)
        if self._ranks is not None:
            self._ranks.flush()  # sends queued calls, so that copies go on even if no step follows soon
        return outputs

    @property
    def settling(self) -> bool:
        """Whether pages are still being copied to other tiers. Steps continue the copies."""
        return self.scheduler.prefix_cache.busy

    @property
    def saves(self) -> Saves | None:
        """Saves and restores prompts by name, on the engine thread. None without a disk directory, or after the lower
        tiers have failed."""
        return self.scheduler.prefix_cache.saves

    def close(self) -> None:
        """Closes the prefix cache, the grammar processes and the other ranks. Pages on their way to the disk get a
        short time to be written."""
        self.requests.grammars.pool.close()
        with current(self.device):
            self.scheduler.prefix_cache.close()
        if self._ranks is not None:
            for runner in (self.runner, self.head):
                if runner is not None:
                    runner.drop_graphs()
            self._ranks.close()

    def _prefill_seconds(self, gap: float) -> float:
        """Seconds for a round of prefill when running sequences wait ``gap`` seconds between two tokens."""
        step = self.decode_steps.seconds
        return max(gap - step, PREFILL_PER_DECODE[self.device.type] * step)

    def _start_prefill(self) -> PrefillInFlight | None:
        """Starts a prefill if waiting requests can be admitted. Returns the prefill that the next decode step computes,
        if any."""
        if self.decode_steps.idle:
            self.prefill_queue.start()
            return None
        if not self.decode_steps.open:
            return None
        waiting = self.pace.seconds(self.scheduler.short_tokens_waiting)
        burst = math.isfinite(waiting) and waiting > QUEUED_TOKEN_GAP
        packed, alone = (QUEUED_TOKEN_GAP,) * 2 if burst else (PACKED_TOKEN_GAP, TOKEN_GAP)
        self.prefill_queue.start(self.pace.tokens(self._prefill_seconds(packed)))
        return self.prefill_queue.joining(self._prefill_seconds(alone))

    def _join(self, prefill: PrefillInFlight) -> list[TokenOutput]:
        try:
            with torch.inference_mode():
                if not self.decode_steps.join(prefill.rows):
                    return []
        except BaseException as error:
            return self._prefill_failed(prefill, error)
        self.prefill_queue.joined(prefill)
        self._end_aborted(prefill)
        return []

    def _advance_prefill(self) -> list[TokenOutput]:
        seconds, prefill = IDLE_PREFILL_SECONDS, self.prefill_queue.in_flight[-1]
        if not self.decode_steps.idle:
            more = len(self.scheduler.waiting) > len(self.scheduler.running)
            queued = more and self.scheduler.could_admit and self.num_running < self.config.max_num_seqs
            seconds = self._prefill_seconds(QUEUED_TOKEN_GAP if queued else TOKEN_GAP)
            if prefill.owed and self.scheduler.short_tokens_waiting:  # after this time, short prompts may overtake it
                seconds = min(seconds, prefill.owed)
        try:
            ended = self.prefill_queue.advance(seconds)
        except BaseException as error:
            return self._prefill_failed(self.prefill_queue.in_flight[-1], error)
        return self._progress(prefill) if ended is None else self._end_prefill(*ended)

    def _progress(self, prefill: PrefillInFlight) -> list[TokenOutput]:
        """Returns a progress output for each request of the prefill that has ``return_progress``."""
        outputs = []
        for request, left in zip((running.request for running in prefill.rows), prefill.tokens_left, strict=True):
            if request.params.return_progress and request.request_id not in self._aborted:
                outputs.append(output := _output(request, [], None))
                output.prefilled = len(request.prompt_token_ids) - left
        return outputs

    def _prefill_failed(self, prefill: PrefillInFlight, error: BaseException) -> list[TokenOutput]:
        """Ends the requests of a failed prefill and returns their error outputs. Raises ``error`` if it is not an
        ``Exception`` (Ctrl-C, for example), or if the device is no longer usable."""
        dropped = self._drop_prefill(prefill)
        if not isinstance(error, Exception):
            raise error
        message = _explain(error)
        return [self._error(request, message) for request in dropped]

    def _end_prefill(self, prefill: PrefillInFlight, logits: Tensor, hidden: list[Tensor]) -> list[TokenOutput]:
        done = prefill.rows
        self.scheduler.computed(done)
        self.decode_steps.prompted(done)
        new = sum(len(running.request.prompt_token_ids) - running.request.cached_tokens for running in done)
        self.scheduler.prefix_cache.speeds.computed(new, time.monotonic() - (done[0].request.times.scheduled or 0.0))
        rows = [row for row, running in enumerate(done) if running.request.request_id not in self._aborted]
        self._end_aborted(prefill)
        for row in rows:
            done[row].prompt_hidden = hidden[row] if hidden else None
        return self._take_tokens(*self.decode_steps.held.choose([done[row] for row in rows], logits[rows], {}))

    def _drop_prefill(self, prefill: PrefillInFlight) -> list[Request]:
        """Frees the sequences of a prefill. Returns its requests that were not aborted."""
        self.prefill_queue.drop(prefill)
        requests = [running.request for running in prefill.rows if running.request.request_id not in self._aborted]
        self._forget_aborted(prefill)
        return requests

    def _end_aborted(self, prefill: PrefillInFlight) -> None:
        """Ends the requests of a prefill that were aborted while it was computed."""
        for running in prefill.rows:
            if running.request.request_id in self._aborted:
                self.scheduler.finish(running, keep=False)
        self._forget_aborted(prefill)

    def _forget_aborted(self, prefill: PrefillInFlight) -> None:
        self._aborted.difference_update(running.request.request_id for running in prefill.rows)

    def _decode(self, wait: bool) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        try:
            chosen: ChosenRows | None = self.decode_steps.next(wait)
            while chosen is not None:  # once; with drafts, again while they are right
                outputs += self._take_tokens(*chosen)
                chosen = self.decode_steps.following()
        except torch.OutOfMemoryError as error:  # only running requests fail: others may need less memory
            message = _explain(error)
            outputs += [self._fail(running, message) for running in list(self.scheduler.running)]
        return outputs

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _score(self, request: Request, hidden: Tensor) -> Scores | None:
        count = request.params.prompt_logprobs
        return None if count is None else self.runner.prompt_logprobs(hidden, request.prompt_token_ids, count)

    def _take_tokens(self, rows: list[Running], chosen: Chosen, selected: Selected) -> list[TokenOutput]:
        tokens, logprobs, finite = chosen
        alive = {id(running) for running in self.scheduler.running}
        outputs = []
        for row, running in enumerate(rows):
            if id(running) not in alive:
                continue  # the request ended while the step was in flight
            if not finite[row]:
                outputs.append(self._fail(running, "the model's logits are not finite (NaN or infinity)"))
                continue
            try:
                hidden, running.prompt_hidden = running.prompt_hidden, None
                scores = None if hidden is None else self._score(running.request, hidden)
                output = self._take_token(running, tokens[row], logprobs[row])
                output.prompt_logprobs = scores
                if running.request.params.return_selections:
                    output.selections = [selected.get(row)] * len(output.token_ids)
                if running.request.params.return_progress and len(running.request.output_token_ids) <= 1:
                    output.prefilled = len(running.request.prompt_token_ids)
                outputs.append(output)
            except Exception as error:  # the other requests continue
                outputs.append(self._fail(running, _explain(error)))
        return outputs

    def _take_token(self, running: Running, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        request, now = running.request, time.monotonic()
        request.times.first_token, request.times.last_token = request.times.first_token or now, now
        if not request.max_tokens:  # the request only scores its prompt
            self._finish(running)
            return _output(request, [], "length")
        request.output_token_ids.append(token)
        constraint, reason = request.constraint, None
        if constraint is not None and constraint.failure is not None:
            too_much = isinstance(constraint.failure, SchemaTimeout)
            return self._fail(running, str(constraint.failure), "timeout" if too_much else None)
        if token == NO_TOKEN or (constraint is not None and not constraint.accept(token)):
            return self._fail(running, NOTHING_FOLLOWS, "nothing_follows")
        repeats = request.repetition is not None and request.repetition.take(token)
        ends = token in request.stop_ids
        if ends:
            reason = "stop"
        elif len(request.output_token_ids) >= request.max_tokens:
            reason = "length"
        elif repeats and len(request.output_token_ids) >= request.params.min_tokens:
            reason = "repetition"
        if reason is not None:
            self._finish(running)
        output = _output(request, [token], reason)
        output.end_token = ends
        if logprobs is not None:
            output.logprobs = [logprobs]
        return output

    def _finish(self, running: Running) -> None:
        self.decode_steps.forget(running)
        self.scheduler.finish(running, keep=True)
        self._open.remove(running.request.request_id)

    def _fail(self, running: Running, message: str, code: ErrorCode | None = None) -> TokenOutput:
        self.scheduler.finish(running, keep=False)
        return self._error(running.request, message, code)

    def _error(self, request: Request, message: str, code: ErrorCode | None = None) -> TokenOutput:
        self._open.remove(request.request_id)
        output = _output(request, [], "error")
        output.error, output.error_code = message, code
        return output


def _output(request: Request, tokens: list[int], reason: str | None) -> TokenOutput:
    output = TokenOutput(
        request.request_id,
        tokens,
        reason,
        len(request.prompt_token_ids),
        len(request.output_token_ids),
        request.cached_tokens,
        request.times,
    )
    if request.accepted_drafts or request.rejected_drafts:
        output.accepted_drafts, output.rejected_drafts = request.accepted_drafts, request.rejected_drafts
    if request.checked.tokens:
        output.checked = copy(request.checked)
    return output


def _explain(error: Exception) -> str:
    """Logs ``error`` and returns the message for the requests that it ended. Raises ``error`` if the device is no
    longer usable."""
    if isinstance(error, (torch.AcceleratorError, RankFailure)):
        raise error
    logger.error("requests failed", exc_info=error)
    return f"internal error ({type(error).__name__}); the log has the details"


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """A context that delays Ctrl-C until its end, or until the yielded function is called. In the middle of an engine's
    step Ctrl-C would leak pages and slots."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None  # Ctrl-C raises nothing here
        return
    pending: list[Any] = []

    def deliver() -> None:
        if pending:
            signum, frame = pending.pop()
            pending.clear()
            handler(signum, frame)

    try:
        signal.signal(signal.SIGINT, lambda signum, frame: pending.append((signum, frame)))
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
