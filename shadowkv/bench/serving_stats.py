"""What a serving benchmark measures: times of each request's tokens, and figures as of ``vllm bench serve``.

Figures have vLLM's names and definitions. Of a request: ``ttft``, from sending it (connecting included) to its first
piece; ``e2el``, to its last; ``tpot``, the time between those two over the tokens after the first, as many as the
server's ``usage`` counts; ``itl``, the gaps between its pieces. A piece that holds several tokens ends one gap, so gaps
are of pieces, and ``tpot`` alone is of tokens. Decode-only figures are ours: of the time in which every client's
request had its first token and none had its last, so that nothing was prefilled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
"""Those that a request has one of, which goodput can limit."""


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

    def seconds(self, name: str) -> float | None:
        """One of ``LIMITED``; None before it is over, and for ``tpot`` where the answer is one token."""
        if not self.chunks or (name != "ttft" and not self.done) or (name == "tpot" and self.tokens < 2):
            return None
        if name == "tpot":
            return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)
        return self.chunks[0 if name == "ttft" else -1] - self.sent

    def gaps(self) -> list[float]:
        """Seconds between its pieces."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether it came to its end within ``limits`` in ms, by names of ``LIMITED``; one token has no ``tpot``."""
        if not self.done or not self.chunks:
            return False
        return all(1e3 * (self.seconds(name) or 0.0) <= limit for name, limit in limits.items())


def figures(
    records: Sequence[Record],
    clients: int,
    start: float,
    end: float,
    *,
    metrics: Sequence[str] = METRICS[:3],
    percentiles: Sequence[float] = (99,),
) -> dict[str, Any]:
    """Rates in tokens per second and times in ms, of requests at work between ``start`` and ``end``.

    ``clients`` is the number of requests that are in flight together, ``metrics`` are those of ``METRICS`` whose mean,
    median, standard deviation and ``percentiles`` are told; figures that nothing was measured for are None.
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
    for name in metrics:
        if name == "itl":
            values = [gap for record in records for gap in record.gaps()]
        else:
            values = [value for record in records if (value := record.seconds(name)) is not None]
        summary |= _spread(name, values, percentiles)
    spans = decode_only(records, clients)
    decoded = sum(_tokens_within(records, *span) for span in spans)
    together = sum(last - first for first, last in spans)
    summary["decode_only_seconds"] = together
    summary["decode_only_throughput"] = decoded / together if together else None
    return summary


def goodput(records: Sequence[Record], asked: int, seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Requests a second that met all ``limits`` (ms), as vLLM counts them, and the share that they are of ``asked``:
    requests that failed or were never sent met none."""
    good = sum(record.meets(limits) for record in records)
    return {"goodput": dict(limits), "request_goodput": good / max(seconds, 1e-9), "good_share": good / asked}


def details(record: Record, start: float) -> dict[str, Any]:
    """One request as result files have it: when it was sent, in seconds after ``start``, its lengths and its times."""
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


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    values, some = np.asarray(seconds) * 1e3, len(seconds) > 0
    return {
        f"mean_{name}_ms": float(values.mean()) if some else None,
        f"median_{name}_ms": float(np.median(values)) if some else None,
        f"std_{name}_ms": float(values.std()) if some else None,
        **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) if some else None for p in percentiles},
    }
