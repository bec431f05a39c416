"""Decode steps of all running sequences, launched one ahead of what the host knows where that keeps the GPU busy.

The next step needs the tokens that this one chooses, and they are on the device: it can be launched before the host has
seen them. A sequence that turns out to have ended has then computed one token too many, which is dropped. Tokens that
the host helps choose (penalties, grammars, log-probabilities) are waited for. Where it is not known yet what a grammar
allows, the sequence is held: the others go on, and its token is chosen from the same logits when that is known.

Short prompts join a step: its pass computes them, and it chooses their first tokens along with the others' next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.held_rows import Chosen, ChosenRows, HeldRows, Selected, joined
from shadowkv.engine.scheduling.pacing import Mark, Pace
from shadowkv.engine.scheduling.scheduler import Running, Scheduler
from shadowkv.engine.selections import SelectionRecord


class DecodeSteps:
    """Steps of a scheduler's running sequences, one ahead if ``run_ahead``: on a CPU there is nothing to overlap.

    Attributes:
        seconds: device time of the last step without prompts that ``next`` returned. Steps whose graph was captured do
            not count: the device waited for the host, and for the next one it will not.
        pace: is told what prompts add to the time of a step.
        held: rows that wait for their grammars.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, run_ahead: bool, pace: Pace) -> None:
        self.runner, self.scheduler, self.run_ahead, self.pace = runner, scheduler, run_ahead, pace
        self.seconds = 0.0
        self._ahead: _Step | None = None
        self._behind: _Step | None = None
        self.held = HeldRows(runner, scheduler)

    @property
    def idle(self) -> bool:
        """Whether there is no sequence that a step would compute: none runs, or all are held."""
        return all(running in self.held for running in self.scheduler.running)

    @property
    def open(self) -> bool:
        """Whether ``join`` may be called: a step can be launched before anything is waited for."""
        step = self._in_flight
        return step is None or self._precedes(step)

    def join(self, prompts: Sequence[Running]) -> bool:
        """Launches the next step together with prompts of new sequences, at most a block, which run from then on:
        ``next`` will return their first tokens as it does those of the others. Returns whether there is such a step:
        those that run now may all be about to end. If it raises, the sequences can only be released, and steps without
        them go on."""
        before = self._in_flight
        step = self._launch(before, prompts)
        if step is None:
            return False
        if before is None:
            self._ahead = step
        else:
            self._behind = step
        self.scheduler.computed(prompts)
        return True

    def next(self, wait: bool = True) -> ChosenRows:
        """The next token of every running sequence, and of some that have ended since; and what it attended to. Of
        held ones the tokens that can be chosen by now; ``wait`` for a moment where that is all there is."""
        step = self._in_flight or self._launch(None)
        if step is None:
            return self.held.release(wait)
        self._ahead, self._behind = self._behind, None
        if self._ahead is None and self._precedes(step):
            with suppress(torch.OutOfMemoryError):  # launched again when it is due; this step's tokens are not lost
                self._ahead = self._launch(step)
        before = self.held.release(wait=False)
        if step.on_device:
            chosen = step.rows, step.chosen(), step.selected()
        else:
            chosen = self.held.choose(step.rows, step.logits, step.selected())
            step.ended = Mark(step.logits.device)
        if not step.captured:
            seconds = step.ended.since(step.started)
            if step.prompt_tokens:
                beyond = max(0.0, seconds - self.seconds)
                self.pace.add(step.prompt_tokens, beyond)
                self.scheduler.prefix_cache.speeds.computed(step.prompt_tokens, beyond)
            else:
                self.seconds = seconds
        return joined(chosen, before)

    @property
    def _in_flight(self) -> _Step | None:
        """The step that ``next`` is to return, if it has been launched and anybody still waits for it."""
        step = self._ahead
        return step if step is not None and any(running in self.scheduler.running for running in step.rows) else None

    def _precedes(self, step: _Step) -> bool:
        """Whether another may be launched behind a step that has not been waited for."""
        return self.run_ahead and step.on_device

    def forget(self, running: Running) -> None:
        """Takes back the token that a sequence that is ending now has computed ahead."""
        if self._ahead is not None and running in self._ahead.rows:
            sequence = running.sequence
            self.runner.cache.truncate(sequence, sequence.length - 1)

    def _launch(self, before: _Step | None, prompts: Sequence[Running] = ()) -> _Step | None:
        """A step of the running sequences behind ``before``, with ``prompts``; None where nothing is left to decode."""
        rows, tokens, sources = [], [], []
        known = {} if before is None else {id(running): row for row, running in enumerate(before.rows)}
        for running in self.scheduler.running:
            request, source = running.request, known.get(id(running), -1)
            if source >= 0 and len(request.output_token_ids) + 1 >= request.max_tokens:
                continue  # the token in flight is its last
            if running in self.held:
                continue
            rows.append(running)
            tokens.append(0 if source >= 0 else request.output_token_ids[-1])  # of a new one none may be known yet
            sources.append(source)
        if not rows:
            return None
        started, captures = Mark(self.runner.cache.device), self.runner.captures
        asking = [row for row, running in enumerate(rows) if running.request.params.return_selections]
        record = None
        if asking:
            record = SelectionRecord(self.runner.cache, [rows[row].sequence for row in asking], asking)
        work = [(running.sequence, running.new_token_ids) for running in prompts]
        logits = self.runner.decode([running.sequence for running in rows], tokens, sources, record, work)
        captured = self.runner.captures > captures
        ahead = [source >= 0 for source in sources] + [False] * len(prompts)
        count = sum(len(ids) for _, ids in work)
        return _Step([*rows, *prompts], ahead, logits, self.runner, started, captured, asking, record, count)


class _Step:
    """A step in flight: a row for each sequence that decodes, then one for each prompt."""

    def __init__(
        self,
        rows: list[Running],
        ahead: list[bool],
        logits: Tensor,
        runner: Runner,
        started: Mark,
        captured: bool,
        asking: list[int],
        record: SelectionRecord | None,
        prompt_tokens: int,
    ) -> None:
        self.rows, self.started = rows, started
        self.captured, self._asking, self._record = captured, asking, record
        self.prompt_tokens = prompt_tokens
        requests = [running.request for running in rows]
        plain = not any(r.params.changes_logits or r.params.logprobs is not None for r in requests)
        self.on_device = plain
        # A graph that is captured before they are read would write over them.
        self.logits = logits if plain else logits.clone()
        if plain:
            steps = [len(r.output_token_ids) + 1 + on_its_way for r, on_its_way in zip(requests, ahead, strict=True)]
            chosen = runner.sampler.choose(logits, requests, steps)
            runner.chosen[: len(rows)] = chosen[0]
            self._landing = chosen
            if chosen.is_cuda:
                self._landing = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
                self._landing.copy_(chosen, non_blocking=True)
        self.ended = Mark(logits.device)

    def chosen(self) -> Chosen:
        """The tokens that the device has chosen; waits for them."""
        self.ended.wait()
        tokens, finite = self._landing.tolist()
        return tokens, [None] * len(tokens), [bool(row) for row in finite]

    def selected(self) -> Selected:
        """What the rows that request it attended to."""
        return {} if self._record is None else dict(zip(self._asking, self._record.read(), strict=True))
