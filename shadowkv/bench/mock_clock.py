"""Encodes times as characters. A mock engine's answer consists of such characters, which tell when its tokens were
made. This module needs no PyTorch."""

from __future__ import annotations

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
DIGITS = 4
TICKS = 1e5
"""Ticks per second."""

WRAP = len(ALPHABET) ** DIGITS


def clock_digits(seconds: float) -> list[int]:
    """Returns the digits of a time in ticks, as indices in ``ALPHABET``. The most significant digit comes first."""
    ticks = int(seconds * TICKS)
    return [ticks // len(ALPHABET) ** (DIGITS - 1 - place) % len(ALPHABET) for place in range(DIGITS)]


def seconds_since(digits: str, now: float) -> float:
    """Returns the seconds from the time that ``DIGITS`` characters encode to ``now``, a time of ``time.monotonic``. The
    result is correct up to ``WRAP`` ticks, nearly three minutes."""
    ticks = 0
    for character in digits:
        ticks = ticks * len(ALPHABET) + ALPHABET.index(character)
    return (int(now * TICKS) - ticks) % WRAP / TICKS
