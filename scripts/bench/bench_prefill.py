"""What storing a prompt adds to its prefill on a GPU: by stage, on top of a layer, and in memory.

``python scripts/bench/bench_prefill.py [--out file.json]``: layers of Llama-3.1-8B's sizes with random weights, in
bfloat16, on shuffled pages. Stages run alone, one after the other on one stream, on keys with a mean and a spectrum
that falls as 1 / i; "total" is their sum. "ms a layer" is the whole prefill through the engine's runner, divided by
its layers, with and without storing in turns; "exposed" is what storing adds to it. Times are medians. "reserved" is
what the engine leaves free for a prefill, "peak" what one takes, and "cached" with what PyTorch's allocator rounds up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.engine.runner import Runner
from shadowkv.engine.sizing import prefill_bytes
from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.models.config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.dummy import fill_dummy
from shadowkv.ops.rotate.tables import RopeConfig

LAYERS, HIDDEN, INTERMEDIATE = 3, 4096, 14336
SHAPE = ModelShape(LAYERS, num_query_heads=32, num_kv_heads=8, head_dim=128)
ROPE = RopeConfig(128, theta=500000.0)
DTYPE = torch.bfloat16
CASES = [(kv, tokens) for tokens in (61440, 124928) for kv in ("turbo", "turbo-host", "shadowkv")]
STAGES = {
    "basis": ("parts.keys", "fit"),
    "index mean": ("parts.index", "fit"),
    "sink and outliers": ("", "_write_static"),
    "latents": ("parts.keys", "seal"),
    "index": ("parts.index", "seal"),
    "values": ("parts.values", "seal"),
    "exact tail": ("", "_write_exact"),
}


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
    """A cache of shuffled pages for two sequences of ``tokens``."""
    spec = preset(kv).resolve(SHAPE)
    layout = Layout(spec, SHAPE, DTYPE, build_parts(spec, SHAPE, DTYPE), tokens + 64)
    memory = layout.blocks(layout.pages(tokens, tokens + 64))
    cache = KVCache(spec, SHAPE, ROPE, slots=2, max_model_len=tokens + 64, memory=memory, dtype=DTYPE, device="cuda")
    cache.store.device.shuffle(0)
    cache.store.host.shuffle(0)
    return cache


def synthetic_keys(tokens: int) -> Tensor:
    """[S, H, d] with a mean and singular values whose squares fall as 1 / i^1.5."""
    n = SHAPE.kv_dim
    mixing = torch.linalg.qr(torch.randn(n, n, device="cuda")).Q * torch.arange(1, n + 1, device="cuda") ** -0.75
    keys = torch.empty(tokens, n, dtype=DTYPE, device="cuda")
    mean = torch.randn(n, device="cuda") * 0.05
    for block in keys.split(16384):
        block.copy_(torch.randn(len(block), n, device="cuda") @ mixing + mean)
    return keys.unflatten(1, (SHAPE.num_kv_heads, SHAPE.head_dim))


Events = tuple[torch.cuda.Event, torch.cuda.Event]


def timed(call: Callable[..., Any], spent: list[Events]) -> Callable[..., Any]:
    """``call`` between two events."""

    def run_between(*args: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call(*args)
        end.record()
        spent.append((start, end))
        return result

    return run_between


def stages(cache: KVCache, tokens: int, rounds: int = 3) -> dict[str, float]:
    """Milliseconds of each stage of storing a layer, on one stream; the first round warms up."""
    spent: dict[str, list[Events]] = {name: [] for name in STAGES}
    cache.prefill.side = None
    for name, (where, method) in STAGES.items():
        owner: Any = cache.prefill
        for part in filter(None, where.split(".")):
            owner = getattr(owner, part)
        object.__setattr__(owner, method, timed(getattr(owner, method), spent[name]))
    keys, values = synthetic_keys(tokens), torch.randn(tokens, 8, 128, device="cuda").to(DTYPE)
    results: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        for times in spent.values():
            times.clear()
        sequence = cache.pool.allocate(tokens, tokens)
        batch = cache.prefill_batch([(sequence, tokens)])
        cache.append(0, keys, values, batch.block(0, tokens))
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache.finish_prefill(0, batch)
        host = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        found = {name: sum(a.elapsed_time(b) for a, b in times) for name, times in spent.items()}
        results.append(found | {"total": (time.perf_counter() - start) * 1e3, "host": host})
        cache.pool.release(sequence)
    return {name: round(statistics.median(r[name] for r in results[1:]), 3) for name in results[0]}


@torch.inference_mode()
def run(cache: KVCache, runner: Runner, tokens: int) -> float:
    """Seconds of one prefill."""
    sequence = cache.pool.allocate(tokens, tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in runner.prefill([(sequence, list(range(1000)) * (tokens // 1000) + [0] * (tokens % 1000))]):
        pass
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    cache.pool.release(sequence)
    return seconds


def measure(decoder: Decoder, kv: str, tokens: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    cache = make_cache(kv, tokens)
    runner = Runner(decoder, cache)
    run(cache, runner, tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    run(cache, runner, tokens)
    peak, reserved = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - before
    store, with_storing, without = cache.prefill._store, [], []
    for _ in range(rounds):  # in turns: a GPU's clock sinks while it gets warm
        with_storing.append(run(cache, runner, tokens))
        cache.prefill._store = lambda *args, **kwargs: None  # type: ignore[method-assign]
        without.append(run(cache, runner, tokens))
        cache.prefill._store = store  # type: ignore[method-assign]
    layer, bare = (1e3 * statistics.median(times) / LAYERS for times in (with_storing, without))
    with torch.inference_mode():
        by_stage = stages(cache, tokens)
    return {
        "kv": kv, "tokens": tokens, "stages_ms": by_stage, "layer_ms": round(layer, 2),
        "layer_without_storing_ms": round(bare, 2), "exposed_percent": round(100 * (layer / bare - 1), 2),
        "peak_mib": peak >> 20, "peak_cached_mib": reserved >> 20,
        "reserved_mib": prefill_bytes(decoder.config, tokens, DTYPE) >> 20,
    }  # fmt: skip


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cases", type=int, default=len(CASES), help="measure only so many of the shapes")
    parser.add_argument("--rounds", type=int, default=3, help="prefills with and without storing")
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
