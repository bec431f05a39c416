"""``DraftedRows``: chooses the tokens of a step with drafts, in order. ``DecodeSteps`` uses it.

Each token is chosen as in steps without drafts: from its row's logits, and after all tokens before it. A drafted token
is accepted if it equals the chosen token. So answers are the same as without drafts. With synthetic acceptance
(``SpeculativeConfig``), drafted tokens are accepted at random instead, and take the place of the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shadowkv.engine.scheduling.held_rows import ChosenRows, HeldRows
from shadowkv.engine.scheduling.scheduler import Running, Scheduler
from shadowkv.engine.speculation.speculation import Speculation

Choose = Callable[[list[Running], list[int]], ChosenRows]
"""Chooses a token for each running sequence, from the step's row with the given number. Rows that wait for their
grammars are left out."""


@dataclass(eq=False)
class _Drafted:
    """A sequence with a draft, which can be empty.

    Attributes:
        row: number of its first row in the step. The rows of its drafted tokens follow.
        synthetic: number of drafted tokens to accept, whatever is chosen; None if they must equal the chosen ones.
        accepted: number of accepted drafted tokens so far.
        agrees: whether no drafted token was rejected so far.
    """

    running: Running
    draft: list[int]
    row: int
    synthetic: int | None
    accepted: int = 0
    agrees: bool = True

    def take(self, token: int) -> int:
        """Records the token that was chosen from the row of the last accepted token, or from the first row if none is
        accepted yet. Returns the token of the answer: the drafted one if it is accepted, else the chosen one."""
        request, left = self.running.request, self.draft[self.accepted :]
        if self.synthetic is None:
            self.agrees = bool(left) and left[0] == token
        else:
            self.agrees = self.accepted < self.synthetic
        if not self.agrees:
            request.rejected_drafts += len(left)
            return token
        self.accepted += 1
        request.accepted_drafts += 1
        return left[0]


class DraftedRows:
    """The rows of one step.

    Args:
        drafts: the drafted tokens of each of ``rows``.
        choose: chooses tokens from the step's logits.
    """

    def __init__(
        self,
        rows: Sequence[Running],
        drafts: Sequence[list[int]],
        choose: Choose,
        scheduler: Scheduler,
        held: HeldRows,
        speculation: Speculation,
    ) -> None:
        self._choose, self._scheduler, self._held, self._speculation = choose, scheduler, held, speculation
        self._rows, row = list[_Drafted](), 0
        for running, draft in zip(rows, drafts, strict=True):
            self._rows.append(_Drafted(running, draft, row, speculation.accepted(running.request, draft)))
            row += 1 + len(draft)

    def next(self) -> ChosenRows | None:
        """Chooses the next token of each sequence whose drafted tokens are all accepted so far. Returns None if there
        is no such sequence. The tokens of the previous call must have been added to the sequences' answers."""
        going, alive = [], {id(running) for running in self._scheduler.running}
        for one in self._rows:
            if one.agrees and id(one.running) in alive:
                going.append(one)
            else:
                self._end(one, id(one.running) in alive)
        self._rows = going
        if not going:
            return None
        chosen = self._choose([one.running for one in going], [one.row + one.accepted for one in going])
        places, tokens = {id(running): place for place, running in enumerate(chosen[0])}, chosen[1][0]
        for one in going:
            if (place := places.get(id(one.running))) is not None:
                tokens[place] = one.take(tokens[place])
            else:
                one.agrees = False  # held: its next token is chosen later, and its other rows are dropped
        return chosen

    def _end(self, one: _Drafted, is_alive: bool) -> None:
        if is_alive:
            cut_to_answer(one.running, self._held, self._scheduler)
        if one.draft:
            self._speculation.judge(one.running.request, len(one.draft), one.accepted)


def cut_to_answer(running: Running, held: HeldRows, scheduler: Scheduler) -> None:
    """Removes from a sequence the tokens that its answer does not have.

    Between two steps a sequence has all tokens of its answer but the newest, which the next step appends. The sequence
    of a held row has the newest token too, because the token after it is not chosen yet.
    """
    request = running.request
    tokens = len(request.output_token_ids) - (running not in held)
    length = len(request.prompt_token_ids) + max(tokens, 0)
    if running.sequence.length > length:
        scheduler.cache.truncate(running.sequence, length)
