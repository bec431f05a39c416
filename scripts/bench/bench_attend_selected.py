"""Attention over selected chunks in CUDA: time per call, and bytes read per second.

``python scripts/bench/bench_attend_selected.py``: Llama-3.1-8B's attention (32 query and 8 kv heads of 128, rank 160)
over random chunks of sequences, in ascending order, on shuffled pages. Timed is the kernel that the op takes, as
replays of a CUDA graph whose calls select other chunks each, so that no call finds its bytes in the second-level
cache. Bytes are latents and values once per token and kv head, the basis once per sequence and the selection; the
floor is their time at 4.5 TB/s, which is what an H200 reads. Every case is checked against the reference in float32
first; medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.attend_selected import cuda, reference
from shadowkv.ops.attend_selected.sources import DenseRows, KeySource, LatentKeys, QuantisedRows, ValueSource
from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables

ROOF = 4.5e12
"""Bytes per second that an H200 reads."""
PAGE, HEADS, GROUP, DIM, RANK = 64, 8, 4, 128, 160
COLD = 200 << 20
"""Bytes that the calls of a graph read between them at least; the cache holds 50 MiB."""

CASES = [
    (batch, length, budget, chunk, keys, values)
    for keys, values, shapes, chunks in (
        ("int8", "4-bit", [(63, 61440, 960), (30, 124928, 1952), (1, 61440, 960), (1, 124928, 1952)], (1, 2)),
        ("int8", "4-bit", [(48, 61440, 1024), (15, 249856, 3904)], (8, 1)),
        ("bf16", "bf16", [(48, 61440, 1024)], (8,)),
    )
    for batch, length, budget in shapes
    for chunk in chunks
]

Call = tuple[torch.Tensor, KeySource, ValueSource, torch.Tensor]


def problem(batch: int, length: int, budget: int, chunk: int, keys: str, values: str) -> list[Call]:
    """Arguments of some calls over the same pages."""
    chunks, device = PAGE // chunk, torch.device("cuda")
    key = Field("latents", (chunks, chunk, RANK), torch.int8 if keys == "int8" else torch.bfloat16)
    width, dtype = (DIM // 2, torch.uint8) if values == "4-bit" else (DIM, torch.bfloat16)
    fields = [
        key,
        Field("values", (HEADS, chunks, chunk, width), dtype),
        Field("scale", (HEADS, PAGE), torch.float16),
    ]
    blocks = batch * -(-length // PAGE)
    tier = Tier("device", 1, -(-sum(field.nbytes for field in fields) // 256) * 256, blocks, device)
    view = {name: layers[0] for name, layers in tier.views(fields).items()}
    tier.arena.view(torch.int8).random_(-128, 128)
    names = torch.tensor(tier.allocate(blocks))[torch.randperm(blocks)].to(device)
    for part in names.split(4096):
        view["scale"][part] = torch.rand(len(part), HEADS, PAGE, device=device).half()
        for name in ("latents", "values"):
            if view[name].dtype == torch.bfloat16:
                view[name][part] = torch.randn(len(part), *view[name].shape[1:], device=device).bfloat16()
    pages = names.view(batch, -1)
    basis = torch.randn(batch, RANK, HEADS, DIM, device=device) / (RANK**0.5 * (74 if keys == "int8" else 1))
    mean = torch.randn(batch, HEADS, DIM, device=device)
    rotary = RotaryTables(RopeConfig(DIM, theta=500000.0), length, device)
    slots = torch.randperm(batch, device=device)
    k = LatentKeys(view["latents"], basis.bfloat16(), mean.bfloat16(), slots, pages, rotary)
    v: ValueSource = DenseRows(view["values"], pages)
    if values == "4-bit":
        rotation = torch.linalg.qr(torch.randn(DIM, DIM, device=device))[0].contiguous()
        v = QuantisedRows(view["values"], view["scale"], 4, rotation, pages)
    q = torch.randn(batch, HEADS * GROUP, DIM, device=device).bfloat16()
    calls = max(4, -(-COLD // nbytes(batch, budget, chunk, keys, values)))
    selections = (
        torch.rand(batch, HEADS, length // chunk, device=device).topk(budget // chunk)[1].sort(-1)[0]
        for _ in range(calls)
    )
    return [(q, k, v, selected) for selected in selections]


def nbytes(batch: int, budget: int, chunk: int, keys: str, values: str) -> int:
    """Bytes that a call has to read."""
    token = RANK * (1 if keys == "int8" else 2) + (DIM // 2 + 2 if values == "4-bit" else DIM * 2)
    return batch * HEADS * (budget * token + budget // chunk * 8 + RANK * DIM * 2)


def check(call: Call) -> None:
    """Ends the program where the kernel is off by more than rounding, on the first row."""
    q, k, v, selected = call
    out, lse = cuda.attend_selected(*call)
    assert isinstance(k, LatentKeys)
    mean = None if k.mean is None else k.mean.float()
    latents = k.latents if k.latents.dtype == torch.int8 else k.latents[k.pages[0]].float()
    pages = k.pages if k.latents.dtype == torch.int8 else torch.arange(k.pages.shape[1], device=q.device)[None]
    wide = LatentKeys(latents, k.basis.float(), mean, k.slots[:1], pages[:1], k.rotary)
    near = DenseRows(v.rows, v.pages[:1]) if isinstance(v, DenseRows) else v
    if isinstance(near, QuantisedRows):
        near = QuantisedRows(near.codes, near.scale, near.bits, near.rotation, near.pages[:1])
    exact = reference.attend_selected(q[:1].float(), wide, near, selected[:1])
    for name, one, expected in zip(("out", "lse"), (out, lse), exact):
        error = (one[:1].float() - expected).abs().max().item()
        allowed = 2e-2 * expected.abs().max().item()
        if not error <= allowed:
            raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed:.2g}")


def measure(calls: list[Call], rounds: int) -> float:
    """Median seconds per call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            cuda.attend_selected(*call)
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[3:])


def main() -> int:
    """Prints a line per case; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    if not cuda.available():
        print("needs a CUDA device and the attend_selected library", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    rows = []
    print("   B       S  budget  c  keys values       us  floor us  of floor    GB/s")
    for case in CASES:
        batch, length, budget, chunk, keys, values = case
        calls = problem(*case)
        check(calls[0])
        seconds, size = measure(calls, args.rounds), nbytes(batch, budget, chunk, keys, values)
        del calls
        rows.append(
            {
                "batch": batch,
                "context_tokens": length,
                "selected_tokens": budget,
                "chunk": chunk,
                "keys": keys,
                "values": values,
                "microseconds": seconds * 1e6,
                "floor_microseconds": size / ROOF * 1e6,
                "gigabytes_per_second": size / seconds / 1e9,
            }
        )
        print(
            f"{batch:4} {length:7} {budget:7} {chunk:2}  {keys:4} {values:6} {seconds * 1e6:8.1f} "
            f"{size / ROOF * 1e6:9.1f} {size / ROOF / seconds:9.2f} {size / seconds / 1e9:7.0f}"
        )
    if args.out:
        shape = {"kv_heads": HEADS, "query_heads": HEADS * GROUP, "head_dim": DIM, "rank": RANK}
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": shape, "cases": rows}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
