"""Restored sequences whose layers arrive one by one: readers wait, and no longer than for what they read."""

from __future__ import annotations

import pytest
import torch
from conversations import SPECS, conversation, poisoned, write
from driver import DEVICE, SHAPE, Stream, decode, make_cache, prefill

from shadowkv.kvcache.inspection import diagnostics
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link, Snapshot
from shadowkv.kvcache.snapshots.layers import Restoring


class Late:
    """Layers that arrive when they are waited for, not before."""

    def __init__(self, restoring: Restoring, snapshots: list[Snapshot]) -> None:
        self.restoring, self.snapshots, self.there, self.ended = restoring, snapshots, 0, False

    def wait(self, layer: int) -> None:
        for one in range(self.there, layer + 1):
            write(self.restoring, self.snapshots, one)
            self.there = one + 1

    def end(self) -> None:
        self.ended = True


def late(
    cache: KVCache, snapshots: list[tuple[Snapshot, int]], start: int, capacity: int
) -> tuple[CachedSequence, Late]:
    links = [Link(snapshot.header, stop) for snapshot, stop in snapshots]
    restoring = cache.snapshots.restore(links, start, capacity)
    arrival = Late(restoring, [snapshot for snapshot, _ in snapshots])
    restoring.sequence.pending_layers = arrival
    return restoring.sequence, arrival


@pytest.mark.parametrize("new", [1, 30, 600])
@pytest.mark.parametrize("kv", SPECS)
def test_a_prefill_waits_for_each_layer(kv: str, new: int) -> None:
    snapshots, outputs = conversation(kv, "grows").snapshots, []
    start = snapshots[-1][1] + new
    for at_once in (True, False):
        other, stream = poisoned(make_cache(SPECS[kv])), Stream(0)
        stream.sequence, arrival = late(other, snapshots, start, start + 300)
        stream.length = start - new
        if at_once:
            arrival.wait(SHAPE.num_layers - 1)
        assert arrival.there == (SHAPE.num_layers if at_once else 0)
        prefill(other, [(stream, new)], block=200)
        assert arrival.there == SHAPE.num_layers and stream.sequence.pending_layers is None
        for _ in range(40):
            decode(other, [stream])
        outputs.append(stream.output())
    torch.testing.assert_close(*outputs, atol=0 if DEVICE == "cpu" else 1e-4, rtol=0)


def test_no_layer_is_waited_for_before_its_turn() -> None:
    cache, stream, snapshots = make_cache(SPECS["turbo"]), Stream(0), conversation("turbo", "grows").snapshots
    length = snapshots[-1][1]
    sequence, arrival = late(cache, snapshots, length + 9, length + 9)
    batch = cache.prefill_batch([(sequence, 9)])
    block, rows = batch.block(0, 9), slice(length, length + 9)
    for layer in range(SHAPE.num_layers):
        cache.append(layer, stream.k[layer, rows], stream.v[layer, rows], block)
        assert arrival.there == layer
        cache.start(layer, stream.q[layer, rows], block)()
        assert arrival.there == layer + 1
        cache.finish_prefill(layer, batch)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kv", SPECS)
def test_a_fork_waits_for_each_layer_too(kv: str, together: bool) -> None:
    snapshots, outputs = conversation(kv, "grows").snapshots, []
    length = snapshots[-1][1]
    for at_once in (True, False):
        cache, streams = poisoned(make_cache(SPECS[kv])), [Stream(0), Stream(1)]
        first, arrival = late(cache, snapshots, length + 40, length + 100)
        if at_once:
            arrival.wait(SHAPE.num_layers - 1)
        point = cache.fork_point(first, length)
        for stream, sequence in zip(streams, (first, cache.fork(first, point, point + 150, point + 250)), strict=True):
            stream.sequence, stream.length = sequence, sequence.length
        assert arrival.there == (SHAPE.num_layers if at_once else 0)
        work = [(streams[1], 150), (streams[0], 40)]
        for some in [work] if together else [work[:1], work[1:]]:
            prefill(cache, some, block=100)
            assert arrival.there == SHAPE.num_layers and some[0][0].sequence.pending_layers is None
        for _ in range(20):
            decode(cache, streams)
        outputs.append([stream.output() for stream in streams])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=0 if DEVICE == "cpu" else 1e-4, rtol=0)


@pytest.mark.parametrize("layers", [0, 1])
def test_either_of_two_that_wait_may_go(layers: int) -> None:
    cache, snapshots = make_cache(SPECS["turbo"]), conversation("turbo", "grows").snapshots
    for leaves in (0, 1):
        first, arrival = late(cache, snapshots, 1300, 1400)
        both = [first, cache.fork(first, 128, 200, 300)]
        if layers:
            arrival.wait(0)
        cache.release(both.pop(leaves))
        assert arrival.ended
        cache.trim(both[0])
        assert arrival.there == SHAPE.num_layers
        cache.release(both[0])
        assert cache.free == cache.total


@pytest.mark.parametrize("what", ["decode", "restore", "export", "trim", "diagnostics"])
def test_whoever_else_uses_it_waits_for_all_of_it(what: str) -> None:
    cache = make_cache(SPECS["turbo"])
    stream = Stream(0, cache.allocate(900, 1000))
    prefill(cache, [(stream, 900)])
    whole = cache.snapshots.export(stream.sequence)
    sequence, arrival = late(cache, [(whole, 900)], 900, 1000)
    cache.held([sequence])
    assert not arrival.there
    twin = stream.again()
    twin.sequence, twin.length = sequence, 900
    if what == "decode":
        decode(cache, [twin])
        decode(cache, [stream])
        assert torch.equal(twin.outputs[-1], stream.outputs[-1])
    elif what == "restore":
        cache.snapshots.restore([Link(cache.snapshots.describe(stream.sequence, 128), 900)], 950, 1000, sequence)
    elif what == "export":
        assert torch.equal(cache.snapshots.export(sequence).data, whole.data)
    elif what == "trim":
        cache.trim(sequence)
    else:
        there, here = (diagnostics(cache, one)["kept_energy"] for one in (sequence, stream.sequence))
        assert torch.equal(there, here)
    assert arrival.there == SHAPE.num_layers and sequence.pending_layers is None


def test_what_never_arrives_can_be_released() -> None:
    class Lost(Late):
        def wait(self, layer: int) -> None:
            raise OSError("gone")

    cache = make_cache(SPECS["turbo"])
    stream = Stream(0, cache.allocate(900, 1000))
    prefill(cache, [(stream, 900)])
    restoring = cache.snapshots.restore([Link(cache.snapshots.describe(stream.sequence), 900)], 950, 1000)
    restoring.sequence.pending_layers = arrival = Lost(restoring, [])
    with pytest.raises(OSError, match="gone"):
        prefill(cache, [(Stream(1, restoring.sequence), 50)])
    cache.release(stream.sequence)
    cache.release(restoring.sequence)
    assert arrival.ended and cache.free == cache.total
