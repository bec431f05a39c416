"""Sequences that are exported, loaded elsewhere, and prefilled into several caches at once."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from driver import DEVICE, ROPE, SHAPE, Stream, cache_of, decode, make_cache, plain_attention, prefill, scatter

from shadowkv.kvcache.fan_out import FanOut
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks, OutOfBlocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout

FORMS = {
    "full": (preset("full"), preset("full")),
    "turbo": (preset("turbo", rank=16, budget=64), preset("turbo", rank=16, budget=256, sampled=0.25)),
    "turbo to the host": (
        preset("turbo:chunk=8,sampled=0.0", rank=16, budget=64),
        preset("turbo-host", rank=16, budget=96),
    ),
    "shadowkv from the host": (
        preset("shadowkv", rank=16, budget=64, outliers=3),
        preset("shadowkv", rank=16, budget=128, outliers=3, place="device"),
    ),
    "loki": (preset("loki", budget=64), preset("loki", budget=0.25)),
    "mixed widths": (preset("shard:values=dense"), preset("shard:values=dense")),
}
LENGTHS = (900, 130, 1, 64)
CAPACITY = 2000


def prefilled(spec: KVSpec, streams: list[Stream]) -> KVCache:
    """A cache with two turns of ``streams``; the second turns what was short into segments."""
    cache = make_cache(spec, slots=30)
    for stream, length in zip(streams, LENGTHS):
        stream.sequence = cache.allocate(length, CAPACITY)
        prefill(cache, [(stream, length)])
    prefill(cache, [(stream, 800) for stream in streams[:2]])
    return cache


def going_on(cache: KVCache, streams: list[Stream]) -> torch.Tensor:
    """Outputs of decode steps, while pages are compressed, and of a turn between them."""
    for stream in streams:
        stream.outputs = []
    for _ in range(70):
        decode(cache, streams)
    prefill(cache, [(streams[0], 50)])
    decode(cache, streams)
    return torch.cat([stream.output() for stream in streams])


@pytest.mark.parametrize("name", FORMS)
def test_what_is_loaded_goes_on_as_if_it_had_been_prefilled_there(name: str) -> None:
    """There steps select more, values live elsewhere, and other sequences have come and gone."""
    here, there = FORMS[name]
    streams = [Stream(seed) for seed in range(len(LENGTHS))]
    wanted = going_on(prefilled(there, streams), streams)
    streams = [stream.again() for stream in streams]
    source = prefilled(here, streams)
    target = make_cache(there, slots=24, blocks=350, max_model_len=3000)
    scatter(target, seed=5)
    if here.compresses:
        counts = [len(stream.sequence.path) for stream in streams]
        assert max(counts) > 1 and min(counts) == 0
    exported = [source.snapshots.export(stream.sequence) for stream in streams]
    for tier in source.groups[0].store.tiers.values():
        tier.arena.fill_(0xFF)  # what was exported is a copy
    for stream, one in zip(streams, exported):
        stream.sequence = target.snapshots.load(one, CAPACITY)
        assert stream.sequence.length == stream.length
    got = going_on(target, streams)
    if DEVICE == "cpu":
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)
    for stream in streams:
        target.release(stream.sequence)
    assert target.free == target.total


@pytest.mark.parametrize(("here", "there"), [(32, 150), (150, 32)])
def test_more_or_fewer_of_the_newest_tokens_may_stay_exact_there(here: int, there: int) -> None:
    specs = [
        replace(preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0, outliers=3), local=local) for local in (here, there)
    ]
    stream = Stream(3)
    source, target = make_cache(specs[0]), make_cache(replace(specs[1], place="device"))
    stream.sequence = source.allocate(700, 800)
    prefill(source, [(stream, 700)])
    for _ in range(50):
        decode(source, [stream])
    stream.sequence = target.snapshots.load(source.snapshots.export(stream.sequence), 1000)
    for _ in range(150):
        decode(target, [stream])
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def other_model() -> KVCache:
    shape = ModelShape(num_layers=3, num_query_heads=6, num_kv_heads=2, head_dim=16)
    layout = Layout(preset("quest", budget=64), shape, torch.float32, 2000)
    return cache_of(layout, ROPE, slots=2, memory=Blocks(device=50))


@pytest.mark.parametrize(
    "there",
    [
        lambda: make_cache(preset("full")),
        lambda: make_cache(preset("quest", budget=64, chunk=8)),
        lambda: make_cache(preset("exact-top-k", budget=64, chunk=16)),
        other_model,
    ],
    ids=["full", "chunk", "index", "model"],
)
def test_other_forms_are_refused_and_take_nothing(there: Callable[[], KVCache]) -> None:
    source, target = make_cache(preset("quest", budget=64)), there()
    stream = Stream(0, source.allocate(700, 700))
    prefill(source, [(stream, 700)])
    assert not target.snapshots.stored_alike(source.snapshots, 700)
    with pytest.raises(ValueError, match=r"the sequence is stored as .* this cache stores "):
        target.snapshots.load(source.snapshots.export(stream.sequence), 700)
    assert target.free == target.total


def test_what_is_exact_elsewhere_and_would_be_compressed_here_is_refused_but_not_what_is_compressed() -> None:
    long, short = make_cache(preset("quest")), make_cache(preset("quest", budget=1.0))
    stream = Stream(0, long.allocate(300, 300))
    prefill(long, [(stream, 300)])
    assert not short.snapshots.stored_alike(long.snapshots, 300)
    with pytest.raises(ValueError, match="the snapshot has all 300 tokens exact, and this cache would compress some"):
        short.snapshots.load(long.snapshots.export(stream.sequence), 400)
    assert short.free == short.total
    stream = Stream(1, short.allocate(300, 300))
    prefill(short, [(stream, 300)])
    stream.sequence = long.snapshots.load(short.snapshots.export(stream.sequence), 340)
    for _ in range(40):
        decode(long, [stream])
    assert stream.sequence.compressed == 256
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def test_no_room_takes_nothing() -> None:
    source, target = make_cache(preset("shadowkv", budget=64)), make_cache(preset("shadowkv", budget=64), blocks=20)
    stream = Stream(0, source.allocate(900, 900))
    prefill(source, [(stream, 900)])
    exported = source.snapshots.export(stream.sequence)
    for capacity in (900, 3000):
        if target.demand(900, capacity).within(target.free):
            target.release(target.snapshots.load(exported, capacity))
        else:
            with pytest.raises(OutOfBlocks):
                target.snapshots.load(exported, capacity)
        assert target.free == target.total
    assert not target.demand(900, 3000).within(target.total)


def test_one_prefill_into_several_caches_is_one_into_each() -> None:
    names = (
        "full",
        "turbo:rank=16,budget=64",
        "shadowkv:rank=16,budget=64,outliers=3",
        "quest:budget=64",
        "snapkv:budget=64",
    )
    specs, lengths = [preset(name) for name in names], (900, 20, 300)
    alone, wanted = [make_cache(spec) for spec in specs], []
    for cache in alone:
        streams = [Stream(seed, cache.allocate(n, n + 150)) for seed, n in enumerate(lengths)]
        prefill(cache, list(zip(streams, lengths)), block=170)
        wanted.append(steps(cache, streams))
    caches = [make_cache(spec) for spec in specs]
    streams = [Stream(seed) for seed in range(len(lengths))]
    together = [tuple(cache.allocate(n, n + 150) for cache in caches) for n in lengths]
    fan_out = FanOut(caches)
    batch = fan_out.prefill_batch(list(zip(together, lengths)))
    q, k, v = (
        torch.cat([getattr(s, name)[:, :n] for s, n in zip(streams, lengths)], dim=1) for name in ("q", "k", "v")
    )
    spans = [slice(a, min(a + 170, batch.num_tokens)) for a in range(0, batch.num_tokens, 170)]
    for layer in range(SHAPE.num_layers):
        for span in spans:
            block = batch.block(span.start, span.stop)
            fan_out.append(layer, k[layer, span], v[layer, span], block)
            fan_out.start(layer, q[layer, span], block)()
        fan_out.finish_prefill(layer, batch)
    fan_out.leave_prefill()
    fan_out.end_prefill(batch)
    for number, (cache, expected) in enumerate(zip(caches, wanted)):
        mine = [stream.again() for stream in streams]
        for stream, sequences, length in zip(mine, together, lengths):
            stream.sequence, stream.length = sequences[number], length
        got = steps(cache, mine)
        if DEVICE == "cpu":
            assert torch.equal(got, expected), names[number]
        else:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def steps(cache: KVCache, streams: list[Stream]) -> torch.Tensor:
    """Outputs of decode steps, while pages are compressed."""
    for stream in streams:
        stream.outputs = []
    for _ in range(150):
        decode(cache, streams)
    return torch.cat([stream.output() for stream in streams])
