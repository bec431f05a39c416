"""When tokens get a state of their own, and that a sequence holds from the start all that it needs as it grows."""

from dataclasses import replace

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, make_cache, plain_attention, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.parts.index_sketch import sketch_maps
from shadowkv.kvcache.policy import spec as spec_module
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS, SETTLED, UNLIMITED, Growth, SegmentState
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.sequence import CachedSequence

specs = st.builds(
    KVSpec,
    index=st.just("chunk-mean"),
    keys=st.sampled_from(["dense", "low-rank"]),
    budget=st.sampled_from([None, 64]),
    chunk=st.sampled_from([1, 8, 64]),
    outliers=st.sampled_from([0, 3, 20]),
    local=st.integers(1, 200),
    dense_below=st.sampled_from([None, 700]),
)
tokens = st.integers(0, 2000)


def learns(spec: KVSpec) -> bool:
    return spec.keys == "low-rank"


@st.composite
def segment_states(draw: st.DrawFn, growth: Growth) -> SegmentState:
    """Dense, or compressed up to some page with a state that is valid some way on."""
    segments = draw(st.integers(0, MAX_SEGMENTS if growth.learns else 1))
    if not segments:
        return SegmentState()
    compressed = PAGE * draw(st.integers(1, 30))
    if segments == MAX_SEGMENTS or not growth.learns:
        return SegmentState(compressed, segments, UNLIMITED, UNLIMITED)
    valid_until = compressed + draw(st.integers(-200, 1000))
    return SegmentState(compressed, segments, valid_until, max(compressed, valid_until) + draw(st.integers(0, 3000)))


def walk(growth: Growth, at: SegmentState, start: int, capacity: int) -> tuple[int, int]:
    """Segments that a sequence gains and its longest tail while it is compressed, one token after the other."""
    spec, before, longest = growth.spec, at.segments, 0

    after = growth.compressed(at, start, start == capacity)
    at = growth.fitted(at, after.tokens, start) if after.fits else replace(at, compressed=after.tokens)
    for length in range(start, capacity + 1):
        if at.segments:
            longest = max(longest, length - at.compressed)
        if length == capacity:
            break
        tail = length - at.compressed  # what is compressed before the step that adds a token
        if at.compressed + PAGE > at.generated_valid_until and tail >= growth.late_limit(at.segments):
            after = growth.compressed(at, length, False)
            assert after.fits
            at = growth.fitted(at, after.tokens, length)
        if (
            at.segments
            and at.compressed + PAGE <= at.generated_valid_until
            and length - at.compressed >= spec.local + PAGE
        ):
            at = replace(at, compressed=at.compressed + PAGE)
    return at.segments - before, longest


@settings(deadline=None, max_examples=300)
@given(st.data(), specs, tokens, tokens)
def test_a_forecast_is_an_upper_bound_of_what_is_needed_on_the_way(data, spec, new, more):
    growth = Growth(resolve(spec, SHAPE), learns(spec))
    at = data.draw(segment_states(growth))
    start = at.compressed + max(1, new)
    forecast = growth.forecast(at, start, start + more)
    segments, tail = walk(growth, at, start, start + more)
    assert segments <= forecast.segments
    assert tail <= max(forecast.tail, spec.ring_pages * PAGE)
    # And no loose one: no sequence waits for what hardly any takes.
    assert forecast.segments <= segments + 1
    assert forecast.tail <= growth.spec.exact_limit + 1


@settings(deadline=None)
@given(st.data(), specs, tokens)
def test_what_is_compressed_grows_with_the_sequence_and_leaves_the_newest_exact(data, spec, new):
    growth = Growth(resolve(spec, SHAPE), learns(spec))
    at = data.draw(segment_states(growth))
    length = at.compressed + new
    after = growth.compressed(at, length, final=False)
    assert after.tokens % PAGE == 0
    assert at.compressed <= after.tokens <= max(at.compressed, length - spec.local)
    assert after.fits == (after.tokens > max(at.compressed, at.valid_until))
    if after.fits:
        assert length - at.compressed >= growth.limit(at.segments)


