"""The whole attention of one layer in a decode step: selection, fetches, exact pages, selected chunks.

``python scripts/bench/bench_attention_layer.py [--kv shadowkv turbo ...] [--out layer.csv]``: Llama-3.1-8B's attention
on caches of one layer that are filled with random keys and values through the prefill's own storing, with ragged
lengths and scattered pages. Random queries hardly ever select a chunk twice. So, where values are on the host, scoring
and selection run and are timed, but their result is replaced by chunks of which a set share repeats from step to step;
the resulting hit rate is measured. Times are of one step in a CUDA graph of many, medians of its replays.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from harness import fill_random, open_cache
from torch import Tensor

from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.decode.batch import DecodePlan
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.memory.sealed import SealedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.apply_rope.tables import RopeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripted_selection import repeating

SHAPE = ModelShape(num_layers=1, num_query_heads=32, num_kv_heads=8, head_dim=128)
ROPE = RopeConfig(SHAPE.head_dim, theta=500000.0)
DTYPE = torch.bfloat16
CASES = ((61440, 48, 1024), (124928, 24, 2048))
"""Tokens of context, sequences, tokens selected."""
STEPS = 32
REPLAYS = 5
ROOM = 64
"""Tokens that a sequence can still gain."""


def make_cache(kv: str, context: int, batch: int, budget: int, fetch_buffer: float) -> KVCache:
    """A cache for ``batch`` sequences of at most ``context`` tokens."""
    spec = preset(kv, budget=None if kv == "full" else budget)
    return open_cache(spec, SHAPE, ROPE, batch, context, context + ROOM, dtype=DTYPE, fetch_buffer=fetch_buffer)


def fill(cache: KVCache, context: int, batch: int) -> list[CachedSequence]:
    """Sequences of ``context`` tokens and up to a page less."""
    sequences = []
    for number in range(batch):
        length = context - 37 * number % 64
        sequence = cache.allocate(length, length + ROOM)
        fill_random(cache, sequence, length)
        sequences.append(sequence)
    return sequences


class UnrolledSelection:
    """A ``selection_hook`` like ``ScriptedSelection``, with all steps in one graph.

    Each call gives what it was captured with: nothing on the device looks up the step, so that no time is added.
    """

    def __init__(self, batch: SealedBatch, share: float) -> None:
        self._row = 0
        shape = len(batch.slots), SHAPE.num_kv_heads, int(batch.num_chunks.min())
        self.steps = list(repeating(shape, int(batch.budget.min()), share, STEPS))

    def __call__(self, layer: int, q: Tensor, batch: SealedBatch, selected: Selection) -> Selection:
        """The next rows of the current step; after the last, the next step's."""
        step = self.steps[self._row // len(self.steps[0]) % STEPS]
        first = self._row % len(step)
        self._row += len(q)
        return Selection(step[first : first + len(q)])


def fetches(cache: KVCache, plan: DecodePlan) -> FetchCounts | None:
    """What has been fetched so far, which is known once a step has ended."""
    cache.end_decode(plan)
    torch.cuda.synchronize()
    return cache.fetches


def measure(cache: KVCache, sequences: list[CachedSequence], share: float | None) -> tuple[float, float | None]:
    """Milliseconds of a step, and the hit rate."""
    plan = cache.plan_decode(sequences)
    batch = cache.decode_batch(plan)
    q = torch.randn(len(sequences), SHAPE.num_query_heads, SHAPE.head_dim, device="cuda", dtype=DTYPE)
    cache.append(0, *torch.randn(2, len(q), SHAPE.num_kv_heads, SHAPE.head_dim, device="cuda", dtype=DTYPE), batch)
    assert share is None or batch.sealed is not None
    hook = None if share is None or batch.sealed is None else UnrolledSelection(batch.sealed, share)
    cache.selection_hook = hook  # the graph reads from it: it must live until the last replay
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            out = cache.attend(0, q, batch)
    side.synchronize()
    assert out.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            cache.attend(0, q, batch)
    cache.selection_hook = None
    graph.replay()
    before, times = fetches(cache, plan), []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    after = fetches(cache, plan)
    if before is None or after is None:
        return statistics.median(times), None
    return statistics.median(times), 1 - (after.fetched - before.fetched) / (after.selected - before.selected)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="+", default=["shadowkv", "turbo", "turbo-host", "full"])
    parser.add_argument("--hit-rates", nargs="+", type=float, default=[0.74, 0.6, 0.5], metavar="SHARE")
    parser.add_argument("--cases", nargs="+", type=int, default=[0, 1], choices=range(len(CASES)), metavar="N")
    parser.add_argument("--fetch-buffer", type=float, default=2.0, metavar="FACTOR", help="as of the engine")
    parser.add_argument("--out", type=Path, help="CSV file; what it depends on goes in a JSON file beside it")
    args = parser.parse_args()
    rows, specs, backends = [], {}, {}
    for context, batch, budget in (CASES[case] for case in args.cases):
        for kv in args.kv:
            torch.manual_seed(0)
            cache = make_cache(kv, context, batch, budget, args.fetch_buffer)
            specs[kv], backends = asdict(cache.spec), cache.ops.backends
            sequences = fill(cache, context, batch)
            for share in args.hit_rates if cache.fetches is not None else [None]:
                ms, hits = measure(cache, sequences, share)
                rows.append(
                    {
                        "kv": kv,
                        "context": context,
                        "batch": batch,
                        "hit_rate": "" if hits is None else round(hits, 3),
                        "layer_ms": round(ms, 4),
                    }
                )
                print(*rows[-1].values(), flush=True)
            del cache, sequences
            gc.collect()  # pinned memory must not be freed in the middle of the next capture
            torch.cuda.empty_cache()
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        about = {
            **provenance(),
            "shape": asdict(SHAPE),
            "budget_tokens": {str(context): budget for context, _, budget in CASES},
            "fetch_buffer": args.fetch_buffer,
            "specs": specs,
            "backends": backends,
        }
        args.out.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
