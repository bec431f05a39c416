"""llama.cpp's ``/metrics`` page, computed from this server's own metrics (``--metrics-prefix llamacpp``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

PREFIX = "llamacpp"

Figures = Mapping[str, float]
"""Values of this server's own metrics, by name without the prefix."""

Value = Callable[[Figures], float]
"""Computes the value of one of llama.cpp's metrics."""


def _own(name: str) -> Value:
    return lambda figures: figures[name]


def _drafted(name: str) -> Value:
    """A metric of speculative decoding; 0 if drafts are off."""
    return lambda figures: figures.get(name, 0.0)


def _ratio(count: Value, seconds: str) -> Value:
    return lambda figures: count(figures) / figures[seconds] if figures[seconds] else 0.0


def _computed(figures: Figures) -> float:
    return figures["prompt_tokens_total"] - figures["prompt_tokens_cached_total"]


def _after_the_first(figures: Figures) -> float:
    return figures["request_generation_tokens_sum"] - figures["request_generation_tokens_count"]


COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("prompt_tokens_total", "Prompt tokens that were computed.", _computed),
    ("prompt_tokens_cached_total", "Prompt tokens found in the cache.", _own("prompt_tokens_cached_total")),
    ("prompt_seconds_total", "Seconds of work on prompts.", _own("request_prefill_time_seconds_sum")),
    ("tokens_predicted_total", "Tokens generated.", _own("generation_tokens_total")),
    (
        "tokens_predicted_seconds_total",
        "Seconds from the first to the last token, summed over requests that ended.",
        _own("request_decode_time_seconds_sum"),
    ),
    ("n_decode_total", "Engine steps that generated tokens.", _own("iteration_tokens_total_count")),
    ("n_tokens_max", "Tokens of the longest request that ended.", _own("longest_request_tokens")),
    *(
        (name, text, _drafted(name))
        for name, text in (
            ("spec_decode_num_draft_tokens_total", "Drafted tokens."),
            ("spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted."),
            ("spec_decode_num_drafts_total", "Drafts."),
        )
    ),
)
GAUGES: tuple[tuple[str, str, Value], ...] = (
    (
        "prompt_tokens_seconds",
        "Computed prompt tokens per second of work on prompts, averaged since the start.",
        _ratio(_computed, "request_prefill_time_seconds_sum"),
    ),
    (
        "predicted_tokens_seconds",
        "Tokens per second of a request after its first token, averaged since the start.",
        _ratio(_after_the_first, "request_decode_time_seconds_sum"),
    ),
    ("requests_processing", "Requests that own a sequence.", _own("num_requests_running")),
    ("requests_deferred", "Requests in the queue.", _own("num_requests_waiting")),
    (
        "n_busy_slots_per_decode",
        "Tokens generated per step, averaged since the start.",
        _ratio(_own("generation_tokens_total"), "iteration_tokens_total_count"),
    ),
)


def llama_page(metrics: Iterable[Metric]) -> bytes:
    """The page, as text: metrics without labels. Values that are unknown because the engine is dead are left out.

    Args:
        metrics: this server's metrics, whose names begin with ``PREFIX``.
    """
    figures = {
        sample.name.removeprefix(f"{PREFIX}:"): sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.labels.keys() <= {"model_name"}
    }
    lines = []
    for kind, rows in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, text, value in rows:
            try:
                number = floatToGoString(value(figures))
            except KeyError:
                continue
            full = f"{PREFIX}:{name}"
            lines.append(f"# HELP {full} {text}\n# TYPE {full} {kind}\n{full} {number}\n")
    return "".join(lines).encode()
