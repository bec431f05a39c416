"""The clock that a mock engine's answers are: characters that say when they were made. Needs no PyTorch."""

from __future__ import annotations

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
DIGITS = 4
TICKS = 1e5
"""A second."""

WRAP = len(ALPHABET) ** DIGITS


def clock_digits(seconds: float) -> list[int]:
    """Indices in ``ALPHABET``, the highest first."""
    ticks = int(seconds * TICKS)
    return [ticks // len(ALPHABET) ** (DIGITS - 1 - place) % len(ALPHABET) for place in range(DIGITS)]


def seconds_since(digits: str, now: float) -> float:
    """Between the time that ``DIGITS`` characters say and ``now``, of ``time.monotonic``; less than three minutes."""
    ticks = 0
    for character in digits:
        ticks = ticks * len(ALPHABET) + ALPHABET.index(character)
    return (int(now * TICKS) - ticks) % WRAP / TICKS
