"""Encodes times in a mock engine's answers: characters that tell when they were made. Needs no PyTorch."""

from __future__ import annotations

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
DIGITS = 4
TICKS = 1e5
"""Ticks per second."""

WRAP = len(ALPHABET) ** DIGITS


def clock_digits(seconds: float) -> list[int]:
    """Digits of a time as indices in ``ALPHABET``, the highest first."""
    ticks = int(seconds * TICKS)
    return [ticks // len(ALPHABET) ** (DIGITS - 1 - place) % len(ALPHABET) for place in range(DIGITS)]


def seconds_since(digits: str, now: float) -> float:
    """Seconds from the time in ``DIGITS`` characters to ``now``, of ``time.monotonic``; correct below three minutes."""
    ticks = 0
    for character in digits:
        ticks = ticks * len(ALPHABET) + ALPHABET.index(character)
    return (int(now * TICKS) - ticks) % WRAP / TICKS
