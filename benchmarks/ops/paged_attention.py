"""Paged decode attention, every backend of a device: time per call and bytes of keys and values read per second.

``python -m benchmarks.ops.paged_attention``: on the CPU SmolLM2's attention (9 query and 3 kv heads of 64) over
pages of a pool much larger than the caches, 48 ragged sequences and a single long one; rounds alternate between
backends. ``--device cuda``: Llama-3.1-8B's (32 query and 8 kv heads of 128) as replays of a CUDA graph, against the
time that reading the keys and values once takes at 4.5 TB/s, an H200's read speed. Every result is checked
against a float64 softmax first; medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.page import PAGE
from shadowkv.ops.registry import PREFERENCE, Ops

ROOF = 4.5e12
"""Read speed of an H200, in bytes per second."""

Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

CASES = {
    "cpu": {"48 x 64-960": [64 + round(i * (960 - 64) / 47) for i in range(48)], "1 x 8192": [8192]},
    "cuda": {
        "7 x 124928": [124928] * 7,
        "15 x 61440": [61440] * 15,
        "15 x 6K-60K": [6144 + i * 3950 for i in range(15)],
        "48 x 19200": [19200] * 48,
        "48 x 576": [576] * 48,
        "48 x 2048": [2048] * 48,
        "1 x 15360": [15360],
        "1 x 61440": [61440],
        "1 x 124928": [124928],
    },
}
DEFAULTS = {"cpu": (3, 3, 64), "cuda": (8, 4, 128)}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def problem(lengths: list[int], dtype: torch.dtype, heads: int, group: int, dim: int, device: str) -> list[Call]:
    """Arguments of one call per layer, on views like the KV cache's; successive layers evict one another."""
    used = [-(-length // PAGE) for length in lengths]
    fields = [Field(name, (heads, PAGE, dim), dtype) for name in "kv"]
    block = sum(field.nbytes for field in fields)
    layers = 8 if block * sum(used) < 2**30 else 2
    tier = Tier("device", layers, block, sum(used), torch.device(device))
    views = tier.views(fields)
    for layer in range(layers):
        tier.arena[layer].view(dtype).normal_()
    names = torch.tensor(tier.allocate(sum(used)))[torch.randperm(sum(used))]
    pages = torch.zeros(len(lengths), max(used), dtype=torch.int64)
    counts = torch.zeros_like(pages)
    for row, (length, count) in enumerate(zip(lengths, used)):
        pages[row, :count], names = names[:count], names[count:]
        counts[row, :count] = (length - PAGE * torch.arange(count)).clamp(max=PAGE)
    q = torch.randn(len(lengths), heads * group, dim).to(device, dtype)
    pages, counts = pages.to(device), counts.to(device)
    return [(q, views["k"][layer], views["v"][layer], pages, counts) for layer in range(layers)]


def plain(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A float64 softmax per sequence."""
    outs, sums = [], []
    for query, names, rows in zip(q.double(), pages, counts):
        valid = (torch.arange(PAGE, device=q.device) < rows[:, None]).flatten()
        keys, values = (x[names].transpose(0, 1).flatten(1, 2)[:, valid].double() for x in (k, v))
        scores = query.view(len(keys), -1, q.shape[-1]) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        outs.append((scores.softmax(-1) @ values).flatten(0, 1))
        sums.append(scores.logsumexp(-1).flatten())
    return torch.stack(outs), torch.stack(sums)


def check(name: str, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Ends the program if a backend's error is more than rounding."""
    allowed = 2e-5 if dtype == torch.float32 else 2e-2
    for one, expected in zip(found, exact):
        error = (one.double() - expected).abs().max().item()
        if not error <= allowed:
            raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed}")


def host_timer(function: Callable[..., object], layers: list[Call]) -> Callable[[], float]:
    """Measures seconds per call by the host's clock."""

    def measure() -> float:
        start = time.perf_counter()
        for layer in layers:
            function(*layer)
        return (time.perf_counter() - start) / len(layers)

    return measure


def graph_timer(function: Callable[..., object], layers: list[Call]) -> Callable[[], float]:
    """Measures seconds per call on the device, in a CUDA graph that goes over the layers several times."""
    graph, calls = torch.cuda.CUDAGraph(), 4 * layers
    with torch.cuda.graph(graph):
        for layer in calls:
            function(*layer)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(calls)

    return measure


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=CASES, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--heads", type=int, help="kv heads (default: 3, on CUDA 8)")
    parser.add_argument("--group", type=int, help="query heads of each (default: 3, on CUDA 4)")
    parser.add_argument("--dim", type=int, help="of a head (default: 64, on CUDA 128)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    heads, group, dim = (
        given or usual for given, usual in zip((args.heads, args.group, args.dim), DEFAULTS[args.device])
    )
    torch.manual_seed(0)
    on_cuda = args.device == "cuda"
    # The reference asks the device for lengths, which a graph cannot capture.
    names = [name for name in PREFERENCE[args.device] if not (on_cuda and name == "reference")]
    backends = {}
    for name in names:
        try:
            backends[name] = Ops(args.device, overrides={"paged_attention": name}).paged_attention
        except ValueError:
            print(f"no backend {name!r} here")
    machine = torch.cuda.get_device_name() if on_cuda else f"{torch.get_num_threads()} threads"
    print(f"{machine}, {heads} kv heads, {group} query heads of each, dim {dim}")
    print(f"{'sequences':14}{'dtype':10}{'backend':12}{'ms a call':>10}{'GB/s':>8}" + f"{'of roof':>9}" * on_cuda)
    results = []
    for case, lengths in CASES[args.device].items():
        for dtype in DTYPES[args.device]:
            layers = problem(lengths, dtype, heads, group, dim, args.device)
            exact = plain(*layers[0])
            timers = {}
            for name, function in backends.items():
                check(name, function(*layers[0]), exact, dtype)
                timers[name] = (graph_timer if on_cuda else host_timer)(function, layers)
            seconds: dict[str, list[float]] = {name: [] for name in backends}
            for _ in range(args.rounds):
                for name, measure in timers.items():
                    seconds[name].append(measure())
            bytes_read = 2 * sum(lengths) * heads * dim * dtype.itemsize
            for name, found in seconds.items():
                median = statistics.median(found)
                result = {
                    "case": case,
                    "dtype": str(dtype).removeprefix("torch."),
                    "backend": name,
                    "median_us": median * 1e6,
                    "bytes_read": bytes_read,
                    "read_gb_per_s": bytes_read / median / 1e9,
                }
                line = f"{case:14}{result['dtype']:10}{name:12}{median * 1e3:10.4f}{result['read_gb_per_s']:8.1f}"
                if on_cuda:
                    result |= {"floor_us": bytes_read / ROOF * 1e6, "of_roof": bytes_read / ROOF / median}
                    line += f"{result['of_roof']:9.1%}"
                print(line)
                results.append(result)
    if args.out:
        report = {
            "machine": machine,
            **provenance(),
            "roof_gb_per_s": ROOF / 1e9 if on_cuda else None,
            "kv_heads": heads,
            "group": group,
            "dim": dim,
            "rounds": args.rounds,
            "results": results,
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
