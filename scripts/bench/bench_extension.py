"""A later turn over a cached sequence: attention of its new tokens over everything before, in one layer.

``python scripts/bench/bench_extension.py [--out file.json]``: a layer of Llama-3.1-8B's sizes in bfloat16 on shuffled
pages. "layer us" is what ``append`` and ``attend`` of the cache take, launched one after the other as a prefill does;
"dense us" is causal attention over as many plain keys and values. "rebuild us" is what it takes to rebuild the keys and
read the values, without attention. "floor us" is the largest of three: multiplications of attention and of low-rank
keys at the card's speed, bytes read and written in its memory, and bytes of values across the bus. Attention is checked
against the references over the same pages first.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import timing
import torch

from shadowkv.kvcache.batch import PrefillBatch
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.cached import CachedTokens
from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.ops import Ops
from shadowkv.ops.registry import NAMES
from shadowkv.ops.rotate.tables import RopeConfig

SHAPE = ModelShape(num_layers=1, num_query_heads=32, num_kv_heads=8, head_dim=128)
ROPE = RopeConfig(128, theta=500000.0)
DTYPE = torch.bfloat16
CASES = [
    (kv, tokens, new)
    for tokens, new in ((61440, 256), (16384, 256), (61440, 16), (61440, 2048), (124928, 256))
    for kv in ("full", "turbo", "turbo-host", "shadowkv", "quest")
]
MULTIPLIES, BUS = 990e12, 50.7e9
"""Dense bfloat16 operations a second of the card, and bytes a second that its threads read across the bus."""


def cached(kv: str, tokens: int, new: int) -> tuple[KVCache, PrefillBatch]:
    """A cache with a sequence of random keys and values, and a batch of its next tokens."""
    spec = preset(kv).resolve(SHAPE)
    layout = Layout(spec, SHAPE, DTYPE, build_parts(spec, SHAPE, DTYPE), tokens + new)
    memory = layout.blocks(layout.pages(tokens, tokens + new))
    cache = KVCache(spec, SHAPE, ROPE, slots=1, max_model_len=tokens + new, memory=memory, dtype=DTYPE, device="cuda")
    cache.store.device.shuffle(0)
    cache.store.host.shuffle(0)
    sequence = cache.pool.allocate(tokens, tokens + new)
    batch = cache.prefill_batch([(sequence, tokens)])
    cache.append(0, *torch.randn(2, tokens, 8, 128, device="cuda", dtype=DTYPE), batch.block(0, tokens))
    cache.finish_prefill(0, batch)
    cache.end_prefill(batch)
    return cache, cache.prefill_batch([(sequence, new)])


def microseconds(call: Callable[[], object], rounds: int = 10) -> float:
    """Median time of a call, of some that are launched one after the other."""
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 / 4 for start, end in times[2:])


def check(cache: KVCache, layer: Callable[[], torch.Tensor]) -> None:
    """Against the references over the same stored bytes, rounded as the ops round or elsewhere."""
    got, prefill = layer(), cache.prefill
    for owner in (prefill, prefill.cached):
        owner.ops = Ops("cuda", dict.fromkeys(NAMES, "reference"))
    error = float((got - (wanted := layer())).float().norm() / wanted.float().norm())
    for owner in (prefill, prefill.cached):
        owner.ops = cache.ops
    assert error < 0.02, f"off by {error:.3g} of its norm"


@torch.inference_mode()
def measure(case: tuple[str, int, int]) -> list[timing.Row]:
    """One row of the table."""
    kv, tokens, new = case
    cache, batch = cached(kv, tokens, new)
    block = batch.block(0, new)
    q = torch.randn(new, 32, 128, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, new, 8, 128, device="cuda", dtype=DTYPE)

    def layer() -> torch.Tensor:
        cache.append(0, k, v, block)
        return cache.attend(0, q, block)

    check(cache, layer)
    spent = microseconds(layer)
    places, rebuilt = batch.places_of(batch.segments[0], cache.prefill._places), math.nan
    if places.cached is not None:
        reader = CachedTokens(cache.store, cache.parts)
        rebuilt = microseconds(lambda: list(reader.blocks(0, places.cached, places.static)))
    plain = torch.randn(2, tokens + new, 8, 128, device="cuda", dtype=DTYPE)
    dense = microseconds(lambda: cache.ops.causal_attention(q, *plain))
    layout, rank = cache.layout, cache.spec.rank or 0
    on_host = sum(field.nbytes for field in layout.host_fields) / 64 * tokens
    used = sum(field.nbytes for part in (cache.parts.keys, cache.parts.values) for field in part.page_fields())
    stored = (used / 64 * tokens if cache.spec.seals else plain[:, 0].nbytes * tokens) - on_host
    moved = stored + (2 * plain.nbytes if cache.spec.seals else 0)  # rebuilt rows are written and read
    multiplied = 4 * new * (tokens + new / 2) * 32 * 128 + 2 * tokens * rank * 1024
    floor = 1e6 * max(moved / timing.READ_SPEED, multiplied / MULTIPLIES, on_host / BUS)
    return [
        {
            "kv": kv, "tokens": tokens, "new": new, "layer us": round(spent, 1), "rebuild us": round(rebuilt, 1),
            "dense us": round(dense, 1), "layer / dense": round(spent / dense, 2), "floor us": round(floor, 1),
            "layer / floor": round(spent / floor, 2), "MB": round(moved / 1e6, 1), "MB across": round(on_host / 1e6, 1),
            "GFLOP": round(multiplied / 1e9, 1),
        }
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(timing.run(__doc__ or "", torch.cuda.is_available(), CASES, measure))
