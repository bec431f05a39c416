"""``SparseDrafts``: the model drafts its own next tokens, in steps that attend to few tokens (sparse self-speculation:
MagicDec, arXiv:2408.11049). ``DecodeSteps`` uses it.

A draft step is a decode step in which the policy's index selects (``KVSpec.drafts``). Its keys and values are written
where those of the next tokens belong. They are removed when all tokens are drafted, and the step that verifies the
draft, with attention to every token, writes them again. So draft steps need no memory of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.request import Request
from shadowkv.engine.scheduling.pacing import Mark
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.speculation.gate import MATCH_KINDS, OTHERS_TOKENS, OWN_TOKENS, AcceptanceRates, Account, StepTimes
from shadowkv.engine.speculation.speculation import Speculation, kind_of
from shadowkv.kvcache.sequences.sequence import CachedSequence

ALIKE = MATCH_KINDS[-1]
"""Rates of the drafts are those of the longest matches before anything is measured."""

DRAFT_SHARE = 0.5
"""Time of a draft step as a share of a plain step's, where it has not been measured yet."""


class SparseDrafts(Speculation):
    """Drafts with the model itself. All requests of a step draft together, since a draft step reads the weights once.

    The gate weighs all of them up: one number of tokens for all, by the acceptance rate of each request.

    Args:
        runner: computes the draft steps.

    Attributes:
        account: chooses how many tokens to draft.
    """

    def __init__(self, config: SpeculativeConfig, max_rows: int, runner: Runner) -> None:
        super().__init__(config, max_rows)
        self._runner, self.account, self._tokens = runner, Account(), 0
        self._own: WeakKeyDictionary[Request, AcceptanceRates] = WeakKeyDictionary()
        self._draft_times: defaultdict[int, StepTimes] = defaultdict(StepTimes)

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

    def expects(self, requests: Sequence[Request], sequences: Sequence[CachedSequence]) -> bool:
        return any(self._counts(requests, sequences, [self._most] * len(requests)))

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
        """Returns the number of tokens to draft for each request. It is the same for all that have room for it."""
        rows = len(requests)
        room = min(self._most, (self._max_rows - rows) // rows)
        most = [max(0, min(own, room)) for own in most]
        if not any(most) or not any(map(_is_compressed, sequences)):
            return [0] * rows
        kind = kind_of([sequence.length for sequence in sequences])
        times, draft_times = self._times[kind], self._draft_times[kind]
        draft = DRAFT_SHARE * times.seconds(rows)
        if times.measured and draft_times.measured:
            draft = draft_times.seconds(rows)

        def seconds(count: int) -> float:
            return times.seconds(rows + sum(min(count, own) for own in most)) + count * draft

        drafts = [(self._of(request).rate(ALIKE), own) for request, own in zip(requests, most, strict=True)]
        count = self.account.length(drafts, seconds, rows, self._tokens)
        return [min(count, own) for own in most]

    def _draft(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], counts: Sequence[int]
    ) -> list[list[int]]:
        """Drafts as many tokens as ``counts`` says, without penalties and grammars.

        A drafted token is chosen with the random number of its place in the answer. So it is likely to agree with the
        token that is chosen there, also if it is sampled.
        """
        runner, cache, longest = self._runner, self._runner.cache, max(counts)
        lengths = [sequence.length for sequence in sequences]
        began, before, chosen = Mark(cache.device), (runner.captures, runner.eager_runs), []
        tokens, sources = [request.output_token_ids[-1] for request in requests], [-1] * len(requests)
        try:
            for place in range(longest):
                rows = [row for row, count in enumerate(counts) if count > place]
                asked, own = [requests[row] for row in rows], [sequences[row] for row in rows]
                newest = [tokens[row] for row in rows], [sources[row] for row in rows]
                logits = runner.decode(own, *newest, None, (), (), True)
                steps = [len(request.output_token_ids) + 1 + place for request in asked]
                chosen.append((rows, runner.sampler.choose(logits, asked, steps)[0]))
                runner.chosen[: len(rows)] = chosen[-1][1]  # where the next step reads them
                for number, row in enumerate(rows):
                    sources[row] = number
        finally:
            for sequence, length in zip(sequences, lengths, strict=True):
                if sequence.length > length:
                    cache.truncate(sequence, length)
        ended, drafts = Mark(cache.device), [list[int]() for _ in requests]
        for rows, of_place in chosen:
            for row, token in zip(rows, of_place.tolist(), strict=True):
                drafts[row].append(token)
        if before == (runner.captures, runner.eager_runs):  # else the device waited for the host
            kind = kind_of(lengths)
            self._draft_times[kind].add(len(requests), ended.since(began) / longest)
        return drafts


def _is_compressed(sequence: CachedSequence) -> bool:
    """Whether some of a sequence is compressed. Draft steps of other sequences would attend to everything."""
    return any(group.compressed for group in (sequence, *sequence.other_groups))