def feed(cache: KVCache, sequence: CachedSequence, count: int) -> None:
    """Stores random keys and values of new tokens, without attention."""
    batch = cache.prefill_batch([(sequence, count)])
    for layer in range(SHAPE.num_layers):
        k, v = torch.randn(2, count, SHAPE.num_kv_heads, SHAPE.head_dim, device=DEVICE)
        cache.append(layer, k, v, batch.block(0, count))
        cache.finish_prefill(layer, batch)
    cache.end_prefill(batch)
    check(cache, sequence)


def step(cache: KVCache, sequence: CachedSequence) -> None:
    """A decode step as the host sees it."""
    cache.end_decode(cache.plan_decode([sequence]))
    check(cache, sequence)


def check(cache: KVCache, sequence: CachedSequence) -> None:
    pages, tables = -(-sequence.length // PAGE) - sequence.compressed // PAGE, cache.groups[0].pool.tables
    assert pages <= len(sequence.ring if sequence.path else sequence.dense), "two pages of the tail in one place"
    if sequence.path:
        page_ids = sequence.static + sequence.ring
        assert tables.exact[sequence.slot, : len(page_ids)].tolist() == page_ids


turns = st.lists(
    st.tuples(st.integers(1, 700), st.integers(0, 250), st.sampled_from(["trim", "go on", "fork", "cut"])), max_size=12
)


@settings(deadline=None, max_examples=40)
@given(specs, turns, st.sampled_from([1000, 2000, 4096]), st.randoms(use_true_random=False))
def test_a_sequence_that_is_extended_many_times_never_lacks_anything(spec, turns, max_model_len, draw):
    cache = make_cache(spec, slots=20, max_model_len=max_model_len)  # rows for the segments of a fork, too
    sequence = cache.allocate(1, 1)
    feed(cache, sequence, 1)
    for new, room, end in turns:
        start = min(sequence.length + new, max_model_len)
        capacity = min(start + room, max_model_len)
        if start == sequence.length:
            break
        cache.extend(sequence, start, capacity)
        feed(cache, sequence, start - sequence.length)
        for _ in range(draw.randint(0, capacity - start)):
            step(cache, sequence)
        if end == "trim":
            cache.trim(sequence)
        elif end == "cut":
            cache.truncate(sequence, draw.randint(max(1, sequence.fixed), sequence.length))
        elif end == "fork":
            at = cache.fork_point(sequence, draw.randint(1, sequence.length))
            if at:
                child = cache.fork(sequence, at, at, at)
                cache.release(sequence)
                sequence = child
                check(cache, sequence)
    cache.release(sequence)
    assert cache.free == cache.total


@pytest.mark.parametrize("outliers", [0, 20])
def test_the_last_of_the_most_segments_serves_whatever_comes(outliers: int) -> None:
    spec = preset("shadowkv", rank=16, budget=64, outliers=outliers)
    cache = make_cache(spec, blocks=900, max_model_len=16384)
    sequence = cache.allocate(1, 1)
    for number in range(1, MAX_SEGMENTS + 3):
        valid_until = sequence.path[-1].valid_until if sequence.path else 0
        if number > MAX_SEGMENTS:
            assert valid_until == UNLIMITED
            valid_until = sequence.length
        start = max(sequence.length + spec.exact_limit, valid_until + PAGE + spec.local) + 1
        cache.extend(sequence, start, start)
        feed(cache, sequence, start - sequence.length)
        assert len(sequence.path) == min(number, MAX_SEGMENTS)
    assert len({segment.state for segment in sequence.path}) == MAX_SEGMENTS
    assert len(sequence.static) == spec.static_pages + (MAX_SEGMENTS - 1) * spec.outlier_pages
    assert sequence.length - sequence.compressed < spec.local + PAGE
    cache.release(sequence)


def test_states_of_all_segments_to_come_are_held_from_the_start() -> None:
    """So that a sequence's answer does not depend on what else is there."""
    cache = make_cache(preset("turbo", rank=16, budget=64, values="rotated-4bit"), slots=2, blocks=900)
    one = cache.allocate(300, 1200)
    held = cache.total["states"] - cache.free["states"]
    feed(cache, one, 300)
    assert len(one.path) + len(one.state_reserve) == held > 2
    with pytest.raises(OutOfBlocks):
        cache.allocate(300, 3000)
    for _ in range(900):
        step(cache, one)
    assert 2 < len(one.path) <= held <= len(one.path) + 1
    cache.release(one)
    assert cache.free == cache.total


def test_a_settled_state_serves_whatever_is_generated() -> None:
    cache = make_cache(preset("turbo", rank=16, budget=64, values="rotated-4bit"), slots=1, blocks=900)
    sequence = cache.allocate(SETTLED, 4000)
    assert cache.total["states"] - cache.free["states"] == 1
    feed(cache, sequence, SETTLED)
    for _ in range(700):
        step(cache, sequence)
    assert len(sequence.path) == 1 and sequence.length - sequence.compressed <= cache.spec.local + PAGE
    # But not a prompt of that length, which may be about anything.
    start = sequence.length + 900
    cache.extend(sequence, start, start)
    feed(cache, sequence, 900)
    assert len(sequence.path) == 2


LEARNED = {
    "shadowkv": preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0, outliers=3),
    "low-rank-attend-all": KVSpec(keys="low-rank", settings={"rank": SHAPE.kv_dim}),
    "snapkv-on-host": preset("snapkv:chunk=8,outliers=3,place=host", budget=1.0),
}


