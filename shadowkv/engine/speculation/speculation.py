"""``Speculation``: makes drafts for the running requests of an engine, and counts how many of their tokens are
accepted. ``DecodeSteps`` calls it.

``TextDrafts`` drafts from the requests' text, ``scheduling/model_drafts.py`` with the model itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from shadowkv.engine.request import Request
from shadowkv.engine.speculation.acceptance import accepted_at_random
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.speculation.drafters import SEPARATOR, Drafter, drafter_of
from shadowkv.engine.speculation.gate import FIRST_TOKENS, RECENT_TOKENS, AcceptanceRates, Gate, StepTimes
from shadowkv.kvcache.sequences.sequence import CachedSequence

LONGEST_TEXT = 131_072
"""Number of a prompt's last tokens in which drafts are looked up. Reading a token takes half a microsecond and some 150
bytes."""


@dataclass
class SpeculationStats:
    """Counts since the start, with vLLM's names.

    Attributes:
        num_drafts: drafts, each of one sequence in one step.
        num_draft_tokens, num_accepted_tokens: their tokens, and how many of these were accepted.
        num_accepted_tokens_per_pos: accepted tokens by their place in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


class Speculation(ABC):
    """Drafts tokens for running requests, where drafts are expected to save time.

    Args:
        max_rows: maximum number of rows of a step. Drafts that do not fit are cut.

    Attributes:
        drafts_on_host: whether drafts are made on the host alone, so that the device waits for them.
        stats: counts for ``/metrics``.
    """

    drafts_on_host = False

    def __init__(self, config: SpeculativeConfig, max_rows: int) -> None:
        assert config.num_speculative_tokens is not None, "set by SpeculativeConfig"
        self._config, self._max_rows, self._most = config, max_rows, config.num_speculative_tokens
        self._synthetic_rates = config.conditional_rates
        self._rates = AcceptanceRates(None, FIRST_TOKENS, RECENT_TOKENS)
        self._times: defaultdict[int, StepTimes] = defaultdict(StepTimes)
        self.stats = SpeculationStats(num_accepted_tokens_per_pos=[0] * self._most)

    def took(self, lengths: Sequence[int], rows: int, seconds: float) -> None:
        """Records the time of a step with ``rows`` rows, including that for which the device waited for drafts of the
        host. ``lengths`` are those of the step's sequences."""
        self._times[kind_of(lengths)].add(rows, seconds)

    def prompted(self, requests: Sequence[Request]) -> None:
        """Called when the model has computed the prompts of requests, before another pass. They are all prompts of a
        pass, in its order."""
        return

    def computed(self, requests: Sequence[Request], newest: Sequence[int], rows: Sequence[int]) -> None:
        """Called when the model has computed a step. The runner still has the step's hidden states.

        Args:
            newest: number of each request's newest token within its answer, from 0.
            rows: number of each request's rows in the step: one for its newest token, and one for each drafted token.
        """
        return

    @abstractmethod
    def drafts(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], most: Sequence[int]
    ) -> list[list[int]]:
        """Returns the drafted tokens of each request, which follow its newest token. The list is empty if nothing is
        drafted.

        Args:
            sequences: the requests' sequences.
            most: maximum number of drafted tokens of each request.
        """

    @abstractmethod
    def expects(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence]
    ) -> Callable[[float], None] | None:
        """Says whether the next step of these requests may have a draft. Arguments are as in ``drafts``.

        Returns None if it has none. Otherwise returns a function for the case that the device waits and nothing is
        drafted: it books the cost of the wait, in steps of a sequence.
        """

    def accepted(self, request: Request, draft: Sequence[int]) -> int | None:
        """Returns how many tokens of a draft are accepted whatever the model says. Returns None if the model decides:
        with ``rejection_sample_method`` ``standard``, and for requests with grammars, penalties or log-probabilities,
        which must fit the model's tokens."""
        params, rates = request.params, self._synthetic_rates
        if rates is None or params.changes_logits or params.logprobs is not None:
            return None
        return accepted_at_random(request, draft, rates)

    def judge(self, request: Request, drafted: int, accepted: int) -> None:
        """Records how many of a request's drafted tokens were accepted."""
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += drafted
        stats.num_accepted_tokens += accepted
        for place in range(accepted):
            stats.num_accepted_tokens_per_pos[place] += 1


def kind_of(lengths: Sequence[int]) -> int:
    """Returns the kind of a step under which its time is recorded: the number of binary digits of its total number of
    tokens. Steps of a kind have about as many tokens, and the cost of a row depends on them. ``lengths`` are those of
    the step's sequences."""
    return sum(lengths).bit_length()


class TextDrafts(Speculation):
    """Drafts the tokens that followed earlier occurrences of the newest tokens (``drafters.py``).

    Args:
        max_drafted: maximum number of drafted tokens of a step; None if only ``max_rows`` limits them.
    """

    drafts_on_host = True

    def __init__(self, config: SpeculativeConfig, max_rows: int, max_drafted: int | None = None) -> None:
        super().__init__(config, max_rows)
        self._max_drafted = max_rows if max_drafted is None else max_drafted
        self._requests: WeakKeyDictionary[Request, _Drafts] = WeakKeyDictionary()

    def drafts(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence], most: Sequence[int]
    ) -> list[list[int]]:
        rows, drafts, times = len(requests), list[list[int]](), self._times_of(sequences)
        max_rows = min(self._max_rows, len(requests) + self._max_drafted)
        for request, room in zip(requests, most, strict=True):
            most_tokens = min(room, self._most, max_rows - rows)
            drafts.append(self._of(request).draft(most_tokens, times, rows, len(requests)))
            rows += len(drafts[-1])
        return drafts if rows > len(requests) else []

    def expects(
        self, requests: Sequence[Request], sequences: Sequence[CachedSequence]
    ) -> Callable[[float], None] | None:
        """A draft is expected if a request's known text would have one."""
        rows, times = len(requests), self._times_of(sequences)
        owns = (self._of(request) for request in requests)
        expected = next((own for own in owns if own.draft(self._most, times, rows, rows)), None)
        return None if expected is None else expected.gate.waiting()

    def judge(self, request: Request, drafted: int, accepted: int) -> None:
        super().judge(request, drafted, accepted)
        self._of(request).gate.judge(drafted, accepted)

    def _times_of(self, sequences: Sequence[CachedSequence]) -> StepTimes:
        return self._times[kind_of([sequence.length for sequence in sequences])]

    def _of(self, request: Request) -> _Drafts:
        if (own := self._requests.get(request)) is None:
            own = self._requests[request] = _Drafts(request, drafter_of(self._config), Gate(self._rates))
        own.read(request.output_token_ids)
        return own


class _Drafts:
    """The drafts of one request."""

    def __init__(self, request: Request, drafter: Drafter, gate: Gate) -> None:
        self._drafter, self.gate, self._count = drafter, gate, 0
        predicted = request.params.predicted_token_ids
        prompt = request.prompt_token_ids[-LONGEST_TEXT:]
        drafter.extend([*predicted, SEPARATOR, *prompt] if predicted else prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Reads what is new of the answer's ``tokens``."""
        if len(tokens) > self._count:
            self._drafter.extend(tokens[self._count :])
            self._count = len(tokens)

    def draft(self, most: int, times: StepTimes, rows: int, sequences: int) -> list[int]:
        """Returns the drafted tokens, at most ``most``, for a step with ``rows`` other rows of ``sequences``
        sequences."""
        if most <= 0 or not (matched := self._drafter.matched):
            return []
        count = self.gate.length(matched, most, times, rows, sequences, self._count)
        return self._drafter.draft(count) if count else []
