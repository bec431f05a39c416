"""Conversations whose turns fork one another, and their snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from driver import DEVICE, Stream, decode, make_cache, prefill, scatter
from torch import Tensor

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Snapshot
from shadowkv.kvcache.snapshots.layers import Reading, Restoring

SPECS = {
    "full": preset("full"),
    "turbo": preset("turbo", rank=16, budget=32, values="rotated-4bit"),  # 16 dimensions do not suit 3 bits
    "turbo-late": preset("turbo:dense_below=700", rank=16, budget=32, values="rotated-4bit"),
    "turbo-host": preset("turbo-host", rank=16, budget=32, values="rotated-4bit"),
    "shadowkv": preset("shadowkv", rank=16, budget=32, outliers=3),
    "quest": preset("quest", budget=32),
    "coded": preset("full:keys=rotated-4bit,values=rotated-4bit,centred=true"),
}
TURNS = {"grows": (900, 150, 60), "new states": (300, 700, 900), "short": (130, 100, 90), "one page": (64, 1, 130)}
"""Tokens of three turns, each continuing after a part of what the one before has cached."""
CAPACITY = 3000


def poisoned(cache: KVCache, seed: int = 5) -> KVCache:
    """A cache after a day of other sequences, with NaN in all memory, which none holds any more."""
    scatter(cache, seed)
    for tier in cache.groups[0].store.tiers.values():
        tier.arena.fill_(0xFF)
    return cache


def turns(cache: KVCache, name: str) -> tuple[list[Stream], list[int]]:
    """The turns of a conversation, each a sequence forked from the one before, and where each was forked."""
    streams: list[Stream] = []
    points = []
    for seed, new in enumerate(TURNS[name]):
        stream = Stream(seed)
        point = 0
        if streams:
            parent = streams[-1]
            point = cache.fork_point(parent.sequence, parent.length - 1)
        if point:
            stream = parent.going_on(cache.fork(parent.sequence, point, point + new, CAPACITY), point, stream)
        else:
            stream.sequence = cache.allocate(new, CAPACITY)
        points.append(point)
        prefill(cache, [(stream, new)])
        for _ in range(80):
            decode(cache, [stream])
        streams.append(stream)
    return streams, points


def chain(cache: KVCache, streams: list[Stream], points: list[int]) -> list[tuple[Snapshot, int]]:
    """Snapshots of turns that follow one another: what each adds, and how much of it the next one has."""
    first = max(number for number, point in enumerate(points) if not stored(streams, points, number))
    ends = zip(streams[first:], [0, *points[first + 1 :]], [*points[first + 1 :], streams[-1].length], strict=True)
    return [(cache.snapshots.export(stream.sequence, start), stop) for stream, start, stop in ends if start < stop]


def stored(streams: list[Stream], points: list[int], number: int) -> bool:
    """Whether a turn stores what comes before it as the turn before does: not if it was compressed in between."""
    return bool(points[number]) and bool(streams[number].sequence.path) == bool(streams[number - 1].sequence.path)


@dataclass
class Ending:
    """What is cached of a stream, and what follows.

    Attributes:
        start: the stream as it was, with its input.
        snapshot: a snapshot of all of it.
        after: its outputs from there on, [tokens, layers, H_q, d].
    """

    start: Stream
    snapshot: Snapshot
    after: Tensor


def ending(cache: KVCache, stream: Stream) -> Ending:
    """The ending of a stream that continues."""
    start, snapshot = stream.again(), cache.snapshots.export(stream.sequence)
    start.length = stream.length
    return Ending(start, snapshot, going_on(cache, stream))


def going_on(cache: KVCache, stream: Stream) -> Tensor:
    """Steps past the end of a page, a turn, and one more step: their outputs [tokens, layers, H_q, d]."""
    stream.outputs = []
    for _ in range(70):
        decode(cache, [stream])
    if stream.length + 50 > stream.sequence.capacity:
        cache.extend(stream.sequence, stream.length + 50, stream.length + 60)
    prefill(cache, [(stream, 50)])
    decode(cache, [stream])
    return stream.output()


def same(wanted: Ending, cache: KVCache, sequence: CachedSequence) -> None:
    """The same bytes, and the same outputs of what follows."""
    made = cache.snapshots.export(sequence)
    assert made.header == wanted.snapshot.header
    assert torch.equal(made.data, wanted.snapshot.data)
    twin = wanted.start.again()
    twin.sequence, twin.length = sequence, wanted.start.length
    after = going_on(cache, twin)
    if DEVICE == "cpu":
        assert torch.equal(after, wanted.after)
    else:
        torch.testing.assert_close(after, wanted.after, atol=1e-4, rtol=1e-3)


@dataclass
class Conversation:
    """Turns in their cache, whose pages tests share and none changes.

    Attributes:
        snapshots: the chain of them up to the last turn, and how much of each the next one has.
        points: where each turn was forked from the one before.
        end: the ending of the last turn, which has continued since.
    """

    cache: KVCache
    streams: list[Stream]
    points: list[int]
    snapshots: list[tuple[Snapshot, int]]
    end: Ending


@lru_cache
def conversation(kv: str, name: str) -> Conversation:
    cache = make_cache(SPECS[kv], slots=30)
    streams, points = turns(cache, name)
    snapshots = chain(cache, streams, points)
    return Conversation(cache, streams, points, snapshots, ending(cache, streams[-1]))


def write(restoring: Restoring, snapshots: list[Snapshot], layer: int) -> None:
    for number, snapshot in enumerate(snapshots):
        restoring.write_layer(number, layer, snapshot.data[layer])


def read(reading: Reading) -> Snapshot:
    """All layers, read into memory that was in use before."""
    header = reading.header
    data = torch.full((header.num_layers, header.layer_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    for layer in range(header.num_layers):
        reading.read_layer(layer, data[layer])
    return Snapshot(header, data)
