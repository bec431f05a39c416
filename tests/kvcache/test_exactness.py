"""A policy that keeps everything must equal plain attention, whatever the batch, the pages and the turns."""

from dataclasses import replace

import pytest
import torch
from driver import SHAPE, YARN, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import preset

EVERYTHING = {
    "full": preset("full"),
    "full-speculative": preset("full-speculative", budget=16),
    "shadowkv": preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0),
    "shadowkv-no-outliers": preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0, outliers=0),
    "shadowkv-odd": replace(preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0, chunk=4, outliers=7), local=100),
    "shadowkv-budget-in-tokens": preset("shadowkv", rank=SHAPE.kv_dim, budget=4096),
    "low-rank-attend-all": KVSpec(keys="low-rank", settings={"rank": SHAPE.kv_dim}),
    "host-values-only": KVSpec(place="host"),
    "turbo-without-codes": preset("turbo:keys=low-rank,values=dense", rank=SHAPE.kv_dim, budget=1.0),
    "turbo-host-without-codes": preset("turbo-host:keys=low-rank,values=dense", rank=SHAPE.kv_dim, budget=1.0),
    "quest": preset("quest", budget=1.0),
    "quest-on-host": replace(preset("quest", budget=1.0), place="host"),
    "exact-top-k": preset("exact-top-k", budget=1.0),
    "exact-in-chunks-with-outliers": preset("exact-top-k:chunk=8,outliers=5,place=host", budget=1.0),
    "streaming-llm": preset("streaming-llm", budget=1.0),
    "loki": preset("loki", budget=1.0),
    "loki-in-chunks": preset("loki:chunk=4", budget=1.0),
    "infinigen": preset("infinigen", budget=1.0),
    "snapkv": preset("snapkv", budget=1.0),
    "snapkv-in-chunks": preset("snapkv:chunk=8,outliers=3", budget=1.0),
    "triattention": preset("triattention", budget=1.0),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_two_turns_of_ragged_sequences_equal_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.kvcache.compression.rebuilt.SPAN_PAGES", 3)  # of 16
    monkeypatch.setattr("shadowkv.ops.dense_attention.reference.SCORES_AT_ONCE", 50 * SHAPE.num_query_heads * PAGE)
    cache = make_cache(EVERYTHING[name])
    lengths = [1, 7, 63, 64, 65, 417, 1000]
    streams = [Stream(seed, cache.allocate(n, n + 70)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)))
    for _ in range(70):  # past the end of a page
        decode(cache, streams)
    with pytest.raises(ValueError, match="no room for its new tokens"):
        decode(cache, streams)
    for stream in streams:
        cache.trim(stream.sequence)
        cache.extend(stream.sequence, stream.length + 90, stream.length + 100)
    prefill(cache, [(stream, 90) for stream in streams], block=170)
    for _ in range(10):
        decode(cache, streams)
    if cache.spec.compresses:
        assert (cache.groups[0].pool.tables.compressed > 0).any(), "nothing was compressed: the test would show nothing"
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)
        cache.release(stream.sequence)
    assert cache.free == cache.total


@pytest.mark.parametrize("name", EVERYTHING)
def test_scaled_rope_equals_plain_attention(name: str) -> None:
    """YaRN multiplies cos and sin: wherever RoPE is undone and applied again, the factor is, too."""
    cache, lengths = make_cache(EVERYTHING[name], rope=YARN), [65, 417, 1000]  # below and above the original 512
    streams = [Stream(seed, cache.allocate(n, n + 200)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)))
    for _ in range(130):  # pages of generated tokens are compressed, too
        decode(cache, streams)
    if cache.spec.compresses:
        assert (cache.groups[0].pool.tables.compressed > 0).any(), "nothing was compressed: the test would show nothing"
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream, YARN), atol=5e-5, rtol=1e-4)


CODE_ERROR = 0.01154**0.5
"""Error of values of unit variance in 4 bits, as these head dims have: an optimal uniform quantizer's (Max, 1960)."""


