"""Drives a KVCache with random queries, keys and values that depend on the sequence and position alone, and keeps
them, so that any batching must give the same answers as plain attention over what was appended."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from shadowkv.kvcache import inspection
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=16)
ROPE = RopeConfig(head_dim=16, theta=10000.0)
YARN = replace(ROPE, scaling="yarn", factor=4.0, original_max_position=512)  # its cos and sin are not of length 1
SINKS: Tensor | None = None
"""Scores [H_q] of one more position in every softmax, whose value is 0."""
MAX_LEN = 4096
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_cache(
    spec: KVSpec,
    slots: int = 8,
    blocks: int = 400,
    max_model_len: int = MAX_LEN,
    fetch_buffer: float = 2.0,
    rope: RopeConfig | None = None,
) -> KVCache:
    layout = Layout(spec, SHAPE, torch.float32, max_model_len, fetch_buffer)
    return cache_of(layout, rope or ROPE, slots=slots, memory=Blocks(dict.fromkeys(layout.paged, blocks)))


def cache_of(
    layout: Layout, rope: RopeConfig, *, slots: int, memory: Blocks, backends: Mapping[str, str] | None = None
) -> KVCache:
    """A cache with ops of its own."""
    ops = choose_ops(layout, rope, DEVICE, backends=backends)
    return KVCache(layout, rope, slots=slots, memory=memory, ops=ops, device=DEVICE)


def scatter(cache: KVCache, seed: int) -> None:
    """Leaves the free blocks mixed, as many sequences that come and go do."""
    draw, held = random.Random(seed), []
    for _ in range(8 * cache.slots):
        start = draw.randint(1, cache.max_model_len)
        if cache.demand(start, start).within(cache.free):
            held.append(cache.allocate(start, start))
        elif held:
            cache.release(held.pop(draw.randrange(len(held))))
    draw.shuffle(held)
    for sequence in held:
        cache.release(sequence)
    assert cache.free == cache.total


def compressed_batch(cache: KVCache, streams: list[Stream]) -> CompressedBatch:
    """The compressed tokens that the next step of ``streams`` sees."""
    compressed = decode_part(cache, streams).compressed
    assert compressed is not None, "nothing is compressed"
    return compressed


def decode_part(cache: KVCache, streams: list[Stream]) -> DecodeBatch:
    """What the first group of layers is told of the next step of ``streams``."""
    return inspection.decode_part(cache, [stream.sequence for stream in streams])


@lru_cache(maxsize=16)
def drawn(seed: int, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [layers, MAX_LEN, H_q, d], keys and values [layers, MAX_LEN, H, d]; a test asks for few seeds, often."""
    g = torch.Generator().manual_seed(seed)
    layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
    # Low-rank plus noise, as keys of a model are.
    mixing = torch.randn(heads * dim // 2, heads * dim, generator=g)
    low = torch.randn(layers, MAX_LEN, heads * dim // 2, generator=g) @ mixing / 4
    k = (low + 0.1 * torch.randn(low.shape, generator=g)).unflatten(-1, (heads, dim))
    v = torch.randn(layers, MAX_LEN, heads, dim, generator=g)
    q = 2 * torch.randn(layers, MAX_LEN, shape.num_query_heads, dim, generator=g)
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


class Stream:
    """One sequence's endless random input and every output it got."""

    def __init__(self, seed: int, sequence: CachedSequence | None = None) -> None:
        self.q, self.k, self.v = (x.clone() for x in drawn(seed, SHAPE))
        self.sequence = sequence
        self.length = 0
        self.outputs: list[Tensor] = []

    def output(self) -> Tensor:
        """[tokens, layers, H_q, d]"""
        return torch.cat(self.outputs)

    def going_on(self, sequence: CachedSequence, at: int, other: Stream) -> Stream:
        """A stream with the input of this one for ``at`` tokens, then that of ``other``."""
        child = copy(other)
        for name in ("q", "k", "v"):
            setattr(child, name, torch.cat((getattr(self, name)[:, :at], getattr(other, name)[:, at:]), dim=1))
        child.sequence, child.length, child.outputs = sequence, at, [self.output()[:at]]
        return child

    def again(self) -> Stream:
        """The same input, none of it given yet."""
        twin = copy(self)
        twin.sequence, twin.length, twin.outputs = None, 0, []
        return twin


def prefill(cache: KVCache, work: list[tuple[Stream, int]], block: int = 500) -> None:
    batch = cache.prefill_batch([(stream.sequence, count) for stream, count in work])
    q, k, v = (
        torch.cat([getattr(s, name)[:, s.length : s.length + n] for s, n in work], dim=1) for name in ("q", "k", "v")
    )
    spans = [slice(a, min(a + block, batch.num_tokens)) for a in range(0, batch.num_tokens, block)]
    blocks = [batch.block(span.start, span.stop) for span in spans]
    outs = []
    for layer in range(SHAPE.num_layers):
        parts = []
        for b, span in zip(blocks, spans, strict=True):
            cache.append(layer, k[layer, span], v[layer, span], b)
            parts.append(cache.start(layer, q[layer, span], b, SINKS)())
        outs.append(torch.cat(parts))
        cache.finish_prefill(layer, batch)
    cache.end_prefill(batch)
    start = 0
    for stream, count in work:
        stream.outputs.append(torch.stack([o[start : start + count] for o in outs], dim=1))
        stream.length += count
        start += count


def decode(cache: KVCache, streams: list[Stream], drafting: bool = False) -> None:
    plan = cache.plan_decode([s.sequence for s in streams], drafting=drafting)
    batch = cache.decode_batch(plan)
    outs = []
    for layer in range(SHAPE.num_layers):
        q, k, v = (torch.stack([getattr(s, name)[layer, s.length] for s in streams]) for name in ("q", "k", "v"))
        cache.append(layer, k, v, batch)
        outs.append(cache.start(layer, q, batch, SINKS)())
    cache.end_decode(plan)
    for row, stream in enumerate(streams):
        stream.outputs.append(torch.stack([o[row] for o in outs]).unsqueeze(0))
        stream.length += 1


def rotate_plainly(x: Tensor, positions: Tensor, rope: RopeConfig | None = None) -> Tensor:
    """[n, heads, d] by the textbook formula."""
    table = RotaryTables(rope or ROPE, MAX_LEN, DEVICE)
    cos, sin = table.cos[positions][:, None], table.sin[positions][:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def plain_attention(stream: Stream, rope: RopeConfig | None = None) -> Tensor:
    """Causal attention over everything the stream gave that a layer's kind lets it see, [tokens, layers, H_q, d]."""
    n = stream.length
    position = torch.arange(n, device=DEVICE)
    result = []
    for layer in range(SHAPE.num_layers):
        q, k = (rotate_plainly(x[layer, :n], position, rope) for x in (stream.q, stream.k))
        k, v = (x.repeat_interleave(SHAPE.group, dim=1) for x in (k, stream.v[layer, :n]))
        scores = torch.einsum("qhd,khd->hqk", q, k) / SHAPE.head_dim**0.5
        unseen = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        if SHAPE.kinds and (window := SHAPE.kinds[layer].window) is not None:
            unseen |= torch.ones_like(unseen).tril(-window)
        scores = scores.masked_fill(unseen, float("-inf"))
        if SINKS is not None:
            scores = torch.cat((scores, SINKS[:, None, None].expand(-1, n, 1)), -1)
        result.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v))
    return torch.stack(result, dim=1)
