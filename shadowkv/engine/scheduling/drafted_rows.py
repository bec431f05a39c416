"""``DraftedRows``: chooses the tokens of a step with drafts, in order. ``DecodeSteps`` uses it.

Each token is chosen as in steps without drafts: from its row's logits, and after all tokens before it. A drafted token
is accepted if it equals the chosen token. So answers are the same as without drafts.
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
        accepted: number of accepted drafted tokens so far.
        agrees: whether all tokens that were chosen so far equal the drafted ones.
    """

    running: Running
    draft: list[int]
    row: int
    accepted: int = 0
    agrees: bool = True

    def take(self, token: int) -> None:
        """Records the token that was chosen from the row of the last accepted token, or from the first row if none is
        accepted yet."""
        request, left = self.running.request, self.draft[self.accepted :]
        self.agrees = bool(left) and left[0] == token
        if self.agrees:
            self.accepted += 1
            request.accepted_drafts += 1
        else:
            request.rejected_drafts += len(left)


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
            self._rows.append(_Drafted(running, draft, row))
            row += 1 + len(draft)

    def next(self) -> ChosenRows | None:
        """Chooses the next token of each sequence whose chosen tokens so far equal the drafted ones. Returns None if
        there is no such sequence. The tokens of the previous call must have been added to the sequences' answers."""
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
        tokens = {id(running): token for running, token in zip(chosen[0], chosen[1][0], strict=True)}
        for one in going:
            if id(one.running) in tokens:
                one.take(tokens[id(one.running)])
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