@pytest.mark.parametrize("kv", ["turbo", "turbo-host"])
def test_turbo_errs_as_its_codes_of_values_do(kv: str) -> None:
    """Values that are averaged lose their errors as fast as themselves; latents in 8 bits hardly add to them."""
    cache, lengths = make_cache(preset(kv, rank=SHAPE.kv_dim, budget=1.0)), [417, 1000, 700]
    streams = [Stream(seed, cache.groups[0].pool.allocate(n, n + 140)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)))
    for _ in range(140):
        decode(cache, streams)
    for stream in streams:
        cache.groups[0].pool.extend(stream.sequence, stream.length + 90, stream.length + 100)
    prefill(cache, [(stream, 90) for stream in streams], block=170)
    for _ in range(10):
        decode(cache, streams)
    for stream, length in zip(streams, lengths):
        got, wanted = (x[length:].flatten(1) for x in (stream.output(), plain_attention(stream)))
        error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert 0.7 * CODE_ERROR < error.mean() < 1.1 * CODE_ERROR, error.mean()
        assert error.quantile(0.97) < 1.5 * CODE_ERROR, error  # a sharp query can be off by more for its key's codes


def test_dense_sequence_is_compressed_when_decoding_outgrows_the_limit() -> None:
    spec = preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0, outliers=4)
    cache = make_cache(spec)
    stream = Stream(3, cache.allocate(20, 400))
    prefill(cache, [(stream, 20)])
    owned = cache.total - cache.free
    for _ in range(380):
        decode(cache, [stream])
    assert stream.sequence.compressed == 320  # (399 - local 32) // 64 pages
    assert not stream.sequence.dense
    assert (cache.total - cache.free)["device"] < owned["device"]
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kept", [0, 3])
def test_truncated_sequence_continues_differently(kept: int) -> None:
    cache = make_cache(preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0))
    stream = Stream(5, cache.allocate(1000, 1000))
    prefill(cache, [(stream, 1000)])
    compressed = stream.sequence.compressed
    with pytest.raises(ValueError, match="cut"):
        cache.truncate(stream.sequence, compressed - 1)
    cache.truncate(stream.sequence, compressed + kept)
    stream.length = compressed + kept
    stream.outputs = [stream.output()[: stream.length]]
    stream.k[:, stream.length :] += 1
    cache.extend(stream.sequence, stream.length + 50, stream.length + 60)
    prefill(cache, [(stream, 50)])
    for _ in range(10):
        decode(cache, [stream])
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def test_tokens_that_a_fork_shares_are_not_forgotten() -> None:
    """Otherwise each would write its next tokens into pages that the other reads."""
    cache = make_cache(preset("full"))
    stream = Stream(9, cache.allocate(200, 200))
    prefill(cache, [(stream, 200)])
    child = stream.going_on(cache.fork(stream.sequence, 128, 140, 140), 128, Stream(10))
    for sequence in (stream.sequence, child.sequence):
        with pytest.raises(ValueError, match="128 are compressed or shared"):
            cache.truncate(sequence, 127)
    cache.truncate(stream.sequence, 130)
    stream.length, stream.outputs = 130, [stream.output()[:130]]
    stream.k[:, 130:] += 1
    cache.extend(stream.sequence, 200, 200)
    prefill(cache, [(child, 12), (stream, 70)])
    for one in (stream, child):
        torch.testing.assert_close(one.output(), plain_attention(one), atol=5e-5, rtol=1e-4)


def test_stale_nans_in_recycled_pages_do_not_leak() -> None:
    spec = preset("shadowkv", rank=SHAPE.kv_dim, budget=1.0)
    cache = make_cache(spec, blocks=40)
    for tier in cache.groups[0].store.tiers.values():
        tier.arena.fill_(0xFF)  # every float of that pattern is a NaN
    stream = Stream(7, cache.allocate(1000, 1100))
    prefill(cache, [(stream, 1000)])
    for _ in range(100):
        decode(cache, [stream])
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)
