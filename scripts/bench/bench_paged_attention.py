"""Paged decode attention on the CPU: every backend in turn, in time per call and bytes of keys and values per second.

``python scripts/bench/bench_paged_attention.py``: SmolLM2's attention (9 query and 3 kv heads of 64) over pages of a
pool much larger than the caches, 48 ragged sequences and a single long one. Every result is checked against a
float64 softmax first. Rounds alternate between backends; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.extension import load_cpu
from shadowkv.ops.registry import NAMES, Ops

PAGE, LAYERS = 64, 8
CASES = {
    "48 x 64-960": [64 + round(i * (960 - 64) / 47) for i in range(48)],
    "1 x 8192": [8192],
}


def problem(
    lengths: list[int], dtype: torch.dtype, heads: int, group: int, dim: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Arguments of one call per layer, on views as the KV cache has them; successive layers evict one another."""
    used = [-(-length // PAGE) for length in lengths]
    fields = [Field(name, (heads, PAGE, dim), dtype) for name in "kv"]
    tier = Tier("device", LAYERS, sum(field.nbytes for field in fields), sum(used), torch.device("cpu"))
    views = tier.views(fields)
    for layer in range(LAYERS):
        arena = tier.arena[layer].view(dtype)
        arena.copy_(torch.randn(arena.numel()))
    names = torch.tensor(tier.allocate(sum(used)))[torch.randperm(sum(used))]
    pages = torch.zeros(len(lengths), max(used), dtype=torch.int64)
    counts = torch.zeros_like(pages)
    for row, (length, count) in enumerate(zip(lengths, used)):
        pages[row, :count], names = names[:count], names[count:]
        counts[row, :count] = (length - PAGE * torch.arange(count)).clamp(max=PAGE)
    q = torch.randn(len(lengths), heads * group, dim).to(dtype)
    return [(q, views["k"][layer], views["v"][layer], pages, counts) for layer in range(LAYERS)]


def plain(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A float64 softmax per sequence."""
    outs, sums = [], []
    for query, names, rows in zip(q.double(), pages, counts):
        valid = (torch.arange(PAGE) < rows[:, None]).flatten()
        keys, values = (x[names].transpose(0, 1).flatten(1, 2)[:, valid].double() for x in (k, v))
        scores = query.view(len(keys), -1, q.shape[-1]) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        outs.append((scores.softmax(-1) @ values).flatten(0, 1))
        sums.append(scores.logsumexp(-1).flatten())
    return torch.stack(outs), torch.stack(sums)


def check(name: str, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Ends the program where a backend is off by more than rounding."""
    allowed = 2e-5 if dtype == torch.float32 else 2e-2
    for one, expected in zip(found, exact):
        error = (one.double() - expected).abs().max().item()
        if not error <= allowed:
            raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed}")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="kv heads (default: %(default)s)")
    parser.add_argument("--group", type=int, default=3, help="query heads of each (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="of a head (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    backends = {"reference": Ops("cpu", dict.fromkeys(NAMES, "reference")).paged_attention}
    if load_cpu():
        backends["cpu"] = Ops("cpu", {"paged_attention": "cpu"}).paged_attention
    print(f"{torch.get_num_threads()} threads, {args.heads} kv heads, {args.group} query heads of each, dim {args.dim}")
    print(f"{'sequences':14}{'dtype':10}{'backend':12}{'ms a call':>10}{'GB/s':>8}")
    for case, lengths in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            layers = problem(lengths, dtype, args.heads, args.group, args.dim)
            exact = plain(*layers[0])
            seconds: dict[str, list[float]] = {name: [] for name in backends}
            for name, function in backends.items():
                check(name, function(*layers[0]), exact, dtype)
            for _ in range(args.rounds):
                for name, function in backends.items():
                    start = time.perf_counter()
                    for layer in layers:
                        function(*layer)
                    seconds[name].append((time.perf_counter() - start) / LAYERS)
            bytes_read = 2 * sum(lengths) * args.heads * args.dim * dtype.itemsize
            for name, found in seconds.items():
                median = statistics.median(found)
                speed = bytes_read / median / 1e9
                print(f"{case:14}{str(dtype).removeprefix('torch.'):10}{name:12}{median * 1e3:10.2f}{speed:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
