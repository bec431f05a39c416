"""Sequences that are read while they continue, and rebuilt from chains of snapshots, after others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conversations import CAPACITY, SPECS, TURNS, conversation, ending, poisoned, read, same, stored, write
from driver import DEVICE, SHAPE, Stream, decode, make_cache, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.snapshots.header import Link, Snapshot


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("kv", SPECS)
def test_a_chain_is_the_sequence_that_was_forked(kv: str, name: str) -> None:
    talk = conversation(kv, name)
    assert len(talk.snapshots) == 3 or kv == "turbo-late" or name != "grows"
    other = poisoned(make_cache(SPECS[kv], slots=24, blocks=350, max_model_len=3500))
    sequence = other.snapshots.load(talk.snapshots, CAPACITY)
    same(talk.end, other, sequence)
    other.release(sequence)
    assert other.free == other.total


@pytest.mark.parametrize("kv", SPECS)
def test_a_chain_behind_a_sequence_that_is_there(kv: str) -> None:
    for name in TURNS:
        talk = conversation(kv, name)
        if not stored(talk.streams, talk.points, 2):
            continue
        *before, (last, length) = talk.snapshots
        cache = poisoned(make_cache(SPECS[kv], slots=30))
        parent = cache.snapshots.load([*before[:-1], (before[-1][0], before[-1][0].header.length)], CAPACITY)
        links = [Link(last.header, length)]
        free, demand = cache.free, cache.snapshots.demand(links, length, CAPACITY, parent)
        restoring = cache.snapshots.restore(links, length, CAPACITY, parent)
        assert free - cache.free == demand
        shared = talk.points[2] // 64
        if restoring.sequence.path:
            assert restoring.sequence.pages[:shared] == parent.pages[:shared]
        else:
            assert restoring.sequence.dense[:shared] == parent.dense[:shared]
        for layer in range(SHAPE.num_layers):
            write(restoring, [last], layer)
        cache.release(parent)
        same(talk.end, cache, restoring.sequence)
        cache.release(restoring.sequence)
        assert cache.free == cache.total


@pytest.mark.parametrize("kv", SPECS)
def test_a_sequence_that_goes_on_in_place_is_a_chain_too(kv: str) -> None:
    """A chain of what never changes after its first turn, then of what has come since."""
    cache = make_cache(SPECS[kv])
    stream = Stream(0, cache.allocate(900, CAPACITY))
    prefill(cache, [(stream, 900)])
    decode(cache, [stream])
    stop = cache.fork_point(stream.sequence, 900)
    with cache.snapshots.open_reading(stream.sequence, stop=stop) as reading:
        first = read(reading)
    assert stop == first.header.length == (stream.sequence.compressed or 896) and not first.header.cut(stop).observed
    for _ in range(70):
        decode(cache, [stream])
    prefill(cache, [(stream, 700)])
    other = poisoned(make_cache(SPECS[kv]))
    sequence = other.snapshots.load(
        [(first, stop), (cache.snapshots.export(stream.sequence, stop), stream.length)], CAPACITY
    )
    same(ending(cache, stream), other, sequence)


def crowd(cache: KVCache) -> list[Stream]:
    """Others that take whatever is free; what they are does not matter, and a seed's input takes long to draw."""
    streams = []
    while len(streams) < 30 and cache.demand(200, 250).within(cache.free):
        streams.append(Stream(50, cache.allocate(200, 250)))
        prefill(cache, [(streams[-1], 200)])
    return streams


@pytest.mark.parametrize("length", [1000, 500, 130, 64])
@pytest.mark.parametrize("kv", SPECS)
def test_what_is_read_stays_while_the_sequence_goes_on_and_leaves(kv: str, length: int) -> None:
    cache = poisoned(make_cache(SPECS[kv], slots=30, blocks=80))
    stream = Stream(0, cache.allocate(length, length + 400))
    prefill(cache, [(stream, length)])
    decode(cache, [stream])
    reading = cache.snapshots.open_reading(stream.sequence, stop=cache.fork_point(stream.sequence, length))
    wanted = read(reading)
    for _ in range(70 if length > 130 else 150):  # past the end of a page, and beyond what stays dense
        decode(cache, [stream])
    assert torch.equal(read(reading).data, wanted.data)
    with cache.snapshots.open_reading(stream.sequence, stop=cache.fork_point(stream.sequence, stream.length)) as later:
        assert later.header.length > reading.header.length
    cache.release(stream.sequence)
    others = crowd(cache)
    assert not cache.demand(200, 250).within(cache.free)
    assert torch.equal(read(reading).data, wanted.data)
    reading.close()
    reading.close()
    for one in others:
        cache.release(one.sequence)
    assert cache.free == cache.total


