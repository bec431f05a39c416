"""Batches of rows of several lengths: how much longer do their steps take than those of their parts, each alone, less
what every step costs?

Every step reads the weights, whatever its rows are: that is timed with one row of ``FLOOR_TOKENS``. All rows have
random keys and values.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
from typing import Any, NamedTuple

from benchmarks.sweeps.engines import profile, window
from benchmarks.sweeps.synthetic import begin, scatter
from shadowkv.engine.engine import Engine

FLOOR_TOKENS = 1024

RAGGED = 64
"""Rows are up to this many tokens shorter than said: they seal at different steps."""


class Part(NamedTuple):
    """``rows`` sequences of ``tokens`` each."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


Mix = tuple[Part, ...]


def mix_of(text: str) -> Mix:
    """The parts of ``1x1000000,40x61440``; raises ArgumentTypeError for anything else."""
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in text.split(",")]
    parts = tuple(Part(*map(int, match.groups())) for match in matches if match)
    if len(parts) < max(2, len(matches)):
        raise argparse.ArgumentTypeError(f"{text!r} is not two or more parts of rows x tokens, as 1x1000000,40x61440")
    if min(part.tokens for part in parts) <= RAGGED:
        raise argparse.ArgumentTypeError(f"{text!r} has rows of {RAGGED} tokens or fewer")
    return parts


def mix_name(mix: Mix) -> str:
    """As ``mix_of`` takes it."""
    return ",".join(map(str, mix))


def time_mix(engine: Engine, mix: Mix, new: int, steps: int, windows: int) -> dict[str, Any]:
    """Milliseconds of a step: of the floor, of each part alone, of all together; and the ratio of the last to what the
    parts alone let expect. ``new``: tokens that a sequence gains at the most."""
    scatter(engine.cache)
    batches = {"floor": (Part(1, FLOOR_TOKENS),), **{str(part): (part,) for part in mix}, "together": mix}
    times, profiles = {}, {}
    for name, parts in batches.items():
        lengths = [part.tokens for part in parts for _ in range(part.rows)]
        step, profiles[name] = time_rows(engine, lengths, new, steps, windows)
        times[name] = 1e3 * step
    alone = sum(times[str(part)] for part in mix) - (len(mix) - 1) * times["floor"]
    return {"step_ms": times, "expected_ms": alone, "ratio": times["together"] / alone, "profiles": profiles}


def time_rows(engine: Engine, lengths: list[int], new: int, steps: int, windows: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a step of rows of these lengths, which leave the engine afterwards, and its profile."""
    draw, words = random.Random(0), range(min(1000, engine.model_config.vocab_size))
    prompts = [draw.choices(words, k=length - draw.randrange(RAGGED)) for length in lengths]
    begin(engine, prompts, new, synthetic=True)
    window(engine, steps, len(lengths))
    step = statistics.median(window(engine, steps, len(lengths)) for _ in range(windows))
    profiled = profile(engine)
    for row in range(len(lengths)):
        engine.abort(str(row))
    engine.step()
    return step, profiled
