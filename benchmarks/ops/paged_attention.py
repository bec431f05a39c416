"""Paged decode attention by every backend of a device: time per call, and bytes of keys and values read per second.

On a GPU, the attention is Llama-3.1-8B's (32 query and 8 kv heads of 128). On a CPU, it is SmolLM2's (9 query and 3 kv
heads of 64), over pages that together are much larger than the CPU's caches. CPU times are wall-clock times, in rounds
that alternate between the backends. Every result is checked against a softmax in float64.

``verified_rows`` measures steps that verify drafts, with 1, 4 and 8 rows for every sequence, over exact keys and values
in compressed pages. In ``rows``, each row is a row of the batch, as in engine steps. In ``folded``, the rows of a
sequence are further query heads of each kv head, so that thread blocks that read the same keys are neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, against_floor, bench, microseconds
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.attend_coded import cuda_dense
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.page import PAGE
from shadowkv.ops.registry import PREFERENCE, Ops

Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
SHAPES = {"cpu": (3, 3, 64), "cuda": (8, 4, 128)}
"""Number of kv heads, query heads per kv head, and dimensions of a head."""
ON_CUDA: dict[str, list[int]] = {
    "7 x 124928": [124928] * 7,
    "15 x 61440": [61440] * 15,
    "15 x 6K-60K": [6144 + i * 3950 for i in range(15)],
    "48 x 19200": [19200] * 48,
    "48 x 576": [576] * 48,
    "48 x 2048": [2048] * 48,
    "1 x 15360": [15360],
    "1 x 61440": [61440],
    "1 x 124928": [124928],
}
ON_CPU = {"48 x 64-960": [64 + round(i * (960 - 64) / 47) for i in range(48)], "1 x 8192": [8192]}
ROUNDS = 9
VERIFIED = [(1, 61440), (15, 61440), (7, 124928)]
"""Number of sequences, and tokens of each sequence: a single one, and the largest batches of ``full`` on an H200."""
ROWS_OF_SEQUENCE = (1, 4, 8)
DenseCall = tuple[Tensor, DenseRows, DenseRows, Tensor, Tensor]


def problem(lengths: list[int], dtype: torch.dtype, device: str) -> list[Call]:
    """Returns the arguments of one call per layer, on views like the KV cache's. Each layer evicts the previous one
    from the caches."""
    heads, group, dim = SHAPES[device]
    used = [-(-length // PAGE) for length in lengths]
    fields = [Field(name, (heads, PAGE, dim), dtype) for name in "kv"]
    block = sum(field.nbytes for field in fields)
    layers = 8 if block * sum(used) < 2**30 else 2
    tier = Tier("device", layers, block, sum(used), torch.device(device))
    views = tier.views(fields)
    for layer in range(layers):
        tier.arena[layer].view(dtype).normal_()
    page_ids = torch.tensor(tier.allocate(sum(used)))[torch.randperm(sum(used))]
    pages = torch.zeros(len(lengths), max(used), dtype=torch.int64)
    counts = torch.zeros_like(pages)
    for row, (length, count) in enumerate(zip(lengths, used)):
        pages[row, :count], page_ids = page_ids[:count], page_ids[count:]
        counts[row, :count] = (length - PAGE * torch.arange(count)).clamp(max=PAGE)
    q = torch.randn(len(lengths), heads * group, dim).to(device, dtype)
    pages, counts = pages.to(device), counts.to(device)
    return [(q, views["k"][layer], views["v"][layer], pages, counts) for layer in range(layers)]


def plain(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention computed with a float64 softmax for each sequence: outputs and log-sum-exps."""
    outs, sums = [], []
    for query, page_ids, rows in zip(q.double(), pages, counts):
        valid = (torch.arange(PAGE, device=q.device) < rows[:, None]).flatten()
        keys, values = (x[page_ids].transpose(0, 1).flatten(1, 2)[:, valid].double() for x in (k, v))
        scores = query.view(len(keys), -1, q.shape[-1]) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        outs.append((scores.softmax(-1) @ values).flatten(0, 1))
        sums.append(scores.logsumexp(-1).flatten())
    return torch.stack(outs), torch.stack(sums)


def checked_backends(call: Call, device: str) -> dict[str, Callable[..., object]]:
    """Returns the available backends of a device. Ends the program if a backend's error is larger than rounding
    explains."""
    # The reference copies lengths from the device, which a CUDA graph cannot capture.
    names = [name for name in PREFERENCE[device] if not (device == "cuda" and name == "reference")]
    exact, allowed, backends = plain(*call), 2e-5 if call[0].dtype == torch.float32 else 2e-2, {}
    for name in names:
        try:
            backends[name] = Ops(device, overrides={"paged_attention": name}).paged_attention
        except ValueError:
            print(f"no backend {name!r} here")
            continue
        for own, expected in zip(backends[name](*call), exact):
            error = (own.double() - expected).abs().max().item()
            if not error <= allowed:
                raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed}")
    return backends