@pytest.mark.parametrize("length", [1040, 400, 150, 3])  # all but the last compress a page within a few steps
@pytest.mark.parametrize("kv", SPECS)
def test_a_finished_sequence_is_read_with_its_tail(kv: str, length: int) -> None:
    cache = poisoned(make_cache(SPECS[kv], slots=30, blocks=80))
    stream = Stream(0, cache.allocate(length, length + 400))
    prefill(cache, [(stream, length)])
    for _ in range(30):
        decode(cache, [stream])
    cache.trim(stream.sequence)
    reading = cache.snapshots.open_reading(stream.sequence)
    wanted, header = read(reading), reading.header
    assert header.length == stream.length and header.tail_tokens
    with pytest.raises(ValueError, match="cannot cut the sequence"):
        cache.truncate(stream.sequence, stream.length - 1)
    if stream.sequence.path:
        with pytest.raises(ValueError, match="cannot be extended while its exact tail is read"):
            cache.extend(stream.sequence, stream.length + 1, stream.length + 100)
    cache.release(stream.sequence)
    others = crowd(cache)
    assert torch.equal(read(reading).data, wanted.data)
    assert wanted.data.sum() == read(reading).data.sum()
    reading.close()
    for one in others:
        cache.release(one.sequence)
    assert cache.free == cache.total
    sequence = cache.snapshots.load(wanted, stream.length + 10)
    assert torch.equal(cache.snapshots.export(sequence).data, wanted.data)
    cache.truncate(sequence, sequence.length - 1)


