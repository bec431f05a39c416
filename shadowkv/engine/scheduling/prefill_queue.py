"""Prefills in progress, which ``Engine.step`` starts and continues. A short prefill can overtake a long one.

While sequences decode, a decode step computes short prompts in the same pass (``PrefillQueue.joining``). All other
prefills run alone, layer by layer, and pause for decode steps.
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
"""Seconds of a round of prefill that are kept free for the host to capture a CUDA graph. The next token waits for the
capture and for the rest of the round."""

LONG_SHARE = 0.25
"""Minimum share of prefill time for a long prompt while short ones overtake it. The share delays short prompts of a
burst. Measured on an H200 with a share of one half: ten short prompts that came within 0.4 s had their first tokens
after 0.34 to 0.40 s. If short prompts had got all of the prefill time, they would have had their first tokens after
0.25 s."""


MAX_OWED = 0.5
"""Maximum time in seconds that newcomers can owe to a prefill that they overtake. Without a limit, a client whose
requests end at once would be a newcomer each time, and could overtake that prefill again and again."""

MAX_IN_FLIGHT = 3
"""Maximum number of prefills in flight: a long prompt, a pack of short prompts that has overtaken it, and newcomers'
prompts that have overtaken the pack. It is limited because each prefill's activations take memory."""


@dataclass(eq=False)
class PrefillInFlight:
    """A prefill: requests whose prompts are computed together.

    Attributes:
        steps: the computation. It can be paused or closed between two pieces.
        watch: measures the device time of a round.
        long: whether it is one prompt of more than a block, which shorter prompts can overtake.
        scored: whether a request asks for ``prompt_logprobs``.
        tokens: number of tokens to compute.
        pieces: number of pieces of the computation.
        done: number of finished pieces.
        owed: seconds of device time that this prefill must get before others may overtake it again. Prefills that
            overtake it increase this time.
        seconds: device seconds spent on this prefill so far.
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
        """The prefill's prompts, each with its tokens left to compute."""
        return [Leader(running.request.prompt, left) for running, left in zip(self.rows, self.tokens_left, strict=True)]

    @property
    def tokens_left(self) -> list[int]:
        """Number of tokens left to compute of each prompt. When half of the pieces are done, half of the tokens count
        as computed."""
        left = 1 - self.done / max(self.pieces, self.done)
        requests = [running.request for running in self.rows]
        return [math.ceil(left * (len(request.prompt_token_ids) - request.cached_tokens)) for request in requests]


class PrefillQueue:
    """Starts the scheduler's prefills and continues them.

    A short prefill can start while a long one is paused, and then ends first. The next short prefill starts when the
    long one has had ``LONG_SHARE`` of the device time since the last short one started. A newcomer's prefill need not
    wait for this, and it can also overtake a pack of other tenants' short prompts. Newcomers have both advantages only
    while the oldest prefill is owed at most ``MAX_OWED`` seconds.

    Attributes:
        in_flight: the prefills in progress. The last one runs; the others are paused.
        pace: measured prefill speed of this device.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, pace: Pace) -> None:
        self.runner, self.scheduler, self.pace = runner, scheduler, pace
        self.in_flight: list[PrefillInFlight] = []

    @property
    def _leaders(self) -> list[Leader]:
        return [leader for prefill in self.in_flight for leader in prefill.leaders]

    @property
    def num_requests(self) -> int:
        """Number of requests in all prefills. Any thread can read it."""
        return sum(len(prefill.rows) for prefill in self.in_flight)

    def of(self, request_id: str) -> PrefillInFlight | None:
        """Returns the prefill that computes a request, or None if none does."""
        for prefill in self.in_flight:
            if any(running.request.request_id == request_id for running in prefill.rows):
                return prefill
        return None

    def start(self, most_tokens: float = math.inf) -> None:
        """Starts another prefill if the rules of this class and the scheduler allow it. A prefill of several prompts
        has at most ``most_tokens`` new tokens."""
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
        pieces = self.runner.prefill_pieces(tokens, scored)
        steps = self.runner.prefill(work, scored)
        self.in_flight.append(PrefillInFlight(rows, steps, watch, long, scored, tokens, pieces))

    @property
    def _newcomers_may_start(self) -> bool:
        more = len(self.in_flight) < MAX_IN_FLIGHT and self.in_flight[0].owed <= MAX_OWED
        return more and self.scheduler.waiting.has_newcomers

    def joining(self, seconds: float) -> PrefillInFlight | None:
        """Returns the current prefill if it can be part of the next decode step and adds at most ``seconds`` to it;
        else None.

        A step is one pass without a pause. So a prefill is computed alone if it has begun, is scored, or waits for
        pages from other tiers. It is also computed alone if it attends to more than a block of tokens, unless its new
        tokens fit into a block and the step can be a CUDA graph.
        """
        prefill, scheduler = self.in_flight[-1] if self.in_flight else None, self.scheduler
        if prefill is None or prefill.done or prefill.scored or self.pace.seconds(prefill.tokens) > seconds:
            return None
        if any(running.sequence.pending_layers is not None for running in prefill.rows):
            return None
        if prefill.tokens + len(scheduler.running) > scheduler.max_num_batched_tokens:
            return None
        whole = sum(len(running.request.prompt_token_ids) for running in prefill.rows)
        if not scheduler.is_long(whole):
            return prefill
        prompts = [(running.sequence, len(running.new_token_ids)) for running in prefill.rows]
        return prefill if not scheduler.is_long(prefill.tokens) and self.runner.can_capture(prompts) else None

    def joined(self, prefill: PrefillInFlight) -> None:
        """Removes a prefill that a decode step computes."""
        self._account(prefill, self.pace.seconds(prefill.tokens))
        self.in_flight.remove(prefill)

    def advance(self, seconds: float) -> tuple[PrefillInFlight, Tensor, list[Tensor]] | None:
        """Continues the last prefill until the next piece would make the round exceed ``seconds`` of device time.
        Instead of computing the round's last pieces, it can capture the CUDA graph of the step that the prefill's
        requests will join.

        If the prefill has ended, returns it with its logits [n, V] and hidden states; else returns None. If this method
        raises, the prefill stays in ``in_flight`` until it is dropped.
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
        """Captures the CUDA graph of the first decode step after a prefill. Before that, computes the pieces of the
        prefill that fit into the round without its last ``CAPTURE_SECONDS``.

        Returns the seconds that these pieces take. Returns 0 if it did nothing: no graph is missing, ``seconds`` or the
        rest of the prefill is too short, or no piece has been measured yet.
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
        """Abandons a prefill and frees its requests' sequences."""
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
