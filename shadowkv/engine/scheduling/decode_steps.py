"""Decode steps of all running sequences, launched one ahead of what the host knows where that keeps the GPU busy.

The next step needs the tokens that this one chooses, and they are on the device: it can be launched before the host has
seen them. A sequence that turns out to have ended has then computed one token too many, which is dropped. Tokens that
the host helps choose (penalties, grammars, log-probabilities) are waited for.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenLogprobs, TokenSelections
from shadowkv.engine.scheduling.pacing import Mark
from shadowkv.engine.scheduling.scheduler import Running, Scheduler
from shadowkv.engine.selections import SelectionRecord

Chosen = tuple[list[int], list[TokenLogprobs | None], list[bool]]
"""Tokens, their log-probabilities where requested, and whether each row's logits were finite."""

Selected = dict[int, TokenSelections | None]
"""By row, where requested."""


class DecodeSteps:
    """Steps of a scheduler's running sequences, one ahead if ``run_ahead``: on a CPU there is nothing to overlap.

    Attributes:
        seconds: device time of the step that ``next`` returned last. Steps whose graph was captured do not count: the
            device waited for the host, and for the next one it will not.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, run_ahead: bool) -> None:
        self.runner, self.scheduler, self.run_ahead = runner, scheduler, run_ahead
        self.seconds = 0.0
        self._ahead: _Step | None = None

    def next(self) -> tuple[list[Running], Chosen, Selected]:
        """The next token of every running sequence, and of some that have ended since; and what it attended to."""
        step = self._ahead
        if step is None or not any(running in self.scheduler.running for running in step.rows):
            step = self._launch(None)
        assert step is not None, "nothing runs"
        self._ahead = None
        if self.run_ahead and step.on_device:
            with suppress(torch.OutOfMemoryError):  # launched again when it is due; this step's tokens are not lost
                self._ahead = self._launch(step)
        chosen = step.chosen()
        if not step.captured:
            self.seconds = step.ended.since(step.started)
        return step.rows, chosen, step.selected()

    def forget(self, running: Running) -> None:
        """Takes back the token that a sequence that is ending now has computed ahead."""
        if self._ahead is not None and running in self._ahead.rows:
            sequence = running.sequence
            self.runner.cache.truncate(sequence, sequence.length - 1)

    def _launch(self, before: _Step | None) -> _Step | None:
        rows, tokens, sources = [], [], []
        known = {} if before is None else {id(running): row for row, running in enumerate(before.rows)}
        for running in self.scheduler.running:
            request, source = running.request, known.get(id(running), -1)
            if source >= 0 and len(request.output_token_ids) + 1 >= request.max_tokens:
                continue  # the token in flight is its last
            rows.append(running)
            tokens.append(request.output_token_ids[-1])
            sources.append(source)
        if not rows:
            return None
        started, captures = Mark(self.runner.cache.device), self.runner.captures
        asking = [row for row, running in enumerate(rows) if running.request.params.return_selections]
        record = SelectionRecord(self.runner.cache, [rows[row].sequence for row in asking]) if asking else None
        logits = self.runner.decode([running.sequence for running in rows], tokens, sources, record)
        captured = self.runner.captures > captures
        ahead = [source >= 0 for source in sources]
        return _Step(rows, ahead, logits, self.runner, started, captured, asking, record)


class _Step:
    """A step in flight."""

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
    ) -> None:
        self.rows, self.logits, self.started, self._sampler = rows, logits, started, runner.sampler
        self.captured, self._asking, self._record = captured, asking, record
        requests = [running.request for running in rows]
        plain = not any(r.params.changes_logits or r.params.logprobs is not None for r in requests)
        self.on_device = plain
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
        """Waits for the step."""
        if not self.on_device:
            chosen = self._sampler.sample(self.logits, [running.request for running in self.rows])
            self.ended = Mark(self.logits.device)
            return chosen
        self.ended.wait()
        tokens, finite = self._landing.tolist()
        return tokens, [None] * len(tokens), [bool(row) for row in finite]

    def selected(self) -> Selected:
        """What the rows that request it attended to."""
        return {} if self._record is None else dict(zip(self._asking, self._record.read(), strict=True))
