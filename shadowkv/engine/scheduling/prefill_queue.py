"""Prefills in progress: one, or a short one that has overtaken a long one, which is paused.

While others decode, short prompts are part of a decode step, which computes them in the same pass
(``PrefillQueue.joining``). All other prefills are computed by themselves, layer by layer, and paused for steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.pacing import Pace, Stopwatch
from shadowkv.engine.scheduling.scheduler import Leader, Running, Scheduler

CAPTURE_SECONDS = 0.05
"""Time in a slice of prefill that is left to the host to make a graph: a token waits for that, and for the launches of
the rest of the slice."""

LONG_SHARE = 0.25
"""Of the time that prompts get, what a long one has at least while short ones overtake it. Short ones that come in a
burst wait for it: with half of the time for the long one, ten that came within 0.4 s had their first tokens after 0.34
to 0.40 s on an H200, and with all for them they would have taken the device a quarter of a second."""


MAX_OWED = 0.5
"""Seconds that newcomers may owe to what they overtake: a client whose requests end at once is a newcomer each time."""

MAX_IN_FLIGHT = 3
"""A long one, a pack that has overtaken it, and newcomers that have overtaken that: each has activations of its own."""


@dataclass(eq=False)
class PrefillInFlight:
    """Requests whose prompts are computed together.

    Attributes:
        steps: of the computation, which can be paused or abandoned between any two.
        watch: how long the device has worked on them.
        long: whether it is a prompt of more than a block, which shorter ones may overtake.
        scored: whether log-probabilities of prompts are asked for.
        tokens: that are computed.
        pieces: of the computation, ``done`` of which are finished.
        owed: seconds that are its share beside those that overtook it, and that it has not had since.
        seconds: of the device's work on it so far.
    """

    rows: list[Running]
    steps: Generator[None, None, tuple[Tensor, list[Tensor]]]
    watch: Stopwatch
    long: bool
    scored: bool
    tokens: int
    pieces: int
    owed: float = 0.0
    done: int = 0
    seconds: float = 0.0

    @property
    def leaders(self) -> list[Leader]:
        """Its prompts, with the tokens left to compute."""
        return [Leader(running.request.prompt, left) for running, left in zip(self.rows, self.tokens_left, strict=True)]

    @property
    def tokens_left(self) -> list[int]:
        """Tokens left to compute of each prompt, where half of the layers of all count as all layers of half."""
        left = 1 - self.done / max(self.pieces, self.done)
        requests = [running.request for running in self.rows]
        return [math.ceil(left * (len(request.prompt_token_ids) - request.cached_tokens)) for request in requests]


class PrefillQueue:
    """Starts a scheduler's prefills and continues them.

    A short one starts where the current long one is paused, and is finished first. Another does so only when the long
    one has since had its ``LONG_SHARE`` of the device's time, or where it is a newcomer's: that may overtake a pack of
    others' short ones as well, up to ``MAX_OWED``.

    Attributes:
        in_flight: the last one is running; those before it are long and paused.
        pace: how long prompts take on this device.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, pace: Pace) -> None:
        self.runner, self.scheduler, self.pace = runner, scheduler, pace
        self.in_flight: list[PrefillInFlight] = []

    @property
    def _leaders(self) -> list[Leader]:
        return [leader for prefill in self.in_flight for leader in prefill.leaders]

    @property
    def num_requests(self) -> int:
        """Number of requests in all of them; may be called from any thread."""
        return sum(len(prefill.rows) for prefill in self.in_flight)

    def of(self, request_id: str) -> PrefillInFlight | None:
        """The prefill that computes a request."""
        for prefill in self.in_flight:
            if any(running.request.request_id == request_id for running in prefill.rows):
                return prefill
        return None

    def start(self, most_tokens: float = math.inf) -> None:
        """Starts another one if it is the turn of requests, with several prompts only up to ``most_tokens``."""
        if not self.in_flight:
            rows = self.scheduler.admit(most_tokens=most_tokens)
        elif (last := self.in_flight[-1]).long and last.owed <= 0:
            rows = self.scheduler.admit(self._leaders, most_tokens)
        elif self._newcomers_may_start:
            rows = self.scheduler.admit(self._leaders, most_tokens, newcomers_only=True)
        else:
            return
        if not rows:
            return
        for running in rows:
            running.request.times.scheduled = time.monotonic()
            if running.request.constraint is not None:
                running.request.constraint.start()
        work = [(running.sequence, running.new_token_ids) for running in rows]
        watch, long = Stopwatch(self.runner.cache.device), self.scheduler.is_long(len(work[0][1]))
        scored = any(running.request.params.prompt_logprobs is not None for running in rows)
        tokens = sum(len(ids) for _, ids in work)
        pieces = self.runner.prefill_pieces(tokens)
        steps = self.runner.prefill(work, scored)
        self.in_flight.append(PrefillInFlight(rows, steps, watch, long, scored, tokens, pieces))

    @property
    def _newcomers_may_start(self) -> bool:
        more = len(self.in_flight) < MAX_IN_FLIGHT and self.in_flight[0].owed <= MAX_OWED
        return more and self.scheduler.waiting.has_newcomers

    def joining(self, seconds: float) -> PrefillInFlight | None:
        """The prefill that is to be part of the next decode step: the current one, if it will add at most ``seconds``
        to it, and can be. A step is one pass without a pause: what has begun already, is scored, attends to more than a
        block or waits for what other tiers send is computed by itself."""
        prefill, scheduler = self.in_flight[-1] if self.in_flight else None, self.scheduler
        if prefill is None or prefill.done or prefill.scored or self.pace.seconds(prefill.tokens) > seconds:
            return None
        whole = sum(len(running.request.prompt_token_ids) for running in prefill.rows)
        arriving = any(running.sequence.pending_layers is not None for running in prefill.rows)
        fits = prefill.tokens + len(scheduler.running) <= scheduler.max_num_batched_tokens
        return prefill if fits and not arriving and not scheduler.is_long(whole) else None

    def joined(self, prefill: PrefillInFlight) -> None:
        """Records that a decode step computes it."""
        self._account(prefill, self.pace.seconds(prefill.tokens))
        self.in_flight.remove(prefill)

    def advance(self, seconds: float) -> tuple[PrefillInFlight, Tensor, list[Tensor]] | None:
        """Continues the last one until another piece would take the device's work beyond ``seconds``, or makes the
        graph of the batch that its requests will join.

        Returns it, with its results, if it has ended. If it raises, the prefill is still there, to be dropped.
        """
        prefill = self.in_flight[-1]
        prefill.watch.start()
        try:
            with torch.inference_mode():
                launched = 0.0
                while True:
                    if worked := self._prepare(prefill, seconds - launched):
                        self._account(prefill, launched + worked)
                        return None
                    next(prefill.steps)
                    prefill.done += 1
                    launched = prefill.watch.launched()
                    if launched + prefill.watch.piece >= seconds:
                        self._account(prefill, launched)
                        return None
        except StopIteration as end:
            self._account(prefill, prefill.watch.launched())
            self.pace.add(prefill.tokens, prefill.seconds)
            self.in_flight.remove(prefill)
            return prefill, *end.value

    def _prepare(self, prefill: PrefillInFlight, seconds: float) -> float:
        """Makes the graph of the first step after a prefill, after pieces that leave the slice ``CAPTURE_SECONDS``.

        Returns the seconds that those pieces take; 0 where that was not done: the graph may exist already, ``seconds``
        or the rest of the prefill be too short for it, or the time of a piece not be known yet.
        """
        if not prefill.watch.piece or not self.scheduler.running:
            return 0.0
        pieces = min(prefill.pieces - prefill.done - 1, int((seconds - CAPTURE_SECONDS) / prefill.watch.piece))
        if pieces <= 0:
            return 0.0
        joining = [(running.sequence, len(running.request.prompt_token_ids)) for running in prefill.rows]
        plan = self.runner.unprepared([running.sequence for running in self.scheduler.running], joining)
        if plan is None:
            return 0.0
        for _ in range(pieces):
            next(prefill.steps)
            prefill.done += 1
        self.runner.prepare(plan)
        return pieces * prefill.watch.piece

    def drop(self, prefill: PrefillInFlight) -> None:
        """Abandons a prefill and frees what its requests own."""
        prefill.steps.close()
        self.in_flight.remove(prefill)
        for running in prefill.rows:
            self.scheduler.finish(running, keep=False)

    def _account(self, prefill: PrefillInFlight, seconds: float) -> None:
        prefill.seconds += seconds
        first = self.in_flight[0]
        if prefill is first:
            first.owed = max(0.0, first.owed - seconds)
        else:
            first.owed += seconds * LONG_SHARE / (1 - LONG_SHARE)
