"""Decode steps of all running sequences. ``Engine.step`` calls ``next`` and ``join``.

On a GPU the next step is launched before the host has seen this step's tokens: the next step reads them on the device.
A sequence that turns out to have ended has then computed one token too many, which is dropped. If the host takes part
in choosing tokens (penalties, grammars, log-probabilities), the next step is launched only when the tokens are chosen.
A sequence whose grammar mask is not ready is held: the other sequences go on, and the held sequence's token is chosen
later, from the same logits.

Short prompts can join a step. The same pass computes them, and the step chooses their first tokens.

With speculative decoding a step can have several rows of a sequence: one for its newest token, and one for each drafted
token. A draft follows tokens that the host has seen. So no step is launched ahead if it is likely to have a draft, or
if the step before it has drafts.

With a quality meter, some steps are preceded by a narrow step of the same tokens (``QualityMeter``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.scheduling.drafted_rows import DraftedRows, cut_to_answer
from shadowkv.engine.scheduling.held_rows import Chosen, ChosenRows, HeldRows, Selected, joined
from shadowkv.engine.scheduling.pacing import Mark, Pace
from shadowkv.engine.scheduling.quality_meter import Checked, QualityMeter
from shadowkv.engine.scheduling.scheduler import Running, Scheduler
from shadowkv.engine.scheduling.sparse_drafts import cut_back
from shadowkv.engine.selections import SelectionRecord
from shadowkv.engine.speculation.speculation import Speculation

MOST_IDLE = 0.01
"""A longer gap between two steps, in seconds, is no wait for the host but the time of a prompt, if it is also longer
than the step after it."""


class DecodeSteps:
    """Launches steps of the scheduler's running sequences and returns their tokens.

    Args:
        run_ahead: whether to launch a step before the previous step's tokens are read. On a CPU this has no benefit.
        pace: records the time that prompts add to a step.
        speculation: drafts tokens; None without speculative decoding.
        meter: checks some steps; None without ``quality_meter``.

    Attributes:
        seconds: device time of the last step that had no prompts, without its draft steps. Steps that captured a CUDA
            graph do not count: the device waited for the host.
        held: rows that wait for their grammars.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        run_ahead: bool,
        pace: Pace,
        speculation: Speculation | None = None,
        meter: QualityMeter | None = None,
    ) -> None:
        self.runner, self.scheduler, self.run_ahead, self.pace = runner, scheduler, run_ahead, pace
        self.speculation, self.meter = speculation, meter
        self.seconds = 0.0
        self._ahead: _Step | None = None
        self._behind: _Step | None = None
        self._drafted: DraftedRows | None = None
        self._last: Mark | None = None
        self._cost: tuple[list[int], int, float] | None = None  # of the last step, if it had drafts of the host
        self._awaited: Callable[[float], None] | None = None  # of ``Speculation.expects``, if the next step waits
        self.held = HeldRows(runner, scheduler)

    @property
    def idle(self) -> bool:
        """Whether a step would compute no sequence: none runs, or all are held."""
        return all(running in self.held for running in self.scheduler.running)

    @property
    def open(self) -> bool:
        """Whether ``join`` can be called: a step can be launched without waiting for the one in flight."""
        step = self._in_flight
        return step is None or self._precedes(step)

    def join(self, prompts: Sequence[Running]) -> bool:
        """Launches the next step together with ``prompts``, which have at most a block of new tokens.

        Their sequences run from then on, and ``next`` returns their first tokens with the other tokens. Returns False
        if no running sequence has another token to decode. If it raises, the prompts' sequences can only be released;
        steps without them go on.
        """
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
        """Returns the next token of every running sequence, and its selections if requested. Some rows can belong to
        sequences that have ended in the meantime.

        Held rows are included when their grammars are ready. ``wait`` says whether to wait for a moment if all rows are
        held. The caller must add the tokens to the sequences' answers, and then call ``following`` until it returns
        None.
        """
        step = self._in_flight or self._launch(None)
        if step is None:
            return self.held.release(wait)
        self._ahead, self._behind = self._behind, None
        if self._ahead is None and self._precedes(step):
            with suppress(torch.OutOfMemoryError):  # the next call launches it again; this step's tokens are kept
                self._ahead = self._launch(step)
        before = self.held.release(wait=False)
        if step.drafts:
            assert self.speculation is not None, "nothing else drafts"
            place = self.scheduler, self.held, self.speculation
            self._drafted = DraftedRows(step.rows, step.drafts, partial(self._choose, step), *place)
            chosen = self._drafted.next() or ([], ([], [], []), {})
        elif step.on_device:
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
                if self.speculation is not None and not step.eager:
                    self._took(self.speculation, step)
        self._last = step.ended
        if step.checked is not None and self.meter is not None:
            step.computed.wait()
            running = [step.rows[row] for row in step.checked.rows]
            alive = [one if one in self.scheduler.running else None for one in running]
            self.meter.take(alive, step.checked.kl.tolist())
        return joined(chosen, before)

    def _took(self, speculation: Speculation, step: _Step) -> None:
        """Records the time of a step. Drafts of the host also cost the time for which the device waits before and after
        a step with drafts: without them, that step and the next one would have been launched ahead. If the device has
        waited and nothing was drafted, the wait is a loss."""
        computed, idle, last = step.computed.since(step.started), 0.0, self._last
        if last is not None and self.run_ahead and step.on_device and speculation.drafts_on_host:
            idle = step.started.since(last)
            idle = idle if idle < max(computed, MOST_IDLE) else 0.0
        if self._cost is not None:
            lengths, rows, seconds = self._cost
            speculation.took(lengths, rows, seconds + idle)
            self._cost, idle = None, 0.0
        if step.drafts and speculation.drafts_on_host:
            self._cost = step.lengths, len(step.logits), computed + idle
        else:
            speculation.took(step.lengths, len(step.logits), computed)
            if step.awaited is not None:
                step.awaited(len(step.rows) * idle / computed)

    def prompted(self, prompts: Sequence[Running]) -> None:
        """Must be called when a prefill of ``prompts`` has ended, before another pass."""
        if self.speculation is not None and prompts:
            self.speculation.prompted([running.request for running in prompts])

    def following(self) -> ChosenRows | None:
        """Returns the next tokens of the sequences whose drafts were right so far. Returns None if there is no such
        sequence; wrong drafted tokens have then been removed from all sequences."""
        chosen = None if self._drafted is None else self._drafted.next()
        if chosen is None:
            self._drafted = None
        return chosen

    def _choose(self, step: _Step, running: list[Running], rows: list[int]) -> ChosenRows:
        """Chooses tokens of sequences from the rows of a step with drafts."""
        if not step.on_device:
            return self.held.choose(running, step.logits[rows], {})
        tokens, _, finite = step.chosen()
        return running, ([tokens[row] for row in rows], [None] * len(rows), [finite[row] for row in rows]), {}

    @property
    def _in_flight(self) -> _Step | None:
        """The launched step whose tokens ``next`` returns; None without one, or if all its sequences have ended."""
        step = self._ahead
        return step if step is not None and any(running in self.scheduler.running for running in step.rows) else None

    def _precedes(self, step: _Step) -> bool:
        """Whether another step can be launched after ``step`` before the tokens of ``step`` are read."""
        if not (self.run_ahead and step.on_device) or step.drafts:
            return False
        if self.speculation is None:
            return True
        of_step = [running.request for running in step.rows], [running.sequence for running in step.rows]
        self._awaited = self.speculation.expects(*of_step)
        return self._awaited is None

    def forget(self, running: Running) -> None:
        """Removes from an ending sequence the tokens that a step ahead or a draft has appended."""
        cut_to_answer(running, self.held, self.scheduler)

    def _launch(self, before: _Step | None, prompts: Sequence[Running] = ()) -> _Step | None:
        """Launches a step of the running sequences and ``prompts`` after the step ``before``. Returns None if no
        sequence is left to decode."""
        rows, tokens, sources = [], [], []
        known = {} if before is None else {id(running): row for row, running in enumerate(before.rows)}
        for running in self.scheduler.running:
            request, source = running.request, known.get(id(running), -1)
            if source >= 0 and len(request.output_token_ids) + 1 >= request.max_tokens:
                continue  # the token in flight is its last
            if running in self.held:
                continue
            rows.append(running)
            # A sequence of the step before reads its token on the device, so the host's value does not matter.
            tokens.append(0 if source >= 0 else request.output_token_ids[-1])
            sources.append(source)
        if not rows:
            return None
        asking = [row for row, running in enumerate(rows) if running.request.params.return_selections]
        record = None
        if asking:
            record = SelectionRecord(self.runner.cache, [rows[row].sequence for row in asking], asking)
        work = [(running.sequence, running.new_token_ids) for running in prompts]
        drafts = [] if before is not None or prompts or record is not None else self._drafts(rows)
        narrow = None if self.meter is None else self.meter.narrow(rows, tokens, sources)
        started = Mark(self.runner.cache.device)
        captures, eager_runs = self.runner.captures, self.runner.eager_runs
        sequences = [running.sequence for running in rows]
        lengths = [sequence.length for sequence in sequences]
        decode = partial(self.runner.decode, sequences, tokens, sources, record, work)
        try:
            logits = decode(drafts)
        except torch.OutOfMemoryError:
            if not drafts or self.runner.model.group.size > 1:  # other ranks may have run the step
                raise
            drafts = []  # a step without drafts has fewer rows
            logits = decode(drafts)
        counts = [1 + len(draft) for draft in drafts] or [1] * len(rows)
        if self.speculation is not None:
            newest = [len(one.request.output_token_ids) - (at < 0) for one, at in zip(rows, sources, strict=True)]
            self.speculation.computed([running.request for running in rows], newest, counts)
            self.prompted(prompts)
        checked = None if narrow is None else narrow.compared(logits, [0, *accumulate(counts)])
        captured, eager = self.runner.captures > captures, self.runner.eager_runs > eager_runs
        ahead = [source >= 0 for source in sources] + [False] * len(prompts)
        count = sum(len(ids) for _, ids in work)
        awaited, self._awaited = (None if before is not None else self._awaited), None
        about = captured, eager, asking, record, count, drafts, awaited, checked
        try:
            return _Step([*rows, *prompts], ahead, logits, self.runner, started, *about)
        except torch.OutOfMemoryError:  # in the choice of tokens: the step did not happen
            cut_back(self.runner.cache, sequences, lengths)
            raise

    def _drafts(self, rows: Sequence[Running]) -> list[list[int]]:
        """Returns a draft for each row. Returns an empty list if nothing is drafted, or if draft steps ran out of
        memory."""
        if self.speculation is None:
            return []
        sequences = [running.sequence for running in rows]
        most = [tokens - 1 for tokens in self.runner.cache.most_tokens(sequences)]
        try:
            return self.speculation.drafts([running.request for running in rows], sequences, most)
        except torch.OutOfMemoryError:
            if self.runner.model.group.size > 1:
                raise
            return []


