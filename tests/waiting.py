"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 300
"""Most that anything takes, on any machine."""


def wait_until(condition: Callable[[], object]) -> float:
    """Waits until a condition is met; returns how many seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + SECONDS, "it took too long"
        time.sleep(0.005)
    return time.monotonic() - begin
