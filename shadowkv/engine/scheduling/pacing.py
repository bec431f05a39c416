"""Measures the device time of the current prefill, and predicts the device time of the next one. ``PrefillQueue`` uses
both.

On a GPU a launch returns long before its work is done. Unmeasured launches could queue seconds of work between two
decode steps.
"""

from __future__ import annotations

import math
import time

import torch

RECENT_TOKENS = 8192
"""Window of the mean, in tokens. Older measurements fade out."""


class Pace:
    """Mean device time per prompt token, over recently computed prompts."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops all measurements."""
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a measurement: ``tokens`` tokens took ``seconds`` together."""
        kept = max(0.0, 1 - tokens / RECENT_TOKENS)
        self._tokens, self._seconds = kept * self._tokens + tokens, kept * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Predicts the seconds for ``tokens`` tokens. Returns infinity before the first measurement."""
        return tokens * self._seconds / self._tokens if self._tokens else math.inf

    def tokens(self, seconds: float) -> int:
        """Predicts how many tokens take at most ``seconds``. Returns 0 before the first measurement."""
        return int(seconds * self._tokens / self._seconds) if self._seconds else 0


class Stopwatch:
    """Measures device time since its start. On a CPU this is the host's time.

    Attributes:
        piece: seconds of the newest measured piece. A piece is the work launched between two calls of ``passed``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.piece, self._passed = device, 0.0, 0.0
        self._last: Mark | None = None
        self.start()

    def start(self) -> None:
        """Starts again at 0. Only work that is launched from now on counts."""
        # The newest piece is not measured yet. It can be the only one since the previous start; ``passed`` measures it.
        self._unknown = None if self._last is None else (self._start, self._last, self._passed)
        self._start: Mark = Mark(self.device)
        self._last = None
        self._passed = 0.0

    def passed(self) -> float:
        """Returns, on a GPU, the device seconds from the start to the previous call; 0 at the first call. On a CPU it
        returns the seconds from the start to this call.

        On a GPU it waits until the device has reached the previous call, even if that was before the start. It does not
        wait for the newest piece, so the device stays busy.
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
        """Estimates the device seconds from the start to this call. The device has not finished the newest piece; it is
        assumed to take as long as the piece before."""
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
        """Waits until the device has reached the mark."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: Mark) -> float:
        """Returns the device seconds from ``other`` to this later mark. Waits until the device has reached this
        mark."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self.wait()
        return float(other._event.elapsed_time(self._event)) / 1e3
