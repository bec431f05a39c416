"""Learned sinks: one more position in every softmax, with a score for each head and nothing as its value."""

from __future__ import annotations

from dataclasses import replace

import driver
import pytest
import torch
from driver import DEVICE, Stream, decode, make_cache, plain_attention, prefill
from test_exactness import EVERYTHING

from shadowkv.kvcache.parts import prefill as sparse_prefill
from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.kvcache.presets import preset

KEEPING_ALL = (
    *("full", "shadowkv", "low-rank-attend-all", "host-values-only", "quest", "snapkv"),
    *("turbo-without-codes", "turbo-host-without-codes"),
)


@pytest.fixture(autouse=True, params=[(FULL, LayerKind(100)), (LayerKind(64), LayerKind(64))], ids=["mixed", "windows"])
def sinks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.Tensor:
    """Some larger than any score, some without effect."""
    monkeypatch.setattr(driver, "SHAPE", replace(driver.SHAPE, kinds=request.param, sinks=True))
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.0, 4.0, 30.0], device=DEVICE)
    monkeypatch.setattr(driver, "SINKS", sinks)
    return sinks


@pytest.mark.parametrize("block", [500, 50])
@pytest.mark.parametrize("kv", KEEPING_ALL)
def test_they_join_every_softmax_once(kv: str, block: int) -> None:
    """Packed prompts and blocks, steps over pages that are compressed on the way, later turns over what is
    compressed."""
    cache = make_cache(EVERYTHING[kv])
    lengths = (1000, 417, 65, 1)
    streams = [Stream(seed, cache.allocate(n, n + 300)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)), block)
    for _ in range(130):
        decode(cache, streams)
    prefill(cache, [(stream, 90) for stream in streams], block)
    for _ in range(10):
        decode(cache, streams)
    if cache.layout.main.spec.compresses:
        assert (cache.groups[0].pool.tables.compressed > 0).any(), "nothing was compressed: the test would show nothing"
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def test_they_join_prompts_that_are_in_the_pass_of_a_step() -> None:
    cache = make_cache(preset("full"))
    old, new = (Stream(seed, cache.allocate(100, 200)) for seed in range(2))
    prefill(cache, [(old, 100)])
    plan, prompts = cache.plan_decode([old.sequence]), cache.prefill_batch([(new.sequence, 70)])
    batch = cache.decode_batch(plan).with_parts_of(prompts.block(0, 70))
    outs = []
    for layer in range(2):
        q, k, v = (torch.cat((getattr(old, x)[layer, 100:101], getattr(new, x)[layer, :70])) for x in ("q", "k", "v"))
        cache.append(layer, k, v, batch)
        outs.append(cache.start(layer, q, batch, driver.SINKS)())
        cache.finish_prefill(layer, prompts)
    old.length, new.length = 101, 70
    got = torch.stack(outs, 1)
    torch.testing.assert_close(got[0], plain_attention(old)[-1], atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(got[1:], plain_attention(new), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kv", ["full", "host-values-only"])
def test_they_join_sparse_prefills(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of new prompts and of later turns, with all blocks drawn."""
    monkeypatch.setattr(sparse_prefill, "SPARSE_FROM", 300)
    monkeypatch.setattr(sparse_prefill, "MIN_QUERIES", 200)
    cache = make_cache(EVERYTHING[kv].changed(prefill="sparse", prefill_error=0.0))
    streams = [Stream(seed, cache.allocate(n, n + 900)) for seed, n in enumerate((1000, 417))]
    prefill(cache, [(stream, count) for stream, count in zip(streams, (1000, 417))], 300)
    prefill(cache, [(stream, 400) for stream in streams], 300)
    decode(cache, streams)
    sparse = any(group.layout.window is None for group in cache.groups)
    assert (cache.take_attention_density() is not None) == sparse
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)
