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
    done = [record for record in records if record.done]
    seconds = max(end - start, 1e-9)
    inputs = sum(record.input_tokens for record in done)
    outputs = sum(record.tokens for record in records)
    begun = [record for record in records if record.chunks]
    summary: dict[str, Any] = {
        "completed": len(done),
        "failed": sum(record.error is not None for record in records),
        "interrupted": sum(not record.done and record.error is None for record in records),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    summary |= _spread("ttft", [record.chunks[0] - record.sent for record in begun])
    summary |= _spread(
        "tpot", [(record.chunks[-1] - record.chunks[0]) / (record.tokens - 1) for record in done if record.tokens > 1]
    )
    summary |= _spread("itl", [gap for record in begun for gap in np.diff(record.chunks)])
    spans = decode_only(records, clients)
    decoded = sum(_tokens_within(records, *span) for span in spans)
    together = sum(last - first for first, last in spans)
    summary["decode_only_seconds"] = together
    summary["decode_only_throughput"] = decoded / together if together else None
    return summary


def decode_only(records: Sequence[Record], clients: int) -> list[tuple[float, float]]:
    """Spans of time in which ``clients`` requests had their first token and not their last, and none waited for one."""
    changes: list[tuple[float, int, int]] = []  # when, change of those that wait, of those that decode
    for record in records:
        if record.chunks:
            changes += [(record.sent, 1, 0), (record.chunks[0], -1, 1), (record.chunks[-1], 0, -1)]
        elif record.error is None:
            changes.append((record.sent, 1, 0))
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
    for record in records:
        if record.chunks:
            first, last = np.searchsorted(record.chunks, (start, end), side="right")
            count += (last - first) * record.tokens / len(record.chunks)
    return count


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = np.asarray(seconds) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()) if len(values) else None,
        f"median_{name}_ms": float(np.median(values)) if len(values) else None,
        f"p99_{name}_ms": float(np.percentile(values, 99)) if len(values) else None,
    }
