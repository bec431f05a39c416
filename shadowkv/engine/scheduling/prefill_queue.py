"""Prefills in progress: one, or a short one that has overtaken a long one, which is paused."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.pacing import Stopwatch
from shadowkv.engine.scheduling.scheduler import Leader, Running, Scheduler

CAPTURE_SECONDS = 0.05
"""Time in a slice of prefill that is left to the host to make a graph: a token waits for that, and for the launches of
the rest of the slice."""


@dataclass(eq=False)
class PrefillAtWork:
    """Requests whose prompts are computed together.

    Attributes:
        steps: of the computation, which can be paused or abandoned between any two.
        watch: how long the device has worked on them.
        long: whether it is a prompt of more than a block, which shorter ones may overtake.
        pieces: of the computation, ``done`` of which are finished.
        owed: seconds that those overtaking it had, and that it has not had since.
    """

    rows: list[Running]
    steps: Generator[None, None, tuple[Tensor, list[Tensor]]]
    watch: Stopwatch
    long: bool
    pieces: int
    owed: float = 0.0
    done: int = 0

    @property
    def leaders(self) -> list[Leader]:
        """Its prompts, with the tokens left to compute."""
        requests = [running.request for running in self.rows]
        left = 1 - self.done / max(self.pieces, self.done)
        return [
            Leader(request.prompt, int(left * (len(request.prompt_token_ids) - request.cached_tokens)))
            for request in requests
        ]


class PrefillQueue:
    """Starts a scheduler's prefills and continues them.

    A short one starts where the current long one is paused, and is finished first. Another does so only when the long
    one has since had the same amount of device time: it gets at least half.

    Attributes:
        at_work: the last one is running; those before it are long and paused.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.at_work: list[PrefillAtWork] = []

    @property
    def num_requests(self) -> int:
        """Number of requests in all of them; may be called from any thread."""
        return sum(len(prefill.rows) for prefill in self.at_work)

    def of(self, request_id: str) -> PrefillAtWork | None:
        """The prefill that computes a request."""
        for prefill in self.at_work:
            if any(running.request.request_id == request_id for running in prefill.rows):
                return prefill
        return None

    def start(self) -> None:
        """Starts another one if there are requests whose turn it is."""
        if not self.at_work:
            rows = self.scheduler.admit()
        elif self.at_work[-1].long and self.at_work[-1].owed <= 0:
            rows = self.scheduler.admit([leader for prefill in self.at_work for leader in prefill.leaders])
        else:
            return
        if not rows:
            return
        for running in rows:
            running.request.times.scheduled = time.monotonic()
        work = [
            (running.sequence, running.request.prompt_token_ids[running.request.cached_tokens :]) for running in rows
        ]
        watch, long = Stopwatch(self.runner.cache.device), self.scheduler.is_long(len(work[0][1]))
        scored = any(running.request.params.prompt_logprobs is not None for running in rows)
        pieces = self.runner.prefill_pieces(sum(len(tokens) for _, tokens in work), scored)
        self.at_work.append(PrefillAtWork(rows, self.runner.prefill(work, scored), watch, long, pieces))

    def advance(self, seconds: float) -> tuple[PrefillAtWork, Tensor, list[Tensor]] | None:
        """Continues the last one until another piece would take the device's work beyond ``seconds``, or makes the
        graph of the batch that its requests will join.

        Returns it, with its results, if it has ended. If it raises, the prefill is still there, to be dropped.
        """
        prefill = self.at_work[-1]
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
            self.at_work.remove(prefill)
            return prefill, *end.value

    def _prepare(self, prefill: PrefillAtWork, seconds: float) -> float:
        """Makes the graph of the first step after a prefill, after pieces that leave the slice ``CAPTURE_SECONDS``.

        Returns the seconds that those pieces take; 0 where that was not done: the graph may exist already, ``seconds``
        or the rest of the prefill be too short for it, or the time of a piece not be known yet.
        """
        if not prefill.watch.piece:
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

    def drop(self, prefill: PrefillAtWork) -> None:
        """Abandons a prefill and frees what its requests own."""
        prefill.steps.close()
        self.at_work.remove(prefill)
        for running in prefill.rows:
            self.scheduler.finish(running, keep=False)

    def _account(self, prefill: PrefillAtWork, seconds: float) -> None:
        first = self.at_work[0]
        first.owed = max(0.0, first.owed - seconds) if prefill is first else first.owed + seconds
