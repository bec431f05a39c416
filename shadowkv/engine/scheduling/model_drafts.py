"""``ModelDrafts``: drafts that the model or its draft head computes, for all requests of a step together. Its
subclasses ``SparseDrafts`` and ``HeadDrafts`` compute the draft steps."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.request import Request
from shadowkv.engine.scheduling.pacing import Mark
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.speculation.gate import MATCH_KINDS, OTHERS_TOKENS, OWN_TOKENS, AcceptanceRates, Account, StepTimes
from shadowkv.engine.speculation.speculation import Speculation, kind_of
from shadowkv.kvcache.sequences.sequence import CachedSequence

ALIKE = MATCH_KINDS[-1]
"""Match length under which the acceptance rates of these drafts are recorded, although such drafts follow no match.
Before anything is measured, their rate is that of the longest matches."""


class ModelDrafts(Speculation):
    """Drafts with weights of the model. All requests of a step draft together, because a draft step reads the weights
    once for all of them. ``account`` chooses one number of tokens for all requests, from the acceptance rate of each.

    Args:
        runner: computes the draft steps.
        share: assumed time of a draft step until it is measured, as a share of the time of a step without drafts.

    Attributes:
        account: chooses how many tokens to draft.
    """

    def __init__(self, config: SpeculativeConfig, max_rows: int, runner: Runner, share: float) -> None:
        super().__init__(config, max_rows)
        self._runner, self._share, self.account, self._tokens = runner, share, Account(), 0
        self._own: WeakKeyDictionary[Request, AcceptanceRates] = WeakKeyDictionary()
        self._draft_times: defaultdict[int, StepTimes] = defaultdict(StepTimes)

    @abstractmethod
    def _can_draft(self, requests: Sequence[Request], sequences: Sequence[CachedSequence]) -> list[bool]:
        """Returns, for each request, whether it can have a draft in the next step."""

    @abstractmethod
    def _logits(
        self, place: int, requests: Sequence[Request], sequences: Sequence[CachedSequence], sources: list[int]
    ) -> Tensor:
        """Computes a draft step. Returns float32 logits [B, V] of the drafted tokens of B requests at ``place``.

        Args:
            place: the tokens' place in their drafts, from 0.
            sources: for each request, the row of ``Runner.chosen`` that has the previous token; -1 at the first place.
        """

    @abstractmethod
    def _undo(self, requests: Sequence[Request], sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
        """Removes what draft steps have appended. ``lengths`` are those of the sequences before the draft."""

    def took(self, lengths: Sequence[int], rows: int, seconds: float) -> None:
        super().took(lengths, rows, seconds)
        self._tokens += len(lengths)

    def drafts(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], most: Sequence[int]
    ) -> list[list[int]]:
        counts = self._counts(requests, sequences, most)
        if not any(counts):
            return []
        self.account.spend()
        return self._draft(requests, sequences, counts)

    def expects(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence]
    ) -> Callable[[float], None] | None:
        drafted = any(self._counts(requests, sequences, [self._most] * len(requests)))
        return self.account.losing() if drafted else None

    def judge(self, request: Request, drafted: int, accepted: int) -> None:
        super().judge(request, drafted, accepted)
        self.account.gain(accepted)
        self._tokens += accepted
        for rates in (self._of(request), self._rates):
            rates.add(ALIKE, drafted, accepted)

    def _of(self, request: Request) -> AcceptanceRates:
        if (own := self._own.get(request)) is None:
            own = self._own[request] = AcceptanceRates(self._rates, OTHERS_TOKENS, OWN_TOKENS)
        return own

    def _counts(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], most: Sequence[int]
    ) -> list[int]:
        """Returns the number of tokens to draft for each request: one number for all, or the request's own maximum if
        that is smaller."""
        rows, can = len(requests), self._can_draft(requests, sequences)
        room = min(self._most, (self._max_rows - rows) // rows)
        most = [max(0, min(own, room)) if able else 0 for own, able in zip(most, can, strict=True)]
        if not any(most):
            return [0] * rows
        kind = kind_of([sequence.length for sequence in sequences])
        times, draft_times = self._times[kind], self._draft_times[kind]
        draft = self._share * times.seconds(rows, together=rows)
        if times.measured and draft_times.measured:
            draft = draft_times.seconds(rows)

        def seconds(count: int) -> float:
            return times.seconds(rows + sum(min(count, own) for own in most), together=rows) + count * draft

        drafts = [(self._of(request).rate(ALIKE), own) for request, own in zip(requests, most, strict=True)]
        count = self.account.length(drafts, seconds, rows, self._tokens)
        return [min(count, own) for own in most]

    def _draft(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], counts: Sequence[int]
    ) -> list[list[int]]:
        """Drafts as many tokens as ``counts`` says, without penalties and grammars.

        A drafted token is chosen with the random number of its place in the answer. So it is likely to equal the token
        that the verifying step chooses there, even if that token is sampled. The drafted tokens stay on the device
        until all draft steps are launched.
        """
        runner, longest = self._runner, max(counts)
        lengths = [sequence.length for sequence in sequences]
        began, before = Mark(runner.cache.device), (runner.captures, runner.eager_runs)
        chosen, sources = list[tuple[list[int], Tensor]](), [-1] * len(requests)
        try:
            for place in range(longest):
                rows = [row for row, count in enumerate(counts) if count > place]
                asked, own = [requests[row] for row in rows], [sequences[row] for row in rows]
                logits = self._logits(place, asked, own, [sources[row] for row in rows])
                steps = [len(request.output_token_ids) + 1 + place for request in asked]
                chosen.append((rows, runner.sampler.choose(logits, asked, steps)[0]))
                runner.chosen[: len(rows)] = chosen[-1][1]  # the next draft step reads them there
                for number, row in enumerate(rows):
                    sources[row] = number
        finally:
            self._undo(requests, sequences, lengths)
        ended, drafts = Mark(runner.cache.device), [list[int]() for _ in requests]
        for rows, of_place in chosen:
            for row, token in zip(rows, of_place.tolist(), strict=True):
                drafts[row].append(token)
        if before == (runner.captures, runner.eager_runs):  # else the device waited for the host
            kind = kind_of(lengths)
            self._draft_times[kind].add(len(requests), ended.since(began) / longest)
        return drafts
