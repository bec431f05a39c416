"""How a long prompt affects requests: gaps between tokens of those that decode, and how long a short one waits."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import numpy as np

from benchmarks.sweeps.engines import greedy, random_prompt, seconds_to_first_token, step
from shadowkv.engine.engine import Engine

SETTLED = 32
"""Tokens that every request has before the long prompt arrives: captures of their graphs are over by then. The graph
of the batch that it joins is captured in the last gap, as in a server."""

LEFT = 8
"""Tokens of a long prompt's answer: it is still running when the step of its first one is over."""


class GapCase(NamedTuple):
    """``decoding`` requests beside a prompt of ``behind`` tokens, then one of ``probe`` behind ``probe_behind``."""

    decoding: int
    behind: int
    probe: int
    probe_behind: int
    prompt: int = 1024
    answer: int = 8192
    delay: float = 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.behind, self.probe_behind, self.prompt + self.answer) + 64


GAP_CASE = GapCase(16, 61440, 512, 124928)


def measure_gaps(engine: Engine, case: GapCase) -> dict[str, float]:
    """Figures of both; the engine is left empty afterwards."""
    draw = random.Random(0)
    seconds_to_first_token(engine, random_prompt(engine, case.behind, draw))  # creates all that its shapes need once
    gaps = gaps_beside(engine, case, draw)
    print("gaps of a request, ms:", *(f"{1e3 * gap:.1f}" for gap in gaps[0]), flush=True)
    p50, p99 = np.percentile(1e3 * np.concatenate(gaps), (50, 99)).tolist()
    return {"gap_p50_ms": p50, "gap_p99_ms": p99, "probe_ttft_s": wait_behind(engine, case, draw)}


def gaps_beside(engine: Engine, case: GapCase, draw: random.Random) -> list[list[float]]:
    """Seconds between the tokens of each decoding request, from the moment a long prompt is submitted to its first
    token, in order. Raises RuntimeError if answers end before that, or leave the prompt no room."""
    times: dict[str, list[float]] = {str(number): [] for number in range(case.decoding)}
    for name in times:
        engine.add_request(name, random_prompt(engine, case.prompt, draw), greedy(case.answer))
    prompt = random_prompt(engine, case.behind, draw)  # takes as long as a step or two
    while min(map(len, times.values())) < SETTLED:
        _take(engine, times)
    times = {name: [seen[-1]] for name, seen in times.items()}
    engine.add_request("long", prompt, greedy(LEFT))
    there = False
    while not there:
        there = "long" in _take(engine, times)
        if engine.num_running <= case.decoding:
            raise RuntimeError(f"answers of {case.answer} tokens left no room for a prefill of {case.behind}, or ended")
    for name in (*times, "long"):
        engine.abort(name)
    return [np.diff(seen).tolist() for seen in times.values()]


def _take(engine: Engine, times: dict[str, list[float]]) -> set[str]:
    """A step; records when tokens arrived, and returns for which requests."""
    names, now = {output.request_id for output in step(engine)}, time.perf_counter()
    for name in names & times.keys():
        times[name].append(now)
    return names


def wait_behind(engine: Engine, case: GapCase, draw: random.Random) -> float:
    """Seconds to the first token of a short prompt that arrives while a long one is computed alone."""
    prompt, probe = (random_prompt(engine, tokens, draw) for tokens in (case.probe_behind, case.probe))
    start = time.perf_counter()
    engine.add_request("long", prompt, greedy(LEFT))
    while time.perf_counter() - start < case.delay:
        step(engine)
    start = time.perf_counter()
    engine.add_request("probe", probe, greedy(1))
    while "probe" not in _take(engine, {}):
        pass
    seconds = time.perf_counter() - start
    engine.abort("long")
    return seconds
