"""When tokens get a fitted state of their own: up to where a state is valid, and what a sequence may need as it grows.

Pre-RoPE keys of a prompt and of its continuation share a subspace (ShadowKV+, arXiv:2410.21465, section 4.1), but a
basis of 400 tokens does not fit a document that follows them: 1,500 later tokens lose 9 to 12 % of their keys' energy,
2 to 3 % with a basis of their own. So a state serves ``VALIDITY`` times as many later tokens as it was fitted on. What
follows stays exact, like a short prompt, until there is enough of it for a segment with a state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shadowkv.kvcache.policy.spec import PAGE, KVSpec

VALIDITY = 0.25
"""Later tokens that a state serves, as a fraction of those that it was fitted on. With SmolLM2 and ``turbo``, after 400
tokens, KL to full attention is 0.0047 where 400 others and a question follow and all come in one prefill, 0.0101 where
the state of the first has to serve the others, and 0.0049 where these have a state of their own; with 200 others 0.0065
and 0.0147."""

SETTLED = 2048
"""A state fitted on at least this many tokens serves all that is generated after them. Where 1,536 tokens follow 2,048,
KL to full attention is 0.0106, 0.0078 and 0.0074 on the state of the 2,048 and 0.0093, 0.0059 and 0.0061 with one of
their own (three texts); but states for all that a long answer may grow to would have to be held from its start."""

MAX_SEGMENTS = 8
"""Segments of one sequence with states of their own: the last one's state serves everything that follows."""

UNLIMITED = 2**62
"""``valid_until`` of a state that serves everything after it."""


class SegmentLike(Protocol):
    """Tokens that one state serves, as a ``Segment`` has them."""

    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def valid_until(self) -> int: ...
    @property
    def compressed(self) -> int: ...


@dataclass(frozen=True)
class SegmentState:
    """How far a sequence is compressed.

    Attributes:
        compressed: compressed tokens.
        segments: segments with fitted states, or one where nothing is fitted; 0 while it is dense.
        valid_until: position up to which tokens of prompts may be compressed on the last one's state.
        generated_valid_until: the same for generated tokens.
    """

    compressed: int = 0
    segments: int = 0
    valid_until: int = 0
    generated_valid_until: int = 0

    @classmethod
    def behind(cls, path: Sequence[SegmentLike]) -> SegmentState:
        """The state of a sequence with these segments."""
        if not path:
            return cls()
        last = path[-1]
        return cls(
            last.compressed, len(path), last.valid_until, generated_valid_until(last.first, last.end, last.valid_until)
        )


@dataclass(frozen=True)
class Compressed:
    """What is compressed once a sequence has a given number of tokens.

    Attributes:
        tokens: all compressed tokens.
        fits: whether those that are compressed now form a new segment, with a state of its own.
    """

    tokens: int
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """What a sequence may need as it grows: new segments, and tokens of its longest exact tail."""

    segments: int
    tail: int


def fitted_with_earlier(first: int, end: int) -> bool:
    """Whether tokens ``first`` to ``end`` are too few for a subspace of their own: it is then fitted on all before
    them, too, so that a longer sequence's states serve more tokens."""
    return end - first < first


def cut_short(end: int, valid_until: int, fitted: int, stop: int) -> tuple[int, int, int]:
    """These numbers of a segment, for a sequence that continues differently after position ``stop``."""
    return min(end, stop), valid_until - end + min(end, stop), min(fitted, stop)


def generated_valid_until(first: int, end: int, valid_until: int) -> int:
    """Up to where a state that was fitted for ``first`` to ``end`` and has that ``valid_until`` serves generated
    tokens."""
    fitted = end if fitted_with_earlier(first, end) else end - first
    return UNLIMITED if fitted >= SETTLED else valid_until


@dataclass(frozen=True)
class Growth:
    """The rules of one policy.

    Attributes:
        spec: a resolved spec.
        learns: whether its parts have fitted states.
    """

    spec: KVSpec
    learns: bool

    def valid_until(self, segments: int, first: int, end: int) -> int:
        """Up to where the state of a sequence's last segment, for tokens ``first`` to ``end``, serves prompts."""
        if not self.learns or segments >= MAX_SEGMENTS:
            return UNLIMITED
        return end + int(VALIDITY * (end if fitted_with_earlier(first, end) else end - first))

    def fitted(self, at: SegmentState, compressed: int, end: int) -> SegmentState:
        """What ``at`` becomes when tokens after it, up to ``end``, get a state and are compressed up to
        ``compressed``."""
        valid_until = self.valid_until(at.segments + 1, at.compressed, end)
        return SegmentState(
            compressed, at.segments + 1, valid_until, generated_valid_until(at.compressed, end, valid_until)
        )

    def limit(self, segments: int) -> int:
        """The longest tail after that many segments that stays exact if a prompt ends with it."""
        return self.spec.exact_limit if segments else self.spec.dense_limit

    def late_limit(self, segments: int) -> int:
        """The same if more is generated."""
        return self.spec.exact_limit if segments else self.spec.late_limit

    def compressed(self, at: SegmentState, length: int, final: bool) -> Compressed:
        """What is compressed once a sequence has ``length`` tokens; ``final`` where it will not grow."""
        target = max(at.compressed, self.spec.compressed_pages(length) * PAGE)
        if not self.spec.compresses or target <= at.valid_until:
            return Compressed(target if self.spec.compresses and at.segments else 0, False)
        tail, limit = length - at.compressed, self.limit(at.segments)
        # At the limit itself tokens stay exact only if there will be no more, or answers may go on from there.
        if tail < limit or (tail == limit and (final or self.late_limit(at.segments) > limit)):
            return Compressed(at.compressed, False)
        return Compressed(target, True)

    def forecast(self, at: SegmentState, start: int, capacity: int) -> Forecast:
        """What a sequence needs to be extended to ``start`` tokens by a prompt, and to ``capacity`` by decoding."""
        spec, before, longest = self.spec, at.segments, 0
        soon = self.compressed(at, start, start == capacity)
        if soon.fits:
            at = self.fitted(at, soon.tokens, start)
        elif at.segments:
            at = replace(at, compressed=soon.tokens)
            longest = start - soon.tokens
        while at.segments < MAX_SEGMENTS:
            stuck = max(
                at.compressed, at.generated_valid_until // PAGE * PAGE
            )  # all that can be compressed on the last state
            if at.segments and capacity > stuck + spec.local + PAGE:
                longest = max(longest, min(capacity - stuck, spec.exact_limit + 1))
            fitted = stuck + self.late_limit(at.segments)
            if capacity <= fitted:
                break
            at = self.fitted(replace(at, compressed=stuck), spec.compressed_pages(fitted) * PAGE, fitted)
        return Forecast(at.segments - before, longest)
