"""What a serving benchmark measures: times of each request's tokens, and figures as of ``vllm bench serve``.

Figures have vLLM's names. One is ours: the decode-only rate, of the time in which every client's request had its first
token and none had its last, so that nothing was prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Record:
    """One request; times in seconds on one clock.

    Attributes:
        chunks: when each piece of the answer came.
        output_tokens: as the server counts them; a piece is taken for a token until it has.
        done: whether the answer came to its end.
    """

    sent: float
    input_tokens: int
    chunks: list[float] = field(default_factory=list)
    output_tokens: int = 0
    done: bool = False
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.output_tokens or len(self.chunks)


def figures(records: Sequence[Record], clients: int, start: float, end: float) -> dict[str, Any]:
    """Rates in tokens per second and times in ms, of requests at work between ``start`` and ``end``.

    ``clients`` is the number of requests that are in flight together; figures that nothing was measured for are None.
    """
    done = [one for one in records if one.done]
    seconds = max(end - start, 1e-9)
    inputs = sum(one.input_tokens for one in done)
    outputs = sum(one.tokens for one in records)
    begun = [one for one in records if one.chunks]
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": sum(one.error is not None for one in records),
        "interrupted": sum(not one.done and one.error is None for one in records),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    found |= _spread("ttft", [one.chunks[0] - one.sent for one in begun])
    found |= _spread("tpot", [(one.chunks[-1] - one.chunks[0]) / (one.tokens - 1) for one in done if one.tokens > 1])
    found |= _spread("itl", [gap for one in begun for gap in np.diff(one.chunks)])
    spans = decode_only(records, clients)
    decoded = sum(_tokens_within(records, *span) for span in spans)
    together = sum(last - first for first, last in spans)
    found["decode_only_seconds"] = together
    found["decode_only_throughput"] = decoded / together if together else None
    return found


def decode_only(records: Sequence[Record], clients: int) -> list[tuple[float, float]]:
    """Spans of time in which ``clients`` requests had their first token and not their last, and none waited for one."""
    changes: list[tuple[float, int, int]] = []  # when, change of those that wait, of those that decode
    for one in records:
        if one.chunks:
            changes += [(one.sent, 1, 0), (one.chunks[0], -1, 1), (one.chunks[-1], 0, -1)]
        elif one.error is None:
            changes.append((one.sent, 1, 0))
    spans, waiting, decoding, begun = [], 0, 0, None
    for when, *change in sorted(changes):
        if begun is not None and when > begun:
            spans.append((begun, when))
        waiting, decoding = waiting + change[0], decoding + change[1]
        begun = when if not waiting and decoding >= clients else None
    return spans


def _tokens_within(records: Sequence[Record], start: float, end: float) -> float:
    """Tokens that came after ``start``, until ``end``; those of an answer are spread evenly over its pieces."""
    count = 0.0
    for one in records:
        if one.chunks:
            first, last = np.searchsorted(one.chunks, (start, end), side="right")
            count += (last - first) * one.tokens / len(one.chunks)
    return count


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = np.asarray(seconds) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()) if len(values) else None,
        f"median_{name}_ms": float(np.median(values)) if len(values) else None,
        f"p99_{name}_ms": float(np.percentile(values, 99)) if len(values) else None,
    }
