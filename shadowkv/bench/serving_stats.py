"""Statistics of a serving benchmark: times of each request's tokens, and figures with the names and definitions of
``vllm bench serve``.

An answer arrives in pieces, each with one or more tokens. Four metrics are measured per request. ``ttft`` is the time
from sending (including connecting) to the first piece. ``e2el`` is the time from sending to the last piece. ``tpot`` is
the time from the first piece to the last, divided by the number of tokens after the first, as counted by the server's
``usage``. ``itl`` are the gaps between pieces; a piece with several tokens ends one gap.

Decode-only figures are this project's own. They cover the time in which all parallel requests had received their first
token, but not their last. The server did not prefill anything in that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
"""Metrics with one value per request, which goodput can limit."""


@dataclass
class Record:
    """One request; times are in seconds on one clock.

    Attributes:
        chunks: arrival times of the answer's pieces.
        output_tokens: number of the answer's tokens, as counted by the server; 0 until it is known. Until then, each
            piece counts as a token.
        done: whether the answer is complete.
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

    def seconds(self, name: str) -> float | None:
        """Returns the value of a metric in ``LIMITED``, in seconds; None while the value is unknown. The ``tpot`` of an
        answer of one token is always None."""
        if not self.chunks or (name != "ttft" and not self.done) or (name == "tpot" and self.tokens < 2):
            return None
        if name == "tpot":
            return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)
        return self.chunks[0 if name == "ttft" else -1] - self.sent

    def gaps(self) -> list[float]:
        """Seconds between the answer's pieces."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether the answer is complete and meets ``limits``: maximum values in ms of metrics in ``LIMITED``. An
        answer of one token meets every limit of ``tpot``."""
        if not self.done or not self.chunks:
            return False
        return all(1e3 * (self.seconds(name) or 0.0) <= limit for name, limit in limits.items())


def figures(
    records: Sequence[Record], clients: int, start: float, end: float, *, percentiles: Sequence[float] = (99,)
) -> dict[str, Any]:
    """Computes rates and times of requests that ran between ``start`` and ``end``. Rates are in tokens per second, and
    ``request_throughput`` is in requests per second. Times in names that end with ``_ms`` are in ms, others in seconds.

    ``clients`` is the maximum number of requests in flight. Each of ``METRICS`` is reported with mean, median,
    standard deviation and ``percentiles``. Figures without measurements are None.
    """
    done = [record for record in records if record.done]
    seconds = max(end - start, 1e-9)
    inputs = sum(record.input_tokens for record in done)
    outputs = sum(record.tokens for record in records)
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
    for name in METRICS:
        if name == "itl":
            values = [gap for record in records for gap in record.gaps()]
        else:
            values = [value for record in records if (value := record.seconds(name)) is not None]
        summary |= spread(name, values, percentiles)
    spans = decode_only(records, clients)
    decoded = sum(_tokens_within(records, *span) for span in spans)
    together = sum(last - first for first, last in spans)
    summary["decode_only_seconds"] = together
    summary["decode_only_throughput"] = decoded / together if together else None
    return summary


def goodput(records: Sequence[Record], asked: int, seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Counts the requests that met all ``limits`` (ms). Returns their number per second, as vLLM defines it, and their
    share of the ``asked`` requests. Requests that failed or were never sent have not met the limits."""
    good = sum(record.meets(limits) for record in records)
    return {"goodput": dict(limits), "request_goodput": good / max(seconds, 1e-9), "good_share": good / asked}


def details(record: Record, start: float) -> dict[str, Any]:
    """Returns one request in the form of result files: the time at which it was sent, in seconds after ``start``, its
    lengths, and its latencies."""
    gaps = record.gaps()
    return {
        "sent_s": record.sent - start,
        "input_len": record.input_tokens,
        "output_len": record.tokens,
        **{f"{name}_ms": _in_ms(record.seconds(name)) for name in LIMITED},
        "max_itl_ms": _in_ms(max(gaps)) if gaps else None,
        "pieces": len(record.chunks),
        "error": record.error,
    }


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def decode_only(records: Sequence[Record], clients: int) -> list[tuple[float, float]]:
    """Returns the time spans (start, end) in which at least ``clients`` requests had their first token but not their
    last, and no request waited for its first token."""
    changes: list[tuple[float, int, int]] = []  # time, changes in the numbers of waiting and of decoding requests
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
    """Returns the number of tokens that arrived between ``start`` and ``end``. All pieces of an answer are assumed to
    have equally many tokens."""
    count = 0.0
    for record in records:
        if record.chunks:
            first, last = np.searchsorted(record.chunks, (start, end), side="right")
            count += (last - first) * record.tokens / len(record.chunks)
    return count


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float] = (99,)) -> dict[str, float | None]:
    """Computes mean, median, standard deviation and percentiles in ms. All are None without measurements."""
    values, some = np.asarray(seconds) * 1e3, len(seconds) > 0
    return {
        f"mean_{name}_ms": float(values.mean()) if some else None,
        f"median_{name}_ms": float(np.median(values)) if some else None,
        f"std_{name}_ms": float(values.std()) if some else None,
        **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) if some else None for p in percentiles},
    }
