"""The cases: which requests arrive at which time. Every engine gets the same requests."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields, replace

from shadowkv.bench.arrivals import Arrival, draw_arrivals

CASES = ("poisson", "limits", "at-once", "long", "mixed")
DIRECT = ("poisson", "at-once")
"""Cases of an engine without a server."""

LIMITS = {"ttft": 200.0, "tpot": 20.0}
"""Limits in milliseconds, for the first token (``ttft``) and per later token (``tpot``). Every row's goodput counts the
requests within both. The case ``limits`` searches for the highest rate at which 99 % of the requests stay within
both."""

SEED, WARM_UP_SEED, SEARCH_SEED = 0, 1 << 20, 1 << 21
"""Seed of a case's requests, seed of the warm-up requests, and first seed of the runs of a search. They are so far
apart that no two runs have a prompt in common, which a server could have cached."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, rates in requests a second: ``--set`` changes them, for small models and quick runs."""

    prompt: int = 1024
    answer: int = 256
    requests: int = 400
    rate: float = 12.0
    at_once: int = 256
    long_prompt: int = 61184
    long_requests: int = 24
    long_rate: float = 0.25
    mixed_rate: float = 8.0
    mixed_seconds: float = 60.0
    mixed_prompt: int = 122000
    mixed_every: float = 20.0


def parse_change(text: str) -> tuple[str, float]:
    """Parses a field of Shape and its value, such as ``prompt=128``. Raises ArgumentTypeError for any other text."""
    name, _, value = text.partition("=")
    types = {field.name: type(field.default) for field in fields(Shape)}
    try:
        number = types[name](value)
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, with a name of {', '.join(types)}") from error
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return name, number


def rate_of(case: str, shape: Shape) -> float | None:
    """Returns the requests per second of a case. None if all arrive at once, or if the case searches for the rate."""
    return {"poisson": shape.rate, "long": shape.long_rate, "mixed": shape.mixed_rate}.get(case)


def arrivals_of(case: str, shape: Shape) -> list[Arrival]:
    """Returns the requests of a case; for ``limits``, those of the first run."""
    short = shape.prompt, shape.answer
    if case == "at-once":
        return draw_arrivals(shape.at_once, math.inf, *short, SEED + 1)
    if case == "long":
        return draw_arrivals(shape.long_requests, shape.long_rate, shape.long_prompt, shape.answer, SEED + 2)
    if case == "mixed":
        count = max(1, round(shape.mixed_rate * shape.mixed_seconds))
        arrivals = draw_arrivals(count, shape.mixed_rate, *short, SEED + 3)
        # The first long request arrives half a period after the start, when short requests are running.
        prompts = max(1, round(shape.mixed_seconds / shape.mixed_every))
        seeds = draw_arrivals(prompts, math.inf, shape.mixed_prompt, shape.answer, SEED + 4)
        longs = [replace(one, timestamp=(n + 0.5) * shape.mixed_every) for n, one in enumerate(seeds)]
        return sorted([*arrivals, *longs], key=lambda arrival: arrival.timestamp)
    return draw_arrivals(shape.requests, shape.rate, *short, SEED if case == "poisson" else SEARCH_SEED)


def warm_up_of(case: str, shape: Shape) -> list[Arrival]:
    """Returns warm-up requests: a few of each prompt length of a case, all at once, with short answers. After them,
    everything that is loaded or compiled on first use is ready."""
    lengths = {arrival.input_length for arrival in arrivals_of(case, shape)}
    few = {length: 16 if length == shape.prompt else 1 for length in lengths}
    answer = min(8, shape.answer)
    return [one for length in lengths for one in draw_arrivals(few[length], math.inf, length, answer, WARM_UP_SEED)]
