"""What storing a prompt adds to its prefill on a GPU: by itself, on top of a layer, and in memory.

``python scripts/bench/bench_prefill.py [--out file.json]``: layers of Llama-3.1-8B's sizes with random weights, in
bfloat16, on scattered pages. "storing" is the time to store a layer with nothing beside it, on keys with a mean
and a spectrum that falls as 1 / i; "host" is the host's part of it, and "basis" the op that finds their low-rank basis.
"layer" is a whole prefill divided by its layers, alternating with one of ``full``, which keeps keys and values as they
are; "exposed" is what the policy adds to that. Times are medians. "reserved" is what the engine leaves free for a
prefill, "peak" what one takes, and "cached" includes what PyTorch's allocator rounds up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import open_cache
from torch import Tensor

from shadowkv.engine.startup.sizing import prefill_bytes, storing_bytes
from shadowkv.eval.provenance import provenance
from shadowkv.eval.running.caches import prefill
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.filling import fill_dummy
from shadowkv.ops.apply_rope.tables import RopeConfig

LAYERS, HIDDEN, INTERMEDIATE = 3, 4096, 14336
SHAPE = ModelShape(LAYERS, num_query_heads=32, num_kv_heads=8, head_dim=128)
ROPE = RopeConfig(128, theta=500000.0)
DTYPE = torch.bfloat16
CASES = [(kv, tokens) for tokens in (61440, 124928) for kv in ("turbo", "turbo-host", "shadowkv")]


def model() -> Decoder:
    """Random layers of Llama-3.1-8B's sizes, with a small vocabulary."""
    config = ModelConfig(
        architecture="llama", num_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_query_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=1024, max_position=131072, rms_norm_eps=1e-5,
        rope=ROPE,
    )  # fmt: skip
    decoder = Decoder(config, DTYPE, "cuda")
    fill_dummy(decoder)
    return decoder


def make_cache(kv: str, tokens: int) -> KVCache:
    """A cache for a sequence of ``tokens``."""
    return open_cache(preset(kv), SHAPE, ROPE, 1, tokens, tokens + 64, dtype=DTYPE)


def synthetic_keys(tokens: int) -> Tensor:
    """[S, H, d] with a mean and singular values whose squares fall as 1 / i^1.5."""
    n = SHAPE.kv_dim
    mixing = torch.linalg.qr(torch.randn(n, n, device="cuda")).Q * torch.arange(1, n + 1, device="cuda") ** -0.75
    keys = torch.empty(tokens, n, dtype=DTYPE, device="cuda")
    mean = torch.randn(n, device="cuda") * 0.05
    for block in keys.split(16384):
        block.copy_(torch.randn(len(block), n, device="cuda") @ mixing + mean)
    return keys.unflatten(1, (SHAPE.num_kv_heads, SHAPE.head_dim))


@torch.inference_mode()
def storing(cache: KVCache, tokens: int, rounds: int = 3) -> dict[str, float]:
    """Milliseconds that storing a layer takes alone; the first round warms up."""
    keys, values = synthetic_keys(tokens), torch.randn(tokens, 8, 128, device="cuda").to(DTYPE)
    found: dict[str, list[float]] = {"storing_ms": [], "host_ms": [], "basis_ms": []}
    for _ in range(rounds + 1):
        sequence = cache.allocate(tokens, tokens)
        batch = cache.prefill_batch([(sequence, tokens)])
        cache.append(0, keys, values, batch.block(0, tokens))
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache.finish_prefill(0, batch)
        found["host_ms"].append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        found["storing_ms"].append(1e3 * (time.perf_counter() - start))
        cache.release(sequence)
        start = time.perf_counter()
        cache.ops.low_rank_basis(keys.flatten(1), cache.spec.rank)
        torch.cuda.synchronize()
        found["basis_ms"].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(times[1:]), 3) for name, times in found.items()}


def run(cache: KVCache, decoder: Decoder, tokens: int) -> float:
    """Seconds of one prefill."""
    decoder.use(cache.ops)
    sequence = cache.allocate(tokens, tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    prefill(decoder, cache, [(sequence, list(range(1000)) * (tokens // 1000) + [0] * (tokens % 1000))])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    cache.release(sequence)
    return seconds


def measure(decoder: Decoder, kv: str, tokens: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    cache = make_cache(kv, tokens)
    run(cache, decoder, tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    run(cache, decoder, tokens)
    peak, reserved = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - before
    full = make_cache("full", tokens)
    run(full, decoder, tokens)
    turns = [(run(cache, decoder, tokens), run(full, decoder, tokens)) for _ in range(rounds)]  # as its clock sinks
    layer, plain = (1e3 * statistics.median(times) / LAYERS for times in zip(*turns, strict=True))
    return {
        "kv": kv, "tokens": tokens, **storing(cache, tokens), "layer_ms": round(layer, 2),
        "layer_of_full_ms": round(plain, 2), "exposed_percent": round(100 * (layer / plain - 1), 2),
        "peak_mib": peak >> 20, "peak_cached_mib": reserved >> 20,
        "reserved_mib": prefill_bytes(decoder.config, tokens, DTYPE) + storing_bytes(cache.layout) >> 20,
    }  # fmt: skip


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cases", type=int, default=len(CASES), help="measure only the first N shapes")
    parser.add_argument("--rounds", type=int, default=3, help="prefills of the policy and of full")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    torch.manual_seed(0)
    decoder, results = model(), []
    for kv, tokens in CASES[: args.cases]:
        results.append(measure(decoder, kv, tokens, args.rounds))
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
        torch.cuda.empty_cache()
    if args.out:
        content = {**provenance(), "results": results}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
