"""Drafters: they look up in a request's own text what may come next. ``TextDrafts`` has one for each request.

A drafter's text consists of the request's predicted text (if it has one), its prompt and its answer so far. All work is
done on the host and takes some microseconds for a token.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from shadowkv.engine.speculation.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

SEPARATOR = -1
"""Stands between predicted text and prompt. No token equals it."""

SHORTEST_MATCH = 2
"""Length of the shortest match of ``SuffixDrafter``. Its table has the places of all tuples of this many tokens."""

LONGEST_MATCH = 64
"""Maximum number of tokens that ``SuffixDrafter`` compares to find the longest match. The match then grows with the
answer."""

OCCURRENCES = 32
"""Maximum number of earlier occurrences of the newest tokens that ``SuffixDrafter`` compares, from the newest to the
oldest."""


class Drafter(Protocol):
    """Drafts the next tokens of one request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""

    def draft(self, most: int) -> list[int]:
        """Returns up to ``most`` tokens that may follow the text; none if nothing matches."""

    @property
    def matched(self) -> int:
        """Number of newest tokens that match an earlier place of the text; 0 without a match."""
        ...


class NgramDrafter:
    """Drafts what follows the first occurrence of the longest n-gram that ends the text, as vLLM's ``ngram`` does.

    Args:
        least, most: shortest and longest n-gram, in tokens.
    """

    def __init__(self, least: int, most: int) -> None:
        self._sizes = range(most, least - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # for each n-gram, the position after its first occurrence
        self._match: tuple[int, int] | None = (0, 0)  # size and end of the match; None if it is not looked up yet

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(self._tokens[end - size : end]), end)
            self._tokens.append(token)
        self._match = None

    def draft(self, most: int) -> list[int]:
        """Returns up to ``most`` tokens that may follow the text; none if nothing matches."""
        size, end = self._found()
        return _until_separator(self._tokens[end : end + most]) if size else []

    @property
    def matched(self) -> int:
        """Number of newest tokens that match an earlier place of the text; 0 without a match."""
        return self._found()[0]

    def _found(self) -> tuple[int, int]:
        if self._match is None:
            found = ((size, self._ends.get(tuple(self._tokens[-size:]))) for size in self._sizes)
            self._match = next(((size, end) for size, end in found if end is not None), (0, 0))
        return self._match


class SuffixDrafter:
    """Drafts what most often follows the longest suffix of the text that occurs earlier in it.

    SuffixDecoding (arXiv:2411.04975, section 4) has a suffix tree for this. Here a table has the places of all pairs of
    tokens, linked from the newest to the oldest, as in LZ77. When a match begins, these places are compared backwards.
    The match then grows with each token of the answer. So adding a token takes constant time.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._newest: dict[int, int] = {}  # for each pair of tokens, the position after its newest occurrence
        # For each position, the position after the previous occurrence of the pair that ends there; -1 without one.
        self._earlier = array("i")
        self._matches: list[int] = []  # positions after the earlier occurrences of the longest match, newest first
        self._matched = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            end, pair = len(self._tokens), self._pair()
            self._earlier.append(self._newest.get(pair, -1))
            if end >= SHORTEST_MATCH:
                self._newest[pair] = end
            self._tokens.append(token)
            if self._matches:
                self._matches = [at + 1 for at in self._matches if self._tokens[at] == token]
                self._matched += 1
        if tokens and not self._matches:
            self._look_up()

    @property
    def matched(self) -> int:
        """Number of newest tokens that match an earlier place of the text; 0 without a match."""
        return self._matched if self._matches else 0

    def draft(self, most: int) -> list[int]:
        """Returns up to ``most`` tokens that may follow the text; none if nothing matches."""
        tokens, end, matches, drafted = self._tokens, len(self._tokens), self._matches, list[int]()
        while matches and len(drafted) < most:
            ahead = len(drafted)
            # A match that reaches the end of the text goes on with the draft: the text repeats itself.
            following = [tokens[at + ahead] if at + ahead < end else drafted[at + ahead - end] for at in matches]
            token = max(following, key=following.count) if len(following) > 1 else following[0]
            drafted.append(token)
            matches = [at for at, own in zip(matches, following, strict=True) if own == token]
        return _until_separator(drafted)

    def _pair(self) -> int:
        """The newest pair of tokens as a number; -1 if there is no pair yet."""
        return self._tokens[-2] << 32 | self._tokens[-1] & 0xFFFFFFFF if len(self._tokens) > 1 else -1

    def _look_up(self) -> None:
        tokens, self._matches, self._matched = self._tokens, [], SHORTEST_MATCH
        at = self._newest.get(self._pair(), -1)
        for _ in range(OCCURRENCES):
            if at < 0:
                break
            length, longest = SHORTEST_MATCH, min(at, LONGEST_MATCH)
            while length < longest and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > self._matched or not self._matches:
                self._matches, self._matched = [at], length
            elif length == self._matched:
                self._matches.append(at)
            at = self._earlier[at]


class RepeatingDrafter:
    """Drafts as ``drafter`` does, and the newest tokens once more where that finds nothing. It is for synthetic
    acceptance: random text has no matches, and its drafts must take as much time as others."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._newest = drafter, deque[int](maxlen=MAX_SPECULATIVE_TOKENS)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        self._drafter.extend(tokens)
        self._newest.extend(tokens[-MAX_SPECULATIVE_TOKENS:])

    @property
    def matched(self) -> int:
        """Number of newest tokens that match an earlier place of the text; 1 without a match."""
        return self._drafter.matched or 1

    def draft(self, most: int) -> list[int]:
        """Returns up to ``most`` tokens; as many of the newest ones as there are if nothing matches."""
        if drafted := self._drafter.draft(most):
            return drafted
        newest = list(islice(reversed(self._newest), most))  # those of the predicted text come last
        return _until_separator(newest)[::-1]


def _until_separator(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """Makes the drafter of a request."""
    if config.method == "suffix":
        drafter: Drafter = SuffixDrafter()
    else:
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        assert least is not None and most is not None, "set by SpeculativeConfig"
        drafter = NgramDrafter(least, most)
    return drafter if config.conditional_rates is None else RepeatingDrafter(drafter)
