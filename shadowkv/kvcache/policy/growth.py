"""Rules for segments: how many later tokens a state serves, and when later tokens get a new segment and state.

Keys before RoPE of a prompt and of its continuation share a subspace (ShadowKV+, arXiv:2410.21465, section 4.1). But a
basis fitted on 400 tokens does not fit a document that follows: 1,500 later tokens lose 9 to 12 % of their keys'
energy, but only 2 to 3 % with a basis of their own. So a state serves ``VALIDITY`` times as many later tokens as it was
fitted on. Further tokens stay exact, like a short prompt, until there are enough for a new segment. Layouts, storage
plans and admission use these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shadowkv.kvcache.policy.spec import PAGE, KVSpec

VALIDITY = 0.25
"""Number of later tokens that a state serves, as a fraction of the tokens that it was fitted on.

In a measurement with SmolLM2 and ``turbo``, 400 tokens are followed by 400 others and a question. The KL divergence
from full attention is 0.0047 if all tokens come in one prefill, 0.0101 if the state of the first 400 serves the others,
and 0.0049 if the others have their own state. With only 200 others, the divergence is 0.0065 in one prefill, and 0.0147
if the state of the first 400 serves them."""

SETTLED = 2048
"""A state fitted on at least this many tokens serves all tokens that are generated later. A state of their own would
fit the generated tokens better: if 1,536 tokens follow 2,048, the KL divergence from full attention on three texts is
0.0106, 0.0078 and 0.0074 with the state of the 2,048 tokens, and 0.0093, 0.0059 and 0.0061 with a state of their own.
But then memory for all states of a long answer would have to be reserved when the answer begins."""

MAX_SEGMENTS = 8
"""Maximum number of segments of one sequence. The state of the last segment serves all later tokens."""

UNLIMITED = 2**62
"""``valid_until`` of a state that serves all later tokens."""


class SegmentLike(Protocol):
    """The token ranges of a segment (``Segment``)."""

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
        compressed: number of compressed tokens.
        segments: number of segments; 0 while the sequence is dense, at most 1 for parts without states.
        valid_until: position up to which the last segment's state serves prompt tokens.
        generated_valid_until: position up to which the last segment's state serves generated tokens.
    """

    compressed: int = 0
    segments: int = 0
    valid_until: int = 0
    generated_valid_until: int = 0

    @classmethod
    def behind(cls, path: Sequence[SegmentLike]) -> SegmentState:
        """Returns the ``SegmentState`` of a sequence with the segments ``path``."""
        if not path:
            return cls()
        last = path[-1]
        return cls(
            last.compressed, len(path), last.valid_until, generated_valid_until(last.first, last.end, last.valid_until)
        )


@dataclass(frozen=True)
class Compressed:
    """The compressed tokens of a sequence of a given length.

    Attributes:
        tokens: number of compressed tokens, earlier ones included.
        fits: whether the newly compressed tokens form a new segment with its own state.
    """

    tokens: int
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """The maximum that a sequence can need as it grows.

    Attributes:
        segments: number of new segments.
        tail: number of tokens of the longest exact tail.
    """

    segments: int
    tail: int


def fitted_with_earlier(first: int, end: int) -> bool:
    """Whether tokens ``first`` to ``end`` are too few for a subspace of their own. Their state is then fitted on all
    earlier tokens too, so that it serves more later tokens."""
    return end - first < first


def cut_short(end: int, valid_until: int, fitted: int, stop: int) -> tuple[int, int, int]:
    """Returns a segment's ``end``, ``valid_until`` and ``fitted`` in a fork that continues differently after position
    ``stop``."""
    return min(end, stop), valid_until - end + min(end, stop), min(fitted, stop)


def generated_valid_until(first: int, end: int, valid_until: int) -> int:
    """Position up to which the state of tokens ``first`` to ``end`` serves generated tokens. ``valid_until`` is the
    position up to which the state serves prompt tokens."""
    fitted = end if fitted_with_earlier(first, end) else end - first
    return UNLIMITED if fitted >= SETTLED else valid_until


@dataclass(frozen=True)
class Growth:
    """The rules of one policy.

    Attributes:
        spec: a resolved policy.
        learns: whether the policy's parts have fitted states.
    """

    spec: KVSpec
    learns: bool

    def valid_until(self, segments: int, first: int, end: int) -> int:
        """Position up to which the state of tokens ``first`` to ``end`` serves prompt tokens. ``segments`` is the
        sequence's number of segments, including the one that the state belongs to."""
        if not self.learns or segments >= MAX_SEGMENTS:
            return UNLIMITED
        return end + int(VALIDITY * (end if fitted_with_earlier(first, end) else end - first))

    def fitted(self, at: SegmentState, compressed: int, end: int) -> SegmentState:
        """Returns the ``SegmentState`` that follows ``at`` when later tokens get a new segment. The segment's state is
        fitted on the tokens up to ``end``. The tokens up to ``compressed`` are then compressed."""
        valid_until = self.valid_until(at.segments + 1, at.compressed, end)
        return SegmentState(
            compressed, at.segments + 1, valid_until, generated_valid_until(at.compressed, end, valid_until)
        )

    def limit(self, segments: int) -> int:
        """The longest tail, in tokens, that stays exact at the end of a prompt, after ``segments`` segments."""
        return self.spec.exact_limit if segments else self.spec.dense_limit

    def late_limit(self, segments: int) -> int:
        """The longest tail, in tokens, that stays exact while an answer is generated, after ``segments`` segments."""
        return self.spec.exact_limit if segments else self.spec.late_limit

    def compressed(self, at: SegmentState, length: int, final: bool) -> Compressed:
        """The compressed tokens of a sequence of ``length`` tokens. ``final`` says that the sequence will not grow."""
        target = max(at.compressed, self.spec.compressed_pages(length) * PAGE)
        if not self.spec.compresses or target <= at.valid_until:
            return Compressed(target if self.spec.compresses and at.segments else 0, False)
        tail, limit = length - at.compressed, self.limit(at.segments)
        # A tail of exactly ``limit`` tokens stays exact only if the sequence will not grow, or if the limit for tails
        # is longer while an answer is generated.
        if tail < limit or (tail == limit and (final or self.late_limit(at.segments) > limit)):
            return Compressed(at.compressed, False)
        return Compressed(target, True)

    def forecast(self, at: SegmentState, start: int, capacity: int) -> Forecast:
        """The maximum that a sequence can need to grow to ``start`` tokens by a prompt, then to ``capacity`` by
        decoding."""
        spec, before, longest = self.spec, at.segments, 0
        soon = self.compressed(at, start, start == capacity)
        if soon.fits:
            at = self.fitted(at, soon.tokens, start)
        elif at.segments:
            at = replace(at, compressed=soon.tokens)
            longest = start - soon.tokens
        while at.segments < MAX_SEGMENTS:
            # The last state serves generated tokens up to this position.
            stuck = max(at.compressed, at.generated_valid_until // PAGE * PAGE)
            if at.segments and capacity > stuck + spec.local + PAGE:
                longest = max(longest, min(capacity - stuck, spec.exact_limit + 1))
            fitted = stuck + self.late_limit(at.segments)
            if capacity <= fitted:
                break
            at = self.fitted(replace(at, compressed=stuck), spec.compressed_pages(fitted) * PAGE, fitted)
        return Forecast(at.segments - before, longest)
