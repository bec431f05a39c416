"""The highest rate of requests that a server answers within limits: where its curve of latency has its knee.

Every rate that was measured stays in a file, so that a search that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GOOD_SHARE = 0.99
"""Of the requests, which must meet all limits."""

TOLERANCE = 1.05
"""A rate is the highest where one that is higher by this factor at the most was too high."""

SHORTEST_SECONDS = 10.0
"""Arrivals of a run: all requests in less than this are a burst, which says nothing about a rate."""

SLOWEST = 1 / 16
"""Of the first rate: nothing is tried below, where runs take ever longer."""


def next_rate(shares: Mapping[float, float], first: float, most: float) -> float | None:
    """What to measure after rates whose shares of good requests are known; None when the search is over.

    Doubles or halves from ``first`` until one rate was good and a higher one was not, then bisects between them; rates
    are ``most`` at the most. It depends on ``shares`` alone.
    """
    if not shares:
        return first
    bad = [rate for rate, share in shares.items() if share < GOOD_SHARE]
    good = highest_rate(shares)
    if not bad:
        return min(2 * max(shares), most) if max(shares) < most else None
    high = min(bad)
    if good is None:
        return high / 2 if high / 2 >= SLOWEST * first else None
    return None if high / good <= TOLERANCE else float(f"{(good + high) / 2:.4g}")


def highest_rate(shares: Mapping[float, float]) -> float | None:
    """The highest good rate below all that were not; None if there is none."""
    lowest_bad = min((rate for rate, share in shares.items() if share < GOOD_SHARE), default=float("inf"))
    return max((rate for rate in shares if rate < lowest_bad), default=None)


def find_rate(
    path: Path,
    settings: Mapping[str, Any],
    first: float,
    requests: int,
    measure: Callable[[float, int], Mapping[str, Any]],
) -> dict[str, Any]:
    """Searches, and returns what ``path`` has in the end: ``settings``, ``runs`` and ``highest_rate``.

    Args:
        path: the file of measured rates, which is made if it does not exist.
        settings: what must be the same in every run of the file.
        first: where the search begins, in requests a second.
        requests: of a run; with more, higher rates can be tried.
        measure: figures at a rate, with ``good_share``; also gets how many runs came before, so that no two have the
            same prompts, which a server may have cached.

    Raises ValueError if the file has runs with other settings, or none.
    """
    state: dict[str, Any] = {"settings": dict(settings), "runs": [], "highest_rate": None}
    if path.exists():
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            there = state["settings"]
            shares = {run["request_rate"]: run["good_share"] for run in state["runs"]}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} has no runs of a search; use another file") from error
        if there != json.loads(json.dumps(settings)):
            changed = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
            raise ValueError(f"{path} has runs with another {', '.join(changed)}; use another file")
    else:
        shares = {}
    most = max(first, requests / SHORTEST_SECONDS)
    while (rate := next_rate(shares, first, most)) is not None:
        run = {"request_rate": rate, **measure(rate, len(state["runs"]))}
        state["runs"].append(run)
        shares[rate] = run["good_share"]
        state["highest_rate"] = highest_rate(shares)
        path.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        print(f"{rate:g} requests/s: {100 * shares[rate]:.1f} % within the limits", flush=True)
    if state["highest_rate"] == most:
        print(f"{requests} requests at more than {most:g} a second would be a burst: more are needed", flush=True)
    return state
