"""A step's shapes are known before the prompts of its new sequences are computed."""

from __future__ import annotations

import pytest
from driver import Stream, decode, make_cache, prefill

from shadowkv.kvcache.presets import preset

SPECS = {
    "full": preset("full"),
    "turbo": preset("turbo", rank=32, budget=64, values="rotated-4bit"),
    "quest": preset("quest", budget=64),
    "outliers": preset("shadowkv", rank=16, budget=64, outliers=3, place="device"),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("running", [[20], [900, 70]])
@pytest.mark.parametrize("joining", [[33], [360, 361], [2000], [64, 1500]])
def test_it_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch, name: str, running: list[int], joining: list[int]):
    cache = make_cache(SPECS[name])
    there = [Stream(n, cache.allocate(n, n + 100)) for n in running]
    prefill(cache, [(stream, stream.length or n) for stream, n in zip(there, running)])
    decode(cache, there)
    new = [Stream(n, cache.allocate(n, n + 100)) for n in joining]

    def shape() -> tuple[int, ...]:
        plan = cache.forecast_decode(
            [stream.sequence for stream in there], [(stream.sequence, n) for stream, n in zip(new, joining)]
        )
        return cache.rounded(plan, 8).shape

    found, end = [shape()], cache.end_prefill
    monkeypatch.setattr(cache, "end_prefill", lambda batch: (found.append(shape()), end(batch)))
    prefill(cache, list(zip(new, joining)))
    plan = cache.plan_decode([stream.sequence for stream in [*there, *new]])
    assert found == [cache.rounded(plan, 8).shape] * 2


def test_what_does_not_follow_from_lengths_is_not_known() -> None:
    """Sequences of several segments, and values on the host, which are fetched in micro-batches."""
    cache = make_cache(SPECS["turbo"])
    stream = Stream(0, cache.allocate(500, 3000))
    prefill(cache, [(stream, 500)])
    prefill(cache, [(stream, 1500)])
    other = cache.allocate(40, 60)
    assert stream.sequence.segment_state.segments == 2
    assert cache.forecast_decode([stream.sequence], [(other, 40)]) is None
    host = make_cache(preset("shadowkv", rank=16, budget=64))
    stream, other = Stream(0, host.allocate(500, 600)), host.allocate(40, 60)
    prefill(host, [(stream, 500)])
    assert host.forecast_decode([stream.sequence], [(other, 40)]) is None


@pytest.mark.parametrize(
    "kv", ["turbo:budget=0.5", "turbo:min_budget=640", "quest:budget=64", "shadowkv:budget=0.3,place=device"]
)
def test_no_segment_selects_more_than_a_graph_has_columns_for(kv: str) -> None:
    """Also where the tail waits, exact, for a segment of its own, and where a later turn has begun one."""
    cache = make_cache(preset(kv))
    stream = Stream(0, cache.allocate(1000, 2600))
    prefill(cache, [(stream, 1000)])
    for turn in (600, 1):
        for _ in range(turn):
            plan = cache.plan_decode([stream.sequence])
            (own,), (shapes,) = plan.groups, cache.rounded(plan, 4).groups
            assert (own.segments.top_k + own.segments.sampled).max() <= own.max_budget <= shapes.max_budget
            decode(cache, [stream])
        if turn > 1:
            cache.extend(stream.sequence, stream.length + 700, 2600)
            prefill(cache, [(stream, 700)])
