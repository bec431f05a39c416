"""Arrival times and lengths of requests: drawn at a rate, or read from a trace of an earlier run.

A trace is a file with one JSON object per line. Three of its fields are those that guidellm's ``trace_synthetic``
reads: ``timestamp`` in seconds after the start, ``input_length`` and ``output_length`` in tokens. The fourth is
``seed``, from which the prompt is drawn.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Arrival:
    """A request before it is sent: when to send it in seconds after the start, its lengths in tokens, and the seed of
    its prompt."""

    timestamp: float
    input_length: int
    output_length: int
    seed: int

    def prompt(self, vocab_size: int) -> list[int]:
        """Draws the prompt's token ids [input_length], each below ``vocab_size``. They depend only on the seed, the
        length and ``vocab_size``, so every replay of a trace with the same vocabulary size has the same prompts."""
        return random.Random(self.seed).choices(range(vocab_size), k=self.input_length)


def draw_arrivals(
    count: int, rate: float, input_length: int, output_length: int, seed: int, burstiness: float = 1.0
) -> list[Arrival]:
    """Draws ``count`` requests at ``rate`` per second, in order of arrival. With an infinite rate all arrive at once.

    Gaps between arrivals are drawn as in vLLM, from a gamma distribution with shape ``burstiness``. With ``burstiness``
    1, the arrivals are a Poisson process; with infinity, they are evenly spaced. Gaps are scaled so that the last
    request arrives after exactly ``count / rate`` seconds.
    """
    draw = random.Random(seed)
    seeds = [draw.getrandbits(32) for _ in range(count)]
    if math.isinf(rate):
        times = [0.0] * count
    else:
        gaps = [1.0 if math.isinf(burstiness) else draw.gammavariate(burstiness, 1 / burstiness) for _ in range(count)]
        total = sum(gaps)
        times = [elapsed / total * count / rate for elapsed in accumulate(gaps)]
    return [Arrival(time, input_length, output_length, one) for time, one in zip(times, seeds, strict=True)]


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Writes a trace."""
    path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals), encoding="utf-8")


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace. Returns its requests in order of arrival. The seed of a line without a seed is the line's number.

    Raises ValueError for a file that cannot be read, is not a trace or has no requests.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
        raise ValueError(f"the trace {path} cannot be read: {reason}; a trace has one JSON object per line") from error
    arrivals = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
            arrival = Arrival(
                float(fields["timestamp"]),
                int(fields["input_length"]),
                int(fields["output_length"]),
                int(fields.get("seed", number)),
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a request with timestamp and lengths") from error
        if not (arrival.timestamp >= 0 and arrival.input_length > 0 and arrival.output_length > 0):
            raise ValueError(f"{path}, line {number}: timestamp must not be negative, and lengths must be positive")
        arrivals.append(arrival)
    if not arrivals:
        raise ValueError(f"{path} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.timestamp)
