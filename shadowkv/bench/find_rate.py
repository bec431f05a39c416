"""Finds the highest request rate that a server sustains within latency limits.

Measured rates are stored in a file, so that an interrupted search can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GOOD_SHARE = 0.99
"""A rate is good if at least this share of the requests meets all limits."""

TOLERANCE = 1.05
"""The search ends when the lowest rate that is not good exceeds the highest good rate by at most this factor."""

SHORTEST_SECONDS = 10.0
"""Minimum time over which the requests of a run arrive. Requests that arrive in less time are a burst, and a burst does
not measure a sustained rate."""

SLOWEST = 1 / 16
"""Lowest rate to try, as a share of the first rate. Runs at lower rates would take very long."""


def next_rate(shares: Mapping[float, float], first: float, most: float) -> float | None:
    """Returns the next rate to measure, or None if the search is over. ``shares`` maps each measured rate to the share
    of its requests that met all limits.

    The search doubles or halves the rate from ``first`` on, until one rate is good and a higher one is not. Then it
    bisects between these two. Rates do not exceed ``most``. The result depends only on the arguments, so a continued
    search tries the same rates as one without an interruption.
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
    """Returns the highest good rate below all rates that are not good, or None if there is no such rate."""
    lowest_bad = min((rate for rate, share in shares.items() if share < GOOD_SHARE), default=float("inf"))
    return max((rate for rate in shares if rate < lowest_bad), default=None)


def find_rate(
    path: Path,
    settings: Mapping[str, Any],
    first: float,
    requests: int,
    measure: Callable[[float, int], Mapping[str, Any]],
) -> dict[str, Any]:
    """Searches for the highest good rate. Returns the final content of the file ``path``: ``settings``, ``runs`` and
    ``highest_rate``.

    Args:
        path: the file of measured rates, which is created if it does not exist.
        settings: settings that all runs in the file must share.
        first: the first rate, in requests per second.
        requests: number of requests per run. With more requests, higher rates can be measured (``SHORTEST_SECONDS``).
        measure: function that measures a rate and returns figures, one of which is ``good_share``. Its second argument
            is the number of earlier runs. With it, each run can have other prompts: a server may have cached those of
            earlier runs.

    Raises ValueError if the file is not a result file of this search, or if its runs have other settings.
    """
    state: dict[str, Any] = {"settings": dict(settings), "runs": [], "highest_rate": None}
    if path.exists():
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            there = state["settings"]
            shares = {run["request_rate"]: run["good_share"] for run in state["runs"]}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a result file of this search; use another file") from error
        if there != json.loads(json.dumps(settings)):
            changed = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
            raise ValueError(f"{path} has runs with other values of {', '.join(changed)}; use another file")
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
        print(f"{requests} requests are too few for rates above {most:g} per second: use more requests", flush=True)
    return state
