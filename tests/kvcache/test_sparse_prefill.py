"""Sparse prefill: exact where it keeps everything and where it does not pay, and what it attends to elsewhere."""

from dataclasses import replace

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, decode, make_cache, plain_attention, prefill

from shadowkv.kvcache.parts import prefill as sparse_prefill
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.ops.select_blocks.reference import BLOCK


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill, "SPARSE_FROM", 1200)
    monkeypatch.setattr(sparse_prefill, "MIN_QUERIES", 200)
    monkeypatch.setattr("shadowkv.ops.select_blocks.reference.MIN_BLOCKS", 1)
    if DEVICE == "cuda":  # the kernels have the number by their own name
        monkeypatch.setattr("shadowkv.ops.select_blocks.triton.MIN_BLOCKS", 1)


POLICIES = {
    name: preset(policy, prefill="sparse", prefill_error=0.0, **fields)
    for name, policy, fields in (
        ("full", "full", {}),
        ("shadowkv", "shadowkv", {"rank": SHAPE.kv_dim, "budget": 1.0}),
        ("turbo-without-codes", "turbo:keys=low-rank,values=dense", {"rank": SHAPE.kv_dim, "budget": 1.0}),
    )
}


@pytest.mark.parametrize("name", POLICIES)
def test_turns_that_keep_everything_equal_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.kvcache.compression.rebuilt.SPAN_PAGES", 3)
    cache = make_cache(POLICIES[name])
    lengths = [1700, 900]
    streams = [Stream(seed, cache.allocate(n, n + 20)) for seed, n in enumerate(lengths)]
    prefill(cache, list(zip(streams, lengths)), block=640)
    for _ in range(20):
        decode(cache, streams)
    assert cache.take_attention_density() == 1.0
    for stream in streams:
        cache.trim(stream.sequence)
        cache.extend(stream.sequence, stream.length + 450, stream.length + 460)
    prefill(cache, [(stream, 450) for stream in streams], block=640)
    assert cache.take_attention_density() == 1.0
    for _ in range(10):
        decode(cache, streams)
    for stream in streams:
        torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)
        cache.release(stream.sequence)
    assert cache.free == cache.total


def test_short_prompts_and_short_turns_are_exact() -> None:
    cache = make_cache(POLICIES["full"])
    stream = Stream(1, cache.allocate(1200, 1400))
    prefill(cache, [(stream, 1200)])
    cache.extend(stream.sequence, 1390, 1400)
    prefill(cache, [(stream, 190)])
    assert cache.take_attention_density() is None
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def test_a_prompts_last_tokens_attend_to_everything_wherever_blocks_end() -> None:
    cache = make_cache(preset("full:prefill=sparse,prefill_error=0.5"))
    stream = Stream(2, cache.allocate(2250, 2250))
    prefill(cache, [(stream, 2250)], block=1000)  # the last block has 250 tokens, six fewer than DENSE_LAST
    error = (stream.output() - plain_attention(stream)).abs().flatten(1).amax(1)
    assert error[:1000].max() < 5e-5
    assert error[1000 + 6 * BLOCK : 1000 + 7 * BLOCK].max() > 1e-3, "nothing was left out: the test would show nothing"
    assert error[1000 + 7 * BLOCK :].max() < 5e-5
    density = cache.take_attention_density()
    assert density is not None
    assert 0.3 < density < 1.0
    assert cache.take_attention_density() is None


def test_a_hook_decides() -> None:
    cache, calls = make_cache(POLICIES["full"]), []

    def hook(layer, q, k, blocks):
        indices, counts, weights = blocks
        calls.append((layer, tuple(q.shape), tuple(indices.shape)))
        everything = torch.arange(indices.shape[2], dtype=torch.int32, device=q.device).expand_as(indices).contiguous()
        ends = indices.shape[2] - counts.shape[1] + 1 + torch.arange(counts.shape[1], device=q.device)
        return everything, ends.expand_as(counts).int().contiguous(), torch.ones_like(weights)

    cache.block_hook = hook
    stream = Stream(3, cache.allocate(1920, 1920))
    prefill(cache, [(stream, 1920)], block=1280)
    heads = SHAPE.num_query_heads
    sparse = [((1280, heads, 16), (heads, 10, 10)), ((640, heads, 16), (heads, 5, 15))]
    assert calls == [(layer, *one) for layer in range(SHAPE.num_layers) for one in sparse]
    torch.testing.assert_close(stream.output(), plain_attention(stream), atol=5e-5, rtol=1e-4)


def test_dense_caches_select_nothing_and_say_so() -> None:
    cache = make_cache(KVSpec())
    assert cache.take_attention_density() is None
    with pytest.raises(ValueError, match="prefill=None selects no blocks; use prefill='sparse'"):
        cache.block_hook = lambda *args: args[3]


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill='some' is not one of dense, sparse"):
        preset("full:prefill=some")
    with pytest.raises(ValueError, match="prefill='some' is not one of dense, sparse"):
        resolve(KVSpec(prefill="some"), SHAPE)


def test_errors_that_mean_nothing_are_refused() -> None:
    for strategy in ("sparse", None):
        for error in (1.0, -0.5):
            with pytest.raises(ValueError, match=f"prefill_error={error} must be at least 0 and below 1"):
                resolve(KVSpec(prefill=strategy, settings={"prefill_error": error}), SHAPE)
    with pytest.raises(
        ValueError, match=r"prefill_error=0\.5 has no meaning with prefill='dense'; prefill that have it: sparse"
    ):
        resolve(KVSpec(prefill="dense", settings={"prefill_error": 0.5}), SHAPE)


def test_an_open_prefill_keeps_the_settings_of_what_is_chosen() -> None:
    spec = resolve(preset("full:prefill_error=0.25"), SHAPE)
    assert spec.as_dict()["prefill_error"] == 0.25
    assert resolve(spec.changed(prefill="sparse"), SHAPE).as_dict()["prefill_error"] == 0.25
    assert "prefill_error" not in resolve(KVSpec(), SHAPE).as_dict()
    with pytest.raises(ValueError, match=r"prefill_error=0\.25 has no meaning with prefill='dense'"):
        resolve(replace(spec, prefill="dense"), SHAPE)


def test_more_error_is_fewer_blocks() -> None:
    densities = []
    for error in (0.3, 0.1, 0.02):
        cache = make_cache(preset("full", prefill="sparse", prefill_error=error))
        stream = Stream(4, cache.allocate(2250, 2250))
        prefill(cache, [(stream, 2250)], block=1000)
        densities.append(cache.take_attention_density())
    assert densities == sorted(densities) and len(set(densities)) == 3


def test_caches_of_other_modes_do_not_store_alike() -> None:
    dense, sparse, unset = (make_cache(spec) for spec in (preset("full:prefill=dense"), POLICIES["full"], KVSpec()))
    assert not sparse.snapshots.stored_alike(dense.snapshots, 100)
    assert unset.snapshots.stored_alike(dense.snapshots, 100)
    other = make_cache(preset("full", prefill="sparse", prefill_error=0.5))
    assert not sparse.snapshots.stored_alike(other.snapshots, 100)