def bytes_read(lengths: list[int], dtype: torch.dtype, device: str) -> int:
    """Returns the bytes of all keys and values, each counted once."""
    heads, _, dim = SHAPES[device]
    return 2 * sum(lengths) * heads * dim * dtype.itemsize


@bench([*ON_CUDA])
def paged_attention(case: str) -> list[Row]:
    """A row for each backend. A CUDA graph goes over all layers four times."""
    lengths, dtype = ON_CUDA[case], torch.bfloat16
    calls, nbytes = problem(lengths, dtype, "cuda"), bytes_read(lengths, dtype, "cuda")
    rows: list[Row] = []
    for name, attend in checked_backends(calls[0], "cuda").items():
        taken = microseconds([lambda call=call, attend=attend: attend(*call) for call in 4 * calls], rounds=ROUNDS)
        rows.append({"sequences": case, "backend": name, **against_floor(nbytes, taken)})
    return rows


def seconds(attend: Callable[..., object], calls: list[Call]) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    for call in calls:
        attend(*call)
    return (time.perf_counter() - start) / len(calls)


@bench([(case, dtype) for case in ON_CPU for dtype in (torch.float32, torch.bfloat16)], available=lambda: True)
def paged_attention_cpu(case: tuple[str, torch.dtype]) -> list[Row]:
    """A row for each backend."""
    name, dtype = case
    calls, nbytes = problem(ON_CPU[name], dtype, "cpu"), bytes_read(ON_CPU[name], dtype, "cpu")
    backends = checked_backends(calls[0], "cpu")
    rounds = [{backend: seconds(attend, calls) for backend, attend in backends.items()} for _ in range(ROUNDS)]
    rows: list[Row] = []
    for backend in backends:
        taken = statistics.median(times[backend] for times in rounds)
        row: Row = {"sequences": name, "dtype": str(dtype).removeprefix("torch."), "backend": backend}
        rows.append(row | {"us": round(1e6 * taken, 1), "GB/s": round(nbytes / taken / 1e9, 1)})
    return rows


def folded(q: Tensor, rows: int, heads: int) -> Tensor:
    """Turns queries [S * rows, H * G, d] into [S, H * rows * G, d], with all queries of a kv head side by side (S
    sequences, H kv heads, G query heads per kv head, d dimensions)."""
    return q.unflatten(0, (-1, rows)).unflatten(2, (heads, -1)).transpose(1, 2).flatten(1, 3)


def unfolded(out: Tensor, rows: int, heads: int) -> Tensor:
    """Undoes ``folded``."""
    return out.unflatten(1, (heads, rows, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


@bench(VERIFIED, lambda: not cuda_dense.missing())
def verified_rows(case: tuple[int, int]) -> list[Row]:
    """A row for each kernel and number of rows, after a check that ``rows`` and ``folded`` give the same results."""
    from shadowkv.ops.attend_coded import triton

    count, tokens = case
    heads, group, dim = SHAPES["cuda"]
    stored = problem([tokens] * count, torch.bfloat16, "cuda")
    floor = 2 * count * tokens * heads * dim * 2 / READ_SPEED * 1e6
    results: list[Row] = []
    first: dict[str, float] = {}
    for rows in ROWS_OF_SEQUENCE:
        q = torch.randn(count * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
        calls: dict[str, list[DenseCall]] = {"rows": [], "folded": []}
        for _, k, v, pages, _ in stored:
            shaped = [x.unflatten(2, (PAGE // 8, 8)) for x in (k, v)]
            for name, each, asked in (("rows", rows, q), ("folded", 1, folded(q, rows, heads))):
                table = pages.repeat_interleave(each, 0)
                end = torch.full((len(table),), tokens, device="cuda")
                keys, values = (DenseRows(x, table) for x in shaped)
                calls[name].append((asked, keys, values, torch.zeros_like(end), end))
        plain, merged = (cuda_dense.attend_coded(*calls[name][0])[0].float() for name in calls)
        worst = float((plain - unfolded(merged, rows, heads)).abs().max() / plain.abs().max())
        if not worst < 0.02:
            raise SystemExit(f"rows and folded rows differ by {worst} of the largest output")
        timed = {f"cuda {name}": [partial(cuda_dense.attend_coded, *call) for call in calls[name]] for name in calls}
        timed["triton rows"] = [partial(triton.attend_coded, *call) for call in calls["rows"]]
        for name, functions in timed.items():
            time = microseconds(functions)
            ratio = time / first.setdefault(name, time)
            results.append({
                "shape": f"{count} x {tokens}", "rows": rows, "kernel": name, "us": round(time, 1),
                "of one row": round(ratio, 3), "floor us": round(floor, 1),
            })  # fmt: skip
    return results
