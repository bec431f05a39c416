"""Models of which some layers see everything and some a window of the newest tokens."""

from __future__ import annotations

from dataclasses import asdict, replace

import driver
import pytest
import torch
from conversations import SPECS
from driver import MAX_LEN, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.policy.shape import FULL, LayerKind, ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.kvcache.traffic import attention_seconds

CAPACITY = 1500
LAYERS = {
    "first": (64, None, 64, None),
    "odd": (None, 100, 100, 100),
    "two windows": (30, None, 128, 30),
    "no full layer": (70, 70, 70, 70),
}


@pytest.fixture(autouse=True, params=LAYERS)
def shape(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModelShape:
    kinds = tuple(LayerKind(window) for window in LAYERS[request.param])
    shape = ModelShape(num_layers=4, num_query_heads=6, num_kv_heads=2, head_dim=16, kinds=kinds)
    monkeypatch.setattr(driver, "SHAPE", shape)
    return shape


def poisoned(kv: str = "full") -> KVCache:
    """A cache with NaN wherever nothing has been written."""
    cache = make_cache(SPECS[kv], slots=40)
    for group in cache.groups:
        for tier in group.store.tiers.values():
            tier.arena.fill_(0xFF)
    return cache


def check(streams: list[Stream], layers: list[int] | None = None) -> None:
    for stream in streams:
        got, wanted = stream.output(), plain_attention(stream)
        layers = layers or list(range(4))
        torch.testing.assert_close(got[:, layers], wanted[:, layers], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [500, 50])
@pytest.mark.parametrize("kv", ["full", "turbo", "coded"])
def test_any_batching_equals_plain_attention(kv: str, block: int, shape: ModelShape) -> None:
    """In the layers that the policy keeps exact: packed prompts, blocks shorter than a window, steps past the ring's
    end, later turns."""
    cache = poisoned(kv)
    streams = [Stream(number, cache.allocate(length, CAPACITY)) for number, length in enumerate((400, 90, 20, 1))]
    prefill(cache, [(streams[0], 400)], block)
    prefill(cache, [(stream, length) for stream, length in zip(streams[1:], (90, 20, 1))], block)
    for _ in range(150):
        decode(cache, streams)
    prefill(cache, [(streams[0], 200), (streams[1], 3), (streams[2], 200)], block)
    for _ in range(70):
        decode(cache, streams)
    exact = [layer for layer, kind in enumerate(shape.kinds) if kind != FULL or kv == "full"]
    check(streams, exact)
    for stream in streams:
        cache.release(stream.sequence)
    assert cache.free == cache.total


def test_forks_have_a_copy_of_the_window_and_their_parents_go_on() -> None:
    cache = poisoned()
    parent = Stream(0, cache.allocate(600, CAPACITY))
    prefill(cache, [(parent, 600)])
    streams = [parent]
    for seed, length in enumerate((600, 560), 1):
        point = cache.fork_point(parent.sequence, length)
        assert point == length // 64 * 64
        need = cache.fork_demand(parent.sequence, point, point + 90, CAPACITY)
        before = cache.free
        child = parent.going_on(cache.fork(parent.sequence, point, point + 90, CAPACITY), point, Stream(seed))
        assert cache.free == before - need
        prefill(cache, [(child, 90)])
        streams.append(child)
    for _ in range(200):
        decode(cache, streams)
    check(streams)
    assert cache.fork_point(parent.sequence, 600) == 0  # long written over
    with pytest.raises(ValueError, match="cannot be forked"):
        cache.fork(parent.sequence, 576, 600, 700)
    newest = parent.length // 64 * 64
    assert cache.fork_point(parent.sequence, parent.length) == newest


def test_the_newest_tokens_can_be_taken_back_and_no_others() -> None:
    cache = poisoned()
    stream = Stream(0, cache.allocate(600, CAPACITY))
    prefill(cache, [(stream, 600)])
    for length in (599, 540):
        cache.truncate(stream.sequence, length)
    assert stream.sequence.fixed > 400
    with pytest.raises(ValueError, match="windows"):
        cache.truncate(stream.sequence, stream.sequence.fixed - 1)
    stream.length, stream.outputs = 540, [stream.output()[:540]]
    for _ in range(100):
        decode(cache, [stream])
    cache.trim(stream.sequence)
    cache.extend(stream.sequence, stream.length + 300, CAPACITY)
    prefill(cache, [(stream, 300)])
    decode(cache, [stream])
    check([stream])


def test_trimmed_sequences_that_are_shorter_than_a_ring_grow_again() -> None:
    cache = poisoned()
    stream = Stream(0, cache.allocate(10, 40))
    prefill(cache, [(stream, 10)])
    for _ in range(8):
        cache.trim(stream.sequence)
        cache.extend(stream.sequence, stream.length + 37, stream.length + 40)
        prefill(cache, [(stream, 37)])
        decode(cache, [stream])
    check([stream])


def test_snapshots_and_chains_of_them_go_on_as_the_sequence() -> None:
    cache = poisoned()
    stream = Stream(0, cache.allocate(500, CAPACITY))
    prefill(cache, [(stream, 500)])
    point = cache.fork_point(stream.sequence, 499)
    first = cache.snapshots.describe(stream.sequence, 0, point)
    with cache.snapshots.open_reading(stream.sequence, 0, point) as reading:
        for _ in range(150):  # while it is read
            decode(cache, [stream])
        data = torch.full(first.pieces, 0xFF, dtype=torch.uint8, device=cache.device)
        for layer in range(first.num_layers):
            reading.read_layer(layer, data.flatten()[first.span(layer)])
    assert first == reading.header == SnapshotHeader.from_plain(asdict(first))
    second = cache.snapshots.export(stream.sequence, point)
    whole = cache.snapshots.export(stream.sequence)
    streams = [stream]
    for chain in ([(whole, stream.length)], [(type(whole)(first, data), point), (second, stream.length)]):
        other = poisoned()
        twin = stream.again()
        twin.sequence, twin.length = other.snapshots.load(chain, CAPACITY), stream.length
        assert torch.equal(other.snapshots.export(twin.sequence).data, whole.data)
        twin.outputs = list(stream.outputs)
        streams.append(twin)
        prefill(other, [(twin, 150)])
        for _ in range(70):
            decode(other, [twin])
    prefill(cache, [(stream, 150)])
    for _ in range(70):
        decode(cache, [stream])
    check(streams)
    with pytest.raises(ValueError, match="cannot be cut"):
        other.snapshots.load([(whole, 320)], CAPACITY)


def test_a_restored_sequence_can_be_forked_where_its_window_is_whole() -> None:
    cache = poisoned()
    stream = Stream(0, cache.allocate(512, CAPACITY))
    prefill(cache, [(stream, 512)])
    other = poisoned()
    twin = stream.again()
    twin.sequence, twin.length = other.snapshots.load(cache.snapshots.export(stream.sequence), CAPACITY), 512
    twin.outputs = list(stream.outputs)
    assert other.fork_point(twin.sequence, 512) == 512
    assert other.fork_point(twin.sequence, 511) == 0
    child = twin.going_on(other.fork(twin.sequence, 512, 600, CAPACITY), 512, Stream(3))
    prefill(other, [(child, 88)])
    for _ in range(80):
        decode(other, [twin, child])
    check([twin, child])


def test_a_fork_whose_window_cannot_be_copied_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = poisoned()
    stream = Stream(0, cache.allocate(512, CAPACITY))
    prefill(cache, [(stream, 512)])
    before = cache.free

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for the window")

    monkeypatch.setattr(SequencePool, "copy_window", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the window"):
        cache.fork(stream.sequence, 512, 600, CAPACITY)
    assert cache.free == before


def test_windows_take_no_more_however_long_a_sequence_is(shape: ModelShape) -> None:
    layout = Layout(preset("full"), shape, torch.float32, MAX_LEN)
    kinds = [kind for kind in layout.paged if "window" in kind or layout.main.window is not None]
    for kind in kinds:
        assert layout.demand(2000, 2000)[kind] == layout.demand(4000, 4000)[kind]
    alike = Layout(preset("full"), replace(shape, kinds=()), torch.float32, MAX_LEN)
    assert layout.tier_bytes(layout.demand(4000, 4000))["device"] < alike.tier_bytes(alike.demand(4000, 4000))["device"]
    assert layout.snapshot_bytes(4000) < alike.snapshot_bytes(4000)
    assert attention_seconds(layout, 4000, 0.0, 1.0, 1.0) < attention_seconds(alike, 4000, 0.0, 1.0, 1.0)


def test_where_one_group_has_no_room_nothing_is_taken() -> None:
    cache = make_cache(SPECS["full"], slots=16, blocks=20)
    before = cache.free
    with pytest.raises(OutOfBlocks, match="the sequence needs"):
        for _ in range(17):
            cache.allocate(300, 300)
    held = [kind for kind in before if cache.free[kind] < before[kind]]
    assert held and len({before[kind] - cache.free[kind] for kind in held if kind == "sequences"}) == 1


def test_snapshots_of_models_with_other_windows_are_refused(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    source = poisoned()
    stream = Stream(0, source.allocate(300, 300))
    prefill(source, [(stream, 300)])
    monkeypatch.setattr(driver, "SHAPE", replace(shape, kinds=()))
    with pytest.raises(ValueError, match="the sequence is stored as form"):
        poisoned().snapshots.load(source.snapshots.export(stream.sequence), 300)
