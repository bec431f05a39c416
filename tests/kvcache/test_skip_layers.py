"""Layers at either end that a policy leaves exact."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import driver
import pytest
import torch
from conversations import SPECS
from driver import DEVICE, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.kvcache.fan_out import FanOut
from shadowkv.kvcache.inspection import diagnostics
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import describe, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.snapshots.header import SnapshotHeader

SHAPE = ModelShape(num_layers=4, num_query_heads=6, num_kv_heads=2, head_dim=16)
KINDS = {name: SPECS[name] for name in ("turbo", "shadowkv", "coded")}
CAPACITY = 1500


def assert_alike(got: torch.Tensor, wanted: torch.Tensor, near_ties: float = 0.0) -> None:
    """The same numbers; on a GPU, sums of several layers at a time have a different order than those of one.

    Where that reverses a near tie between tokens, a head's output at that step differs by what they differ in:
    at most a share of ``near_ties`` of all numbers, and by little.
    """
    if DEVICE == "cpu":
        assert torch.equal(got, wanted)
        return
    turned = ~torch.isclose(got, wanted, atol=1e-4, rtol=1e-3)
    assert turned.float().mean() <= near_ties
    torch.testing.assert_close(got[turned], wanted[turned], atol=5e-3, rtol=0)


@pytest.fixture(autouse=True)
def _four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SHAPE", SHAPE)


def poisoned(spec: KVSpec) -> KVCache:
    """A cache with NaN wherever nothing has been written."""
    cache = make_cache(spec, slots=16)
    for tier in (tier for group in cache.groups for tier in group.store.tiers.values()):
        tier.arena.fill_(0xFF)
    return cache


def conversations(spec: KVSpec) -> tuple[KVCache, list[Stream]]:
    """Two sequences and a fork of one: prefilled together and again, decoded until pages are compressed and dense ones
    are, too."""
    cache = poisoned(spec)
    streams = [Stream(number, cache.allocate(length, CAPACITY)) for number, length in enumerate((500, 90))]
    prefill(cache, [(streams[0], 500), (streams[1], 90)])
    for _ in range(46):
        decode(cache, streams)
    prefill(cache, [(streams[0], 400), (streams[1], 300)])
    parent = streams[0]
    point = cache.fork_point(parent.sequence, parent.length)
    child = parent.going_on(cache.fork(parent.sequence, point, point + 40, CAPACITY), point, Stream(9))
    prefill(cache, [(child, 40)])
    streams.append(child)
    decode(cache, streams)
    return cache, streams


@pytest.mark.parametrize("kv", KINDS)
def test_skipped_layers_equal_plain_attention_and_the_others_the_policy_without(kv: str) -> None:
    cache, streams = conversations(replace(KINDS[kv], skip_layers=1))
    _, others = conversations(KINDS[kv])
    assert all(stream.sequence.compressed for stream in streams)
    for stream, other in zip(streams, others, strict=True):
        got, exact = stream.output(), plain_attention(stream)
        torch.testing.assert_close(got[:, [0, 3]], exact[:, [0, 3]], atol=5e-5, rtol=1e-4)
        assert_alike(got[:, 1:3], other.output()[:, 1:3], near_ties=2e-4 if kv == "turbo" else 0.0)
        cache.release(stream.sequence)
    assert cache.free == cache.total


def test_with_all_layers_skipped_nothing_is_lost() -> None:
    cache, streams = conversations(replace(KINDS["coded"], skip_layers=2))
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)
    assert not diagnostics(cache, streams[0].sequence)


@pytest.mark.parametrize("kv", ["turbo", "shadowkv"])
def test_snapshots_and_chains_of_them_go_on_as_the_sequence(kv: str) -> None:
    """Also through JSON, and in a cache with different pages."""
    spec = replace(KINDS[kv], skip_layers=1)
    cache, (stream, *_) = conversations(spec)
    point = cache.fork_point(stream.sequence, 600)
    assert 0 < point < stream.length
    whole = cache.snapshots.export(stream.sequence)
    header = SnapshotHeader.from_plain(json.loads(json.dumps(asdict(whole.header))))
    assert header == whole.header and header.other_groups and header.pieces == (1, header.nbytes)
    spans = [header.span(layer) for layer in range(SHAPE.num_layers)]
    assert all(one.stop == other.start for one, other in pairwise(spans)) and spans[-1].stop == len(whole.data[0])
    stream.outputs = []
    streams = [stream]
    for chain in (
        [(whole, stream.length)],
        [(whole, point), (cache.snapshots.export(stream.sequence, point), stream.length)],
    ):
        other = poisoned(spec)
        twin = stream.again()
        twin.sequence, twin.length = other.snapshots.load(chain, CAPACITY), stream.length
        assert torch.equal(other.snapshots.export(twin.sequence).data, whole.data)
        streams.append(twin)
        for _ in range(3):
            decode(other, [twin])
        prefill(other, [(twin, 20)])
    for _ in range(3):
        decode(cache, [stream])
    prefill(cache, [(stream, 20)])
    for twin in streams[1:]:
        assert_alike(twin.output(), stream.output())


def test_snapshots_of_caches_that_skip_other_layers_are_refused() -> None:
    source, target = (make_cache(replace(KINDS["coded"], skip_layers=n)) for n in (1, 0))
    stream = Stream(0, source.allocate(400, 400))
    prefill(source, [(stream, 400)])
    assert not target.snapshots.stored_alike(source.snapshots, 400)
    with pytest.raises(ValueError, match="the sequence is stored as form"):
        target.snapshots.load(source.snapshots.export(stream.sequence), 400)


def test_headers_that_contradict_themselves_are_refused() -> None:
    cache = make_cache(replace(KINDS["coded"], skip_layers=1))
    stream = Stream(0, cache.allocate(400, 400))
    prefill(cache, [(stream, 400)])
    header = cache.snapshots.describe(stream.sequence)
    (ends,) = header.other_groups
    assert (header.layers, ends.layers) == ((1, 2), (0, 3))
    wrong = [{"layers": (1,)}, {"layers": (0, 1)}, {"layers": ()}, {"other_groups": [asdict(ends)] * 2}]
    others = {"start": 64, "num_layers": 5, "form": "0" * 64, "layers": (), "other_groups": [asdict(ends)]}
    wrong += [{"other_groups": [asdict(ends) | {name: value}]} for name, value in others.items()]
    for changes in (*wrong, {"other_groups": ()}):
        with pytest.raises(ValueError, match="this is no header of a snapshot"):
            SnapshotHeader.from_plain(asdict(header) | changes)
    plain = replace(header, layers=(), other_groups=())
    fields = json.loads(json.dumps(asdict(plain)))
    assert SnapshotHeader.from_plain(fields) == plain
    for others in ({"skip_layers": 1} | fields, {name: fields[name] for name in fields if name != "window"}):
        with pytest.raises(ValueError, match="not an object with exactly"):
            SnapshotHeader.from_plain(others)
    nested = fields
    for _ in range(200):
        nested = fields | {"other_groups": [nested]}
    with pytest.raises(ValueError, match=r"nested too deeply|this is no header of a snapshot"):
        SnapshotHeader.from_plain(nested)


@pytest.mark.parametrize("length", [300, 900])
def test_a_prefill_fans_out_into_caches_that_skip_other_layers(length: int) -> None:
    """Few tokens are stored several layers at a time."""
    specs = [replace(KINDS["coded"], skip_layers=skipped) for skipped in (0, 1)]
    caches = [poisoned(spec) for spec in specs]
    together = [Stream(4, cache.allocate(length, CAPACITY)) for cache in caches]
    fan_out = FanOut(caches)
    batch = fan_out.prefill_batch([(tuple(one.sequence for one in together), length)])
    block = batch.block(0, length)
    for layer in range(SHAPE.num_layers):
        q, k, v = (getattr(together[0], name)[layer, :length] for name in ("q", "k", "v"))
        fan_out.append(layer, k, v, block)
        fan_out.start(layer, q, block)()
        fan_out.finish_prefill(layer, batch)
    fan_out.end_prefill(batch)
    for cache, spec, one in zip(caches, specs, together, strict=True):
        own = poisoned(spec)
        alone = Stream(4, own.allocate(length, CAPACITY))
        prefill(own, [(alone, length)])
        one.length = length
        for _ in range(3):
            decode(cache, [one])
            decode(own, [alone])
        assert_alike(one.output(), alone.output()[length:])
        if DEVICE == "cpu":
            assert torch.equal(cache.snapshots.export(one.sequence).data, own.snapshots.export(alone.sequence).data)


def test_bytes_are_those_of_exact_tokens_in_skipped_layers_and_of_the_policy_in_the_others() -> None:
    shape = ModelShape(num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128)

    def per_token(kv: str, tokens: int = 2**17) -> float:
        layout = Layout(preset(kv), shape, torch.bfloat16, tokens)
        need, unit = layout.demand(tokens, tokens), layout.bytes_per_block()
        return sum(need[kind] * unit[kind] for kind in unit) / tokens

    for kv in ("turboquant-4", "turboquant-3", "turbo"):
        wanted = (28 * per_token(kv) + 4 * per_token("full")) / 32
        assert wanted <= per_token(f"{kv}:skip_layers=2") < 1.03 * wanted


@pytest.mark.parametrize(
    ("kv", "why"),
    [
        ("coded", "skip_layers=3 at either end is more than half of the layers, 2"),
        ("full", "skip_layers=3 has no meaning where every layer is exact"),
    ],
)
def test_what_cannot_be_skipped_is_refused(kv: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve(replace(SPECS[kv], skip_layers=3), SHAPE)
    with pytest.raises(ValueError, match="skip_layers=-1 must be finite and not negative"):
        resolve(replace(SPECS[kv], skip_layers=-1), SHAPE)


def test_policies_say_what_they_skip() -> None:
    spec = preset("turboquant-4:skip_layers=2")
    assert spec.skip_layers == 2
    words = resolve(spec, ModelShape(num_layers=30, num_query_heads=9, num_kv_heads=3, head_dim=64))
    assert "first and last 2 layers exact" in describe(words, SHAPE)
