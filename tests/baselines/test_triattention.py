"""Ranks by the prompt's mean queries against TriAttention's formula, written here independently."""

import math
from dataclasses import replace

import driver
import pytest
import torch
from driver import DEVICE, ROPE, SHAPE, Stream, compressed_batch, decode, make_cache, prefill
from torch import Tensor

from shadowkv.baselines import triattention
from shadowkv.baselines.triattention import expected_scores, looking_ahead, rope, statistics
from shadowkv.kvcache.presets import preset
from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables

YARN = RopeConfig(16, interleaved=True, scaling="yarn", factor=4.0, original_max_position=512)
S = 500


def complexes(x: Tensor, config: RopeConfig) -> Tensor:
    first, second = (x[..., 0::2], x[..., 1::2]) if config.interleaved else x.chunk(2, dim=-1)
    return torch.complex(first.double(), second.double())


def formula(queries: Tensor, keys: Tensor, now: Tensor, ahead: tuple[int, ...], config: RopeConfig) -> Tensor:
    """[n] of pre-RoPE queries [w, d] of one head and pre-RoPE keys [n, d] at positions 0 to n - 1; ``now`` [n]."""
    q, k, theta = complexes(queries, config), complexes(keys, config), config.inverse_frequencies()
    mean, length, square = q.mean(0), q.abs().mean(0), config.magnitude**2
    amplitude, phase = mean.abs() * k.abs(), (mean * k.conj()).angle()
    rest = ((length - mean.abs()) * k.abs() * square).sum(-1)
    gap = (now - torch.arange(len(keys))).double()[:, None]
    scores = [(amplitude * square * torch.cos((gap + x) * theta + phase)).sum(-1) for x in ahead]
    return (torch.stack(scores).mean(0) + rest) / math.sqrt(config.head_dim)


@pytest.mark.parametrize("config", [ROPE, YARN], ids=["halves", "interleaved-yarn"])
def test_scores_are_those_of_the_formula(config: RopeConfig) -> None:
    torch.manual_seed(0)
    rotary, now = RotaryTables(config, 1000), 700
    queries, keys = torch.randn(1, 1, 64, 16) + torch.randn(16), torch.randn(300, 16)
    rotated = apply_rope(queries[0, 0, :, None], torch.arange(64), rotary)[:, 0]
    mean, spread = statistics(rope(rotated, -torch.arange(64), rotary)[None, None], config)
    asked = rope(looking_ahead(mean, rotary), torch.tensor([[now]]), rotary)
    at = apply_rope(keys[:, None], torch.arange(300), rotary)[:, 0]
    found = expected_scores(asked[0], spread[0], at, config)[0]
    wanted = formula(queries[0, 0], keys, torch.full((300,), now), triattention.AHEAD, config)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_dimensions_that_do_not_rotate_are_scored_as_they_are() -> None:
    torch.manual_seed(0)
    config = RopeConfig(16, rotary_dim=8)
    query, keys = torch.randn(1, 1, 1, 16), torch.randn(50, 16)
    mean, spread = statistics(query, config)
    query[..., :8], keys[:, :8] = 0, 0
    found = expected_scores(looking_ahead(mean, RotaryTables(config, 10))[0], spread[0], keys, config)
    torch.testing.assert_close(found[0], keys @ query[0, 0, 0] / 4)


def test_one_query_at_no_distance_ranks_as_exact_scores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triattention, "AHEAD", (0,))
    torch.manual_seed(0)
    rotary, now = RotaryTables(ROPE, 1000), torch.tensor([[700]])
    query = torch.randn(1, 1, 16)
    keys = apply_rope(torch.randn(300, 1, 16), torch.arange(300), rotary)[:, 0]
    mean, spread = statistics(query.expand(64, -1, -1)[None, None, :, 0], ROPE)
    found = expected_scores(rope(looking_ahead(mean, rotary), now, rotary)[0], spread[0], keys, ROPE)[0]
    exact = keys @ apply_rope(query, now[0], rotary)[0, 0]
    assert torch.equal(found.argsort(), exact.argsort())


@pytest.mark.parametrize("chunk", [1, 8])
def test_tokens_are_ranked_when_they_are_compressed(chunk: int) -> None:
    cache = make_cache(preset("triattention", chunk=chunk, budget=64))
    stream = Stream(5, cache.allocate(S, S + 140))
    stream.q += 2 * torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    prefill(cache, [(stream, S)], block=70)
    while stream.length < S + 130:
        decode(cache, [stream])
    batch, compressed = compressed_batch(cache, [stream]), stream.sequence.compressed
    assert len(batch.slots) == 1 and compressed == 576  # 448 after the prompt
    page = torch.arange(compressed) // 64
    now = torch.where(page < 448 // 64, S - 1, 64 * page + 64 + 32 - 1)
    for layer in range(SHAPE.num_layers):
        stored = (
            cache.groups[0]
            .store.page["trig_ranks"][layer][batch.pages[0]]
            .transpose(0, 1)
            .flatten(1)[:, :compressed]
            .cpu()
        )
        ranks = cache.parts.index.ranks(cache.groups[0].store, layer, batch)[0].cpu()
        q = stream.q[layer, :1].expand(1, -1, -1).to(DEVICE)
        chosen = cache.parts.index.select(cache.groups[0].store, layer, q, batch).chunks[0].cpu()
        for head in range(SHAPE.num_kv_heads):
            queries, keys = stream.q[layer, S - 64 : S].cpu(), stream.k[layer, :compressed, head].cpu()
            group = range(head * SHAPE.group, (head + 1) * SHAPE.group)
            wanted = torch.stack([formula(queries[:, i], keys, now, triattention.AHEAD, ROPE) for i in group]).amax(0)
            torch.testing.assert_close(stored[head].double(), wanted, atol=2e-3, rtol=2e-3)
            best = stored[head].float().unflatten(0, (-1, chunk)).amax(-1)
            torch.testing.assert_close(ranks[head, : len(best)], best - best.amax())
            best[: 8 // chunk] = -torch.inf  # the sink is exact
            assert torch.equal(best[chosen[head]].sort().values, best.topk(64 // chunk).values.flip(0))


def test_without_queries_the_newest_tokens_come_first() -> None:
    cache = make_cache(preset("triattention", budget=16))
    stream = Stream(3, cache.allocate(20, 400))
    prefill(cache, [(stream, 20)])
    for _ in range(300):
        decode(cache, [stream])
    batch = compressed_batch(cache, [stream])
    seen = cache.groups[0].store.state["trig_queries"][0][batch.states].flatten().tolist()
    assert seen[0] == 20 and len(seen) > 1 and not any(seen[1:])
    chosen = cache.parts.index.select(cache.groups[0].store, 0, stream.q[0, :1].expand(len(seen), -1, -1), batch).chunks
    for row, pages, count in zip(chosen[1:].tolist(), batch.num_pages[1:].tolist(), batch.budget[1:].tolist()):
        newest = [*range(64 * pages - count, 64 * pages)]
        assert all(head[:count] == newest for head in row) and count > 0


def test_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SHAPE", replace(SHAPE, num_query_heads=4, num_kv_heads=4))
    index = make_cache(preset("triattention")).parts.index
    assert index.bytes_per_token() == 4 * 2