class _Step:
    """A step in flight: a row for each decoding sequence, then a row for each prompt. With drafts it has no prompts,
    and each sequence's row is followed by the rows of its drafted tokens."""

    def __init__(
        self,
        rows: list[Running],
        ahead: list[bool],
        logits: Tensor,
        runner: Runner,
        started: Mark,
        captured: bool,
        eager: bool,
        asking: list[int],
        record: SelectionRecord | None,
        prompt_tokens: int,
        drafts: list[list[int]],
        awaited: Callable[[float], None] | None,
        checked: Checked | None,
    ) -> None:
        self.rows, self.drafts, self.checked, self.started = rows, drafts, checked, started
        self.captured, self.eager, self._asking, self._record = captured, eager, asking, record
        self.awaited = awaited
        self.prompt_tokens = prompt_tokens
        requests = [running.request for running in rows]
        plain = not any(r.params.changes_logits or r.params.logprobs is not None for r in requests)
        self.on_device = plain
        # A later graph would overwrite the logits before they are read. A step with drafts needs no copy: the next step
        # is launched only after its tokens are read.
        self.logits = logits if plain or drafts else logits.clone()
        if plain:
            steps = [len(r.output_token_ids) + 1 + on_its_way for r, on_its_way in zip(requests, ahead, strict=True)]
            if drafts:
                places = [(row, place) for row, draft in enumerate(drafts) for place in range(1 + len(draft))]
                requests, steps = [requests[row] for row, _ in places], [steps[row] + place for row, place in places]
            chosen = runner.sampler.choose(logits, requests, steps)
            if not drafts:
                runner.chosen[: len(rows)] = chosen[0]
            self._landing = chosen
            if chosen.is_cuda:
                self._landing = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
                self._landing.copy_(chosen, non_blocking=True)
        # ``computed`` marks the point at which the logits are computed. If the host chooses the tokens, ``next`` moves
        # ``ended`` to the point at which they are chosen.
        self.computed = self.ended = Mark(logits.device)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence."""
        return [running.sequence.length for running in self.rows]

    def chosen(self) -> Chosen:
        """The tokens that the device has chosen. Waits for the device."""
        self.ended.wait()
        tokens, finite = self._landing.tolist()
        return tokens, [None] * len(tokens), [bool(row) for row in finite]

    def selected(self) -> Selected:
        """The selections of the rows that request them."""
        return {} if self._record is None else dict(zip(self._asking, self._record.read(), strict=True))