@settings(deadline=None, max_examples=28)
@given(
    kv=st.sampled_from(sorted(SPECS)), length=st.integers(1, 1200), steps=st.integers(0, 70), at=st.integers(1, 1270)
)
def test_cut_anywhere_it_is_the_fork_or_what_is_left_of_the_sequence(kv: str, length: int, steps: int, at: int) -> None:
    cache, other = make_cache(SPECS[kv]), poisoned(make_cache(SPECS[kv]))
    stream = Stream(0, cache.allocate(length, CAPACITY))
    prefill(cache, [(stream, length)])
    for _ in range(steps):
        decode(cache, [stream])
    whole, stop = cache.snapshots.export(stream.sequence), min(at, stream.length)
    compressed, dense = stream.sequence.compressed, not stream.sequence.path
    if stop <= compressed and cache.fork_point(stream.sequence, stop) != stop:
        with pytest.raises(ValueError, match="cut at"):
            other.snapshots.load([(whole, stop)], CAPACITY)
        assert other.free == other.total
        return
    if stop <= compressed:
        left = cache.fork(stream.sequence, stop, stop, CAPACITY)
    else:
        left = stream.sequence
        cache.truncate(left, stop)
        left.observed = left.observed and stop == whole.header.length  # queries after the cut do not count
    cut = stream.again()
    cut.sequence, cut.length = left, stop
    try:
        sequence = other.snapshots.load([(whole, stop)], CAPACITY)
    except ValueError:  # dense as long as nothing followed
        assert dense and stop >= cache.spec.dense_limit
        return
    same(ending(cache, cut), other, sequence)


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("kv", SPECS)
def test_read_up_to_a_fork_point_it_is_the_fork(kv: str, name: str) -> None:
    """However the sequence continues there, and in any number of pieces."""
    talk, starts = conversation(kv, name), [0]
    cache, stream = talk.cache, talk.streams[-1]
    points = sorted({cache.fork_point(stream.sequence, at) for at in range(64, stream.length + 1, 64)} - {0})
    for stop in points[:: max(1, len(points) // 4)]:
        fork = cache.fork(stream.sequence, stop, stop, CAPACITY)
        wanted = cache.snapshots.export(fork)
        pieces = []
        for start, end in zip(starts, [*starts[1:], stop], strict=True):
            with cache.snapshots.open_reading(stream.sequence, start, end) as reading:
                pieces.append((read(reading), end))
        assert len(pieces) > 1 or (pieces[0][0].header == wanted.header and torch.equal(pieces[0][0].data, wanted.data))
        other = poisoned(make_cache(SPECS[kv]))
        try:
            sequence = other.snapshots.load(pieces, CAPACITY)
        except ValueError:  # dense as long as nothing followed
            assert not fork.path and stop >= cache.spec.dense_limit
        else:
            assert torch.equal(other.snapshots.export(sequence).data, wanted.data)
        cache.release(fork)
        starts.append(stop)


@settings(deadline=None, max_examples=60)
@given(
    kv=st.sampled_from(sorted(SPECS)), name=st.sampled_from(sorted(TURNS)), blocks=st.integers(1, 60),
    slots=st.integers(1, 3), new=st.integers(0, 900), room=st.integers(0, 900), behind=st.booleans(),
)  # fmt: skip
def test_no_room_takes_nothing_and_room_is_what_was_asked_for(
    kv: str, name: str, blocks: int, slots: int, new: int, room: int, behind: bool
) -> None:
    snapshots, target = conversation(kv, name).snapshots, make_cache(SPECS[kv], slots=slots, blocks=blocks)
    links, parent = [Link(one.header, stop) for one, stop in snapshots], None
    if behind and len(links) > 1:
        try:
            parent = target.snapshots.load(snapshots[:-1], links[-2].stop)
        except (OutOfBlocks, ValueError):
            assert target.free == target.total
            return
        links = links[-1:]
    start = links[-1].stop + new
    before, shape = target.free, (start, start + room, parent)
    try:
        demand = target.snapshots.demand(links, *shape)
    except ValueError:
        with pytest.raises(ValueError):
            target.snapshots.restore(links, *shape)
        assert target.free == before
        return
    if not demand.within(before):
        with pytest.raises(OutOfBlocks):
            target.snapshots.restore(links, *shape)
        assert target.free == before
        return
    sequence = target.snapshots.restore(links, *shape).sequence
    assert before - target.free == demand
    assert target.growth(sequence, start, start + room).within(target.free - target.free)  # it lacks nothing
    held = [sequence] if parent is None else [sequence, parent]
    assert target.held(held) == target.total - target.free
    for one in held:
        target.release(one)
    assert target.free == target.total


@pytest.mark.parametrize("kv", SPECS)
def test_a_fork_takes_what_it_says(kv: str) -> None:
    talk = conversation(kv, "grows")
    cache = talk.cache
    for stream in talk.streams:
        for at in range(64, stream.length, 64):
            if cache.fork_point(stream.sequence, at) != at:
                with pytest.raises(ValueError, match=f"cannot be forked after {at}"):
                    cache.fork_demand(stream.sequence, at, at, at)
                continue
            for start, capacity in ((at, at), (at + 10, at + 300), (at + 900, at + 901)):
                before, demand = cache.free, cache.fork_demand(stream.sequence, at, start, capacity)
                fork = cache.fork(stream.sequence, at, start, capacity)
                assert before - cache.free == demand
                cache.release(fork)


def test_with_outliers_pages_can_be_cut_behind_those_that_were_fitted() -> None:
    cache = make_cache(SPECS["shadowkv"])
    stream = Stream(0, cache.allocate(900, CAPACITY))
    prefill(cache, [(stream, 900)])
    for _ in range(200):
        decode(cache, [stream])
    (segment,) = stream.sequence.path
    assert segment.fitted == 832 and segment.compressed > 960
    assert [cache.fork_point(stream.sequence, n) for n in (831, 832, 900, 5000)] == [0, 832, 896, segment.compressed]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("kv", SPECS)
def test_the_host_waits_for_no_layer(kv: str, request: pytest.FixtureRequest) -> None:
    cache = make_cache(SPECS[kv])
    stream = Stream(0, cache.allocate(900, 1000))
    prefill(cache, [(stream, 900)])
    whole = cache.snapshots.export(stream.sequence)
    restoring = cache.snapshots.restore([Link(whole.header, 900)], 950, 1000)
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with cache.snapshots.open_reading(stream.sequence) as reading:
        for layer, data in enumerate(whole.data):
            reading.read_layer(layer, data)
            restoring.write_layer(0, layer, data)


def refusals() -> Iterator[tuple[str, list[tuple[Snapshot, int]], str]]:
    first, second, third = conversation("turbo", "grows").snapshots
    yield "turbo", [], "at least one snapshot"
    yield "turbo", [second, third], "from token .* on does not continue what ends at 0"
    yield "turbo", [first, third], "does not continue what ends at"
    yield "turbo", [first, first], "does not continue what ends at"
    yield "turbo", [(first[0], first[1] - 1), second], "cannot be cut at"
    yield "turbo", [(first[0], first[0].header.length), second], "they end in its exact tail"
    yield "turbo", [(first[0], 0)], "cannot be cut at 0"
    yield "turbo", [(first[0], 10**6)], "cannot be cut at 1000000"
    yield "full", [first], "is stored as form .* this cache stores form "
    cache = make_cache(SPECS["turbo"])
    stream = Stream(5, cache.allocate(100, 2000))
    prefill(cache, [(stream, 100)])
    short = cache.snapshots.export(stream.sequence)
    prefill(cache, [(stream, 700)])
    yield (
        "turbo",
        [(short, 64), (cache.snapshots.export(stream.sequence, 64), 800)],
        "does not continue what ends at 64",
    )
    yield "turbo", [(short, 70), (cache.snapshots.export(stream.sequence, 64), 800)], "they end in its exact tail"
    outliers = make_cache(SPECS["shadowkv"])
    stream = Stream(0, outliers.allocate(900, 1000))
    prefill(outliers, [(stream, 900)])
    yield "shadowkv", [(outliers.snapshots.export(stream.sequence), 448)], "cannot be cut at 448: its exact outliers"


def test_chains_that_are_none_are_refused_and_take_nothing() -> None:
    targets = {kv: make_cache(spec) for kv, spec in SPECS.items()}
    for kv, snapshots, reason in refusals():
        links = [Link(snapshot.header, stop) for snapshot, stop in snapshots]
        for ask in (targets[kv].snapshots.restore, targets[kv].snapshots.demand):
            with pytest.raises(ValueError, match=reason):
                ask(links, 1500, 2000)
        assert targets[kv].free == targets[kv].total


def test_where_it_cannot_be_forked_nothing_is_described_or_shared() -> None:
    talk = conversation("turbo", "grows")
    cache, streams, points = talk.cache, talk.streams, talk.points
    with pytest.raises(ValueError, match="cannot be forked after 65"):
        cache.snapshots.describe(streams[0].sequence, 65)
    with pytest.raises(ValueError, match="cannot be forked after"):
        cache.snapshots.open_reading(streams[0].sequence, streams[0].length // 64 * 64)
    with pytest.raises(ValueError, match="cannot be forked after 100"):
        cache.snapshots.open_reading(streams[0].sequence, 64, 100)
    with pytest.raises(ValueError, match="from token 128 on cannot end after 64"):
        cache.snapshots.describe(streams[0].sequence, 128, 64)
    header = cache.snapshots.describe(streams[1].sequence, points[1])
    short = cache.fork(streams[0].sequence, 64, 64, 64)
    before = cache.free
    with pytest.raises(ValueError, match=f"cannot be forked after {points[1]}"):
        cache.snapshots.restore([Link(header, header.length)], 1500, 2000, short)
    with pytest.raises(ValueError, match="nothing to read after its first 64 tokens"):
        cache.snapshots.open_reading(short, 64)
    assert cache.free == before
    cache.release(short)


def test_a_cache_of_shorter_sequences_refuses_what_is_too_long() -> None:
    cache, target = make_cache(SPECS["turbo"]), make_cache(SPECS["turbo"], max_model_len=500)
    stream = Stream(0, cache.allocate(900, 1000))
    prefill(cache, [(stream, 900)])
    for capacity in (900, 500):
        with pytest.raises(ValueError, match="max_model_len=500 does not hold"):
            target.snapshots.load(cache.snapshots.export(stream.sequence), capacity)
    assert target.free == target.total


def test_gaps_between_fields_are_zeros_and_bytes_of_one_sequence_are_always_the_same() -> None:
    found = []
    for seed in (3, 8):
        cache = poisoned(make_cache(SPECS["turbo"]), seed)
        stream = Stream(0, cache.allocate(700, 800))
        prefill(cache, [(stream, 700)])
        with cache.snapshots.open_reading(stream.sequence) as reading:
            found.append(read(reading))
    header = found[0].header
    covered = torch.zeros(header.layer_bytes, dtype=torch.bool)
    for field in header.fields:
        covered[field.offset : field.offset + field.nbytes] = True
    assert not covered.all()
    assert not found[0].data[:, ~covered].any()
    if DEVICE == "cpu":
        assert torch.equal(found[0].data, found[1].data)
