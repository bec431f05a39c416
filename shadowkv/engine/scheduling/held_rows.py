"""Held rows: rows of a step whose logits are ready before their grammar masks. ``DecodeSteps`` holds them while other
rows go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, cat

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenLogprobs, TokenSelections
from shadowkv.engine.scheduling.scheduler import Running, Scheduler

Chosen = tuple[list[int], list[TokenLogprobs | None], list[bool]]
"""Tokens, their log-probabilities where requested, and whether each row's logits were finite."""

Selected = dict[int, TokenSelections | None]
"""Selections by row, for rows that request them."""

ChosenRows = tuple[list[Running], Chosen, Selected]

RULES_SECONDS = 0.005
"""Seconds that a step waits for grammar masks after its logits are ready. A mask usually takes less than 0.2 ms; masks
of one grammar are made one after another. If a row's mask was late, the next step does not wait for that row."""

IDLE_SECONDS = 0.01
"""Seconds to wait while all rows are held. It is short because requests can arrive."""


@dataclass(eq=False)
class _Held:
    """A held row, its logits [1, V], and its selections if requested."""

    running: Running
    logits: Tensor
    selections: TokenSelections | None


class HeldRows:
    """Samples the tokens of steps whose tokens the host helps to choose. Rows whose grammars are ready get their
    tokens; the others are held."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._held: list[_Held] = []

    def __contains__(self, running: Running) -> bool:
        return any(held.running is running for held in self._held)

    def choose(self, rows: Sequence[Running], logits: Tensor, selected: Selected) -> ChosenRows:
        """Chooses the next tokens of the rows whose grammars are ready. It can change ``logits`` [B, V] in place."""
        end, ready = time.monotonic() + RULES_SECONDS, []
        for row, running in enumerate(rows):
            seconds = 0.0 if running.rules_were_late else max(0.0, end - time.monotonic())
            running.rules_were_late = not _rules_are_ready(running, seconds)
            if running.rules_were_late:
                self._held.append(_Held(running, logits[row : row + 1].clone(), selected.get(row)))
            else:
                ready.append(row)
        kept = [rows[row] for row in ready]
        if len(kept) < len(rows):
            logits = logits[ready]
        chosen = self._runner.sampler.sample(logits, [running.request for running in kept]) if kept else ([], [], [])
        return kept, chosen, {number: selected[row] for number, row in enumerate(ready) if row in selected}

    def release(self, wait: bool) -> ChosenRows:
        """Chooses the next tokens of the held rows that have become ready. With ``wait`` it first waits for a
        moment."""
        running = self._scheduler.running
        self._held = [held for held in self._held if held.running in running]  # the others were aborted
        if wait and self._held:
            _rules_are_ready(self._held[0].running, IDLE_SECONDS)
        ready = [held for held in self._held if _rules_are_ready(held.running, 0.0)]
        if not ready:
            return [], ([], [], []), {}
        self._held = [held for held in self._held if held not in ready]
        logits = ready[0].logits if len(ready) == 1 else cat([held.logits for held in ready])
        rows = [held.running for held in ready]
        selected = {row: held.selections for row, held in enumerate(ready)}
        return rows, self._runner.sampler.sample(logits, [row.request for row in rows]), selected


def joined(first: ChosenRows, second: ChosenRows) -> ChosenRows:
    """Joins two sets of rows: the rows of ``first``, then those of ``second``."""
    (rows, (tokens, logprobs, finite), selected), (more, others, others_selected) = first, second
    chosen = tokens + others[0], logprobs + others[1], finite + others[2]
    return [*rows, *more], chosen, selected | {len(rows) + row: of_it for row, of_it in others_selected.items()}


def _rules_are_ready(running: Running, seconds: float) -> bool:
    constraint = running.request.constraint
    return constraint is None or constraint.is_ready(seconds)