@pytest.mark.parametrize("name", LEARNED)
def test_segments_that_keep_everything_equal_plain_attention(name: str) -> None:
    """Some begin by decoding and some by a turn, in a batch with sequences that have one or none."""
    cache = make_cache(LEARNED[name])
    lengths = (110, 10, 700, 1)
    streams = [Stream(seed, cache.allocate(n, n + 330)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)))
    for _ in range(330):
        decode(cache, streams[:3])
    assert len(streams[0].sequence.path) > 1  # by decoding
    for stream, new in zip(streams, (700, 900, 10)):
        cache.extend(stream.sequence, stream.length + new, stream.length + new + 80)
        prefill(cache, [(stream, new)])
    for _ in range(80):
        decode(cache, streams)
    counts = [len(stream.sequence.path) for stream in streams]
    assert counts[0] > 2 and counts[1] > 1 and counts[3] == 0
    assert len(set(counts)) > 2
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [0, 1, 100, 700])
def test_a_prompt_just_short_of_being_compressed_is_answered(more: int) -> None:
    spec = preset("turbo:dense_below=200", rank=16, budget=64, values="rotated-4bit")
    cache = make_cache(spec, slots=3, max_model_len=1024)
    limit, late = cache.spec.dense_limit, cache.spec.late_limit
    for length in (limit - 1, limit, limit + 1):
        stream = Stream(length, cache.allocate(length, length + more))
        prefill(cache, [(stream, length)])
        assert bool(stream.sequence.path) == (length > limit)
        for _ in range(more):
            step(cache, stream.sequence)
        assert bool(stream.sequence.path) == (length > limit or length + more > late)
        cache.release(stream.sequence)


@pytest.mark.parametrize("together", [False, True])
def test_a_sequence_that_is_compressed_late_knows_the_last_queries_of_its_prompt(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_module, "LATE", 5)
    cache = make_cache(preset("turbo:dense_below=200", rank=16, budget=64, values="rotated-4bit"))
    lengths = [150, 120, 30] if together else [150]
    streams = [Stream(seed, cache.allocate(n, n + 200)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)), block=70)
    assert not any(stream.sequence.path for stream in streams)
    longest = max(lengths)
    for stream, length in zip(streams, lengths):  # so that all are compressed in the same step
        for _ in range(longest - length):
            decode(cache, [stream])
    for _ in range(60):
        decode(cache, streams)
    for stream, length in zip(streams, lengths):
        (segment,) = stream.sequence.path
        first = max(0, length - 64)
        queries = cache.ops.apply_rope(
            stream.q[:, first:length],
            torch.arange(first, length, device=DEVICE).expand(2, -1),
            cache.groups[0].store.rotary,
        )
        wanted = sketch_maps(queries, SHAPE.num_kv_heads, cache.groups[0].store.rotation("sketch"), cache.ops)
        for name, found in zip(("sketch_key_map", "sketch_query_map"), wanted):
            got = cache.groups[0].store.state[name][:, segment.state]
            torch.testing.assert_close(got, found.to(got.dtype), atol=0.02, rtol=0.02)
