"""Decides how many tokens to draft, from acceptance rates and step times.

``StepTimes`` predicts how much time further rows add to a step. ``AcceptanceRates`` predicts how many drafted tokens
are accepted. ``Account`` compares gain and cost and chooses the number of tokens to draft. ``Gate`` does this for one
request: it has an account and rates of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

KEPT_TIMES = 7
"""Number of recent step times that are kept for each number of rows. Their median is used, so that occasional slow
steps have no effect."""

ROW_SHARE = 0.1
"""Assumed time of an additional row, or of one of each sequence, as a share of the step's time. It is used for numbers
of rows that have not been measured."""

MATCH_KINDS = 4, 8, 16
"""Match lengths, in tokens, that separate the kinds of matches: 0 to 3, 4 to 7, 8 to 15, 16 and more. A match is a
number of newest tokens that also occur earlier in the text (``drafters.py``). Each kind has its own acceptance rate."""

FIRST_RATES = 0.4, 0.6, 0.8, 0.9
"""Initial acceptance rate of each kind. It has the weight of ``FIRST_TOKENS`` drafted tokens."""

FIRST_TOKENS, RECENT_TOKENS = 16, 1024
"""Weight of the initial rates, and the window over which the rates of all requests are measured, both in drafted
tokens."""

OTHERS_TOKENS, OWN_TOKENS = 8, 64
"""Weight of all requests' rates in the rates of one request, and the window over which a request's own rates are
measured, both in drafted tokens."""

MIN_GAIN = 1.02
"""Minimum expected speed-up of a draft: tokens per second with it divided by tokens per second without it."""

MAX_LOSS = 0.0075
"""Maximum cost of unsuccessful drafts, as a share of the request's steps. Trials have a separate budget of the same
size. Together with ``FREE_LOSS``, an answer of 200 tokens takes at most 2 % longer."""


FREE_LOSS = 1.0
"""Number of steps that drafts may cost a request in addition to ``MAX_LOSS``."""


class StepTimes:
    """Predicts the time of a decode step from its number of rows."""

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._rows: list[int] = []
        self._seconds: list[float] = []

    @property
    def measured(self) -> bool:
        """Whether a step was measured."""
        return bool(self._rows)

    def add(self, rows: int, seconds: float) -> None:
        """Adds a step of ``rows`` rows that took ``seconds``."""
        recent, at = self._recent[rows], bisect_left(self._rows, rows)
        recent.append(seconds)
        if len(recent) == 1:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
        self._seconds[at] = median(recent)

    def seconds(self, rows: int, together: int = 1) -> float:
        """Predicts the time of a step of ``rows`` rows. Between measured numbers of rows, the time is interpolated.
        Above the largest measured number, and before the first measurement, each ``together`` rows add ``ROW_SHARE`` of
        a step: if all sequences draft, one row of each."""
        if not self._rows:
            return 1 + ROW_SHARE * (rows - together) / together
        after = bisect_right(self._rows, rows)
        if not after:
            return self._seconds[0]
        below, seconds = self._rows[after - 1], self._seconds[after - 1]
        if after == len(self._rows):
            return seconds + ROW_SHARE * self._seconds[0] * (rows - below) / together
        share = (rows - below) / (self._rows[after] - below)
        return seconds + share * (self._seconds[after] - seconds)


class AcceptanceRates:
    """Acceptance rates by kind of match. A rate is the probability that a drafted token is accepted if all drafted
    tokens before it are.

    Args:
        before: the rates before anything is measured; None for ``FIRST_RATES``.
        weight: weight of ``before``, in drafted tokens.
        window: number of drafted tokens over which measurements fade out.
    """

    def __init__(self, before: AcceptanceRates | None, weight: int, window: int) -> None:
        self._before, self._weight, self._window = before, weight, window
        self._drafted, self._accepted = [0.0] * len(FIRST_RATES), [0.0] * len(FIRST_RATES)

    def rate(self, matched: int) -> float:
        """Returns the acceptance rate of drafts that follow a match of ``matched`` tokens."""
        kind = bisect_right(MATCH_KINDS, matched)
        before = FIRST_RATES[kind] if self._before is None else self._before.rate(matched)
        return (self._accepted[kind] + self._weight * before) / (self._drafted[kind] + self._weight)

    def add(self, matched: int, drafted: int, accepted: int) -> None:
        """Adds a draft that followed a match of ``matched`` tokens. Tokens after the first rejected one are not
        counted."""
        kind, judged = bisect_right(MATCH_KINDS, matched), min(drafted, accepted + 1)
        kept = max(0.0, 1 - judged / self._window)
        self._drafted[kind] = kept * self._drafted[kind] + judged
        self._accepted[kind] = kept * self._accepted[kind] + accepted


class Account:
    """Chooses how many tokens to draft, from acceptance rates and step times, and limits what drafts cost.

    A draft must be expected to save time. When drafts have cost more than ``FREE_LOSS`` steps plus the share
    ``MAX_LOSS`` of all steps, drafting stops until enough further steps have run. Drafts that are not expected to save
    time are tried now and then; the cost of these trials has the limit ``MAX_LOSS`` too. So drafts never slow down a
    request by much, and drafting begins again when the text changes.
    """

    def __init__(self) -> None:
        self._balance = self._tried = 0.0  # tokens gained minus tokens lost by drafts, at most 0; tokens lost by trials
        self._cost, self._is_trial = 0.0, False

    def length(
        self, drafts: Sequence[tuple[float, int]], seconds: Callable[[int], float], sequences: int, steps: int
    ) -> int:
        """Returns the number of tokens to draft. If they are drafted, ``spend`` and ``gain`` must be called.

        Args:
            drafts: for each sequence, the acceptance rate and the maximum length of its draft. A draft has the returned
                number of tokens, or its own maximum if that is smaller.
            seconds: returns the step's time for a given number of drafted tokens, including the time to draft them.
            sequences: number of sequences of the step.
            steps: number of tokens generated so far, of which ``MAX_LOSS`` is a share.
        """
        best, value, gain, plain = 0, MIN_GAIN, 0.0, seconds(0)
        longest = max(most for _, most in drafts)
        # Expected number of accepted tokens if drafts were infinitely long.
        limit = sum(rate / (1 - rate) for rate, _ in drafts)
        for count in range(1, longest + 1):
            gain += sum(rate**count for rate, most in drafts if count <= most)
            faster = plain / seconds(count)
            if (1 + limit / sequences) * faster <= value:  # longer drafts gain too little, even at no cost
                break
            over = (1 + gain / sequences) * faster
            if over > value:
                best, value = count, over
        self._is_trial = not best
        count = best or min(longest, 1)
        # A slower step delays every sequence.
        self._cost = sequences * (seconds(count) / plain - 1)
        loss = self._tried + self._cost if self._is_trial else -self._balance - FREE_LOSS
        return count if loss <= MAX_LOSS * steps else 0

    def spend(self) -> None:
        """Books the cost of drafts of the length that ``length`` returned."""
        self.losing()(self._cost)

    def losing(self) -> Callable[[float], None]:
        """Returns a function that books a cost, in steps, of the drafts that ``length`` has allowed, also if ``length``
        has been called again since."""
        return partial(self._lose, self._is_trial)

    def _lose(self, is_trial: bool, cost: float) -> None:
        if is_trial:
            self._tried += cost
        else:
            self._balance -= cost

    def gain(self, accepted: int) -> None:
        """Books the drafted tokens that were accepted."""
        if not self._is_trial:
            self._balance = min(self._balance + accepted, 0.0)


class Gate:
    """Chooses how many tokens to draft for one request.

    Args:
        overall: rates of all requests.
    """

    def __init__(self, overall: AcceptanceRates) -> None:
        self._overall = overall
        self._own = AcceptanceRates(overall, OTHERS_TOKENS, OWN_TOKENS)
        self._account, self._matched = Account(), 0

    def length(self, matched: int, most: int, times: StepTimes, rows: int, sequences: int, steps: int) -> int:
        """Returns the number of tokens to draft, at most ``most``. After the step, call ``judge`` with the result of
        the draft.

        Args:
            matched: length of the match, in tokens.
            times: measured step times.
            rows: number of the step's rows without this draft.
            sequences: number of the step's sequences.
            steps: number of tokens of the answer so far.
        """
        self._matched, rate = matched, self._own.rate(matched)
        return self._account.length([(rate, most)], lambda count: times.seconds(rows + count), sequences, steps)

    def waiting(self) -> Callable[[float], None]:
        """Returns a function that books the cost, in steps, of waiting for the draft that ``length`` has allowed, if
        none is made."""
        return self._account.losing()

    def judge(self, drafted: int, accepted: int) -> None:
        """Records how many of the drafted tokens were accepted."""
        for rates in (self._own, self._overall):
            rates.add(self._matched, drafted, accepted)
        self._account.spend()
        self._account.gain(accepted)
