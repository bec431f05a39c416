"""How long the device has worked on a prefill: on a GPU launches return long before, and could pile up seconds of work
between two decode steps. And how long it will work on the next, judging by the last ones."""

from __future__ import annotations

import math
import time

import torch

RECENT_TOKENS = 8192
"""Tokens after which what was measured before counts for little."""


class Pace:
    """Seconds of the device's work for a token of a prompt, a mean over those computed recently."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Returns to having measured nothing."""
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Takes into account that so many tokens together took ``seconds``."""
        kept = max(0.0, 1 - tokens / RECENT_TOKENS)
        self._tokens, self._seconds = kept * self._tokens + tokens, kept * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """What so many tokens will take; infinity before anything was measured."""
        return tokens * self._seconds / self._tokens if self._tokens else math.inf

    def tokens(self, seconds: float) -> int:
        """How many take at most ``seconds``; 0 before anything was measured."""
        return int(seconds * self._tokens / self._seconds) if self._seconds else 0


class Stopwatch:
    """Seconds of the device's work since the start; on a CPU the host's.

    Attributes:
        piece: seconds of the last piece of work between two calls whose time is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.piece, self._passed = device, 0.0, 0.0
        self._last: Mark | None = None
        self.start()

    def start(self) -> None:
        """Starts with the work that is launched from now on."""
        # The time of the newest piece is not known yet; it may be the only one since the previous start.
        self._unknown = None if self._last is None else (self._start, self._last, self._passed)
        self._start: Mark = Mark(self.device)
        self._last = None
        self._passed = 0.0

    def passed(self) -> float:
        """Seconds from the start to the call before this one, 0 at the first; waits until the device is there.

        So the device still has what was launched between the two calls to work on; the first call waits for what the
        last one before the start marked. On a CPU, seconds to this call.
        """
        now = Mark(self.device)
        before, self._last = self._last if self.device.type == "cuda" else now, now
        if before is not None:
            passed = before.since(self._start)
            self.piece, self._passed = passed - self._passed, passed
        elif self._unknown is not None:
            start, last, passed = self._unknown
            self.piece = last.since(start) - passed
        return self._passed

    def launched(self) -> float:
        """Seconds from the start to this call: the device is not there yet, and its remaining work is assumed to take
        as long as the previous piece."""
        passed = self.passed()
        return passed + self.piece if self.device.type == "cuda" else passed


class Mark:
    """A point in the work launched on a device."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Waits until the device gets there."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: Mark) -> float:
        """Seconds of work between two marks, of which this is the later; waits for it."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self.wait()
        return float(other._event.elapsed_time(self._event)) / 1e3
