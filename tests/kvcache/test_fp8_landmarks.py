"""Landmarks in eight bits against those in the cache's own dtype: what is stored, and what is found by it."""

import pytest
import torch
from driver import DEVICE, SHAPE, Stream, compressed_batch, decode, make_cache, prefill, rotate_plainly

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset

LENGTH = 4000


def run(index: str) -> tuple[KVCache, list[Stream]]:
    cache = make_cache(preset(f"shadowkv:index={index},rank=16,outliers=5,budget=320"))
    streams = [Stream(seed, cache.allocate(LENGTH, LENGTH + 96)) for seed in range(3)]
    for stream in streams:
        prefill(cache, [(stream, LENGTH)])
    return cache, streams


def test_means_are_stored_as_exactly_as_eight_bits_can() -> None:
    cache, streams = run("chunk-mean-fp8")
    for _ in range(90):  # while pages are compressed
        decode(cache, streams)
    row = compressed_batch(cache, streams[:1])
    compressed = 8 * int(row.num_chunks)
    assert compressed > LENGTH
    for layer in range(SHAPE.num_layers):
        codes, scale = (
            cache.groups[0].store.page[name][layer][row.pages[0]] for name in ("landmarks", "landmark_scale")
        )
        rotated = rotate_plainly(streams[0].k[layer, :compressed], torch.arange(compressed, device=DEVICE))
        means = rotated.unflatten(0, (-1, 8, 8)).mean(2).transpose(1, 2)  # [pages, H, C, d]
        stored = codes.float() * scale[..., None, None]
        largest = means.abs().amax((2, 3), keepdim=True)
        # Three bits after the first one; below 2^-6 of 448 equal steps.
        assert ((stored - means).abs() <= means.abs() / 16 + largest * 2**-10 / 448 + 1e-6).all()
        torch.testing.assert_close(codes.float().abs().amax((2, 3)), torch.full_like(scale, 448.0))


def test_the_same_chunks_are_found() -> None:
    caches, agreed, budget = [run(index) for index in ("chunk-mean", "chunk-mean-fp8")], 0, 40
    for _ in range(10):
        q = torch.randn(3, SHAPE.num_query_heads, SHAPE.head_dim, device=DEVICE)
        found = []
        for cache, streams in caches:
            selected = cache.parts.index.select(cache.groups[0].store, 1, q, compressed_batch(cache, streams)).chunks
            assert selected.shape[-1] == budget
            assert selected.min() >= 0
            empty = torch.zeros(*selected.shape[:2], LENGTH // 8, dtype=torch.bool, device=DEVICE)
            found.append(empty.scatter(-1, selected, True))
        agreed += int((found[0] & found[1]).sum())
    assert agreed >= 0.95 * 10 * 3 * SHAPE.num_kv_heads * budget


def test_chunks_of_zeros_are_zeros() -> None:
    cache = make_cache(preset("shadowkv:index=chunk-mean-fp8,rank=16,outliers=0,budget=64"))
    stream = Stream(0, cache.allocate(700, 800))
    stream.k.zero_()
    prefill(cache, [(stream, 700)])
    row = compressed_batch(cache, [stream])
    assert not cache.groups[0].store.page["landmarks"][0][row.pages[0]].float().any()


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_half_the_bytes(dim: int) -> None:
    shape = ModelShape(2, 8, 8, dim)
    plain, small = (
        build_parts(resolve(preset(f"shadowkv:index={index}"), shape), shape, torch.bfloat16).index
        for index in ("chunk-mean", "chunk-mean-fp8")
    )
    assert small.bytes_per_token() == small.scored_bytes(1, 1) == plain.bytes_per_token() / 2 + 8 * 4 / 64
