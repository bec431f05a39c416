"""How long a server under load takes to answer /health."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import httpx

INTERVAL_SECONDS = 0.05


class HealthProbe:
    """Requests /health repeatedly, on its own thread and connection, while its context is open.

    Args:
        url: the server's.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._seconds: list[float] = []
        self.faults: list[str] = []

    def summary(self) -> dict[str, float]:
        """Latencies in milliseconds."""
        ordered = sorted(self._seconds) or [float("nan")]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            f"health {name} ms": round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1)
            for name, share in shares.items()
        }

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.wait(INTERVAL_SECONDS):
                start = time.monotonic()
                try:
                    response = client.get("/health")
                except httpx.HTTPError as error:
                    self.faults.append(f"health: {type(error).__name__}: {error}")
                else:
                    self._seconds.append(time.monotonic() - start)
                    if response.status_code != 200:
                        self.faults.append(f"health: {response.status_code}: {response.text[:200]}")

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
