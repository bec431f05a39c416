"""A later turn over a cached sequence: attention of its new tokens over everything before, in one layer.

``python scripts/bench/bench_extension.py [--out file.json]``: a layer of Llama-3.1-8B's sizes in bfloat16 on scattered
pages. "layer us" is the time of the cache's ``append`` and ``attend``, launched one after the other as in a prefill;
"dense us" is causal attention over the same number of plain keys and values. "floor us" is the largest of three:
multiplications of attention and of low-rank keys at the card's speed, bytes read and written in its memory, and bytes
of values across the bus. Attention is checked first, against a cache that runs on the references and has the same
sequence.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import timing
import torch
from harness import fill_random, open_cache
from torch import Tensor

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.registry import NAMES

SHAPE = ModelShape(num_layers=1, num_query_heads=32, num_kv_heads=8, head_dim=128)
ROPE = RopeConfig(128, theta=500000.0)
DTYPE = torch.bfloat16
CASES = [
    (kv, tokens, new)
    for tokens, new in ((61440, 256), (16384, 256), (61440, 16), (61440, 2048), (124928, 256))
    for kv in ("full", "turbo", "turbo-host", "shadowkv", "quest")
]
MULTIPLIES, BUS = 990e12, 50.7e9
"""Dense bfloat16 operations per second of the card, and bytes per second that its threads read across the bus."""


def make_cache(kv: str, tokens: int, new: int, backends: dict[str, str] | None = None) -> KVCache:
    """A cache for one sequence of ``tokens`` and ``new`` ones."""
    return open_cache(preset(kv), SHAPE, ROPE, 1, tokens, tokens + new, dtype=DTYPE, backends=backends)


def turn(cache: KVCache, sequence: CachedSequence, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A call in which the next tokens of a sequence are stored and attend."""
    block = cache.prefill_batch([(sequence, len(q))]).block(0, len(q))

    def layer() -> Tensor:
        cache.append(0, k, v, block)
        return cache.attend(0, q, block)

    return layer


def microseconds(call: Callable[[], object], rounds: int = 10) -> float:
    """Median time per call, out of several launched one after the other."""
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


def check(kv: str, cache: KVCache, sequence: CachedSequence, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compares with the references over the same stored bytes, rounded as in the ops or differently."""
    got, tokens = turn(cache, sequence, q, k, v)(), sequence.length
    plain = make_cache(kv, tokens, len(q), dict.fromkeys(NAMES, "reference"))
    wanted = turn(plain, plain.snapshots.load(cache.snapshots.export(sequence), sequence.capacity), q, k, v)()
    error = float((got - wanted).float().norm() / wanted.float().norm())
    assert error < 0.02, f"off by {error:.3g} of its norm"


@torch.inference_mode()
def measure(case: tuple[str, int, int]) -> list[timing.Row]:
    """One row of the table."""
    kv, tokens, new = case
    cache = make_cache(kv, tokens, new)
    sequence = cache.allocate(tokens, tokens + new)
    fill_random(cache, sequence, tokens)
    q = torch.randn(new, 32, 128, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, new, 8, 128, device="cuda", dtype=DTYPE)
    check(kv, cache, sequence, q, k, v)
    spent = microseconds(turn(cache, sequence, q, k, v))
    plain = torch.randn(2, tokens + new, 8, 128, device="cuda", dtype=DTYPE)
    dense = microseconds(lambda: cache.ops.causal_attention(q, *plain))
    rank, parts = cache.spec.rank or 0, build_parts(cache.spec, SHAPE, DTYPE)
    on_host = sum(field.nbytes for field in cache.layout.host_fields) / PAGE * tokens
    used = sum(field.nbytes for part in (parts.keys, parts.values) for field in part.page_fields())
    stored = (used / PAGE * tokens if cache.spec.seals else plain[:, 0].nbytes * tokens) - on_host
    moved = stored + (2 * plain.nbytes if cache.spec.seals else 0)  # rebuilt rows are written and read
    multiplied = 4 * new * (tokens + new / 2) * 32 * 128 + 2 * tokens * rank * 1024
    floor = 1e6 * max(moved / timing.READ_SPEED, multiplied / MULTIPLIES, on_host / BUS)
    return [
        {
            "kv": kv, "tokens": tokens, "new": new, "layer us": round(spent, 1), "dense us": round(dense, 1),
            "layer / dense": round(spent / dense, 2), "floor us": round(floor, 1),
            "layer / floor": round(spent / floor, 2), "MB": round(moved / 1e6, 1), "MB across": round(on_host / 1e6, 1),
            "GFLOP": round(multiplied / 1e9, 1),
        }
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(timing.run(__doc__ or "", torch.cuda.is_available(), CASES, measure))
