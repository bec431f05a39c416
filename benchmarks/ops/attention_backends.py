"""Exact attention by every available backend of this package, PyTorch, FlashInfer and flash-attn: a table of prompts,
packed prompts and decode steps.

``python -m benchmarks.ops.attention_backends --out attention.csv``; FlashInfer compiles its kernels in the first call.
Without a GPU, sizes are tiny. This bench has not run on a GPU yet. Every result is checked against that of the first
backend for the same case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.sweeps.rows import append, write
from shadowkv.eval.provenance import provenance
from shadowkv.ops.case import Case
from shadowkv.ops.dense_attention import flash_attn, flashinfer
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.page import PAGE
from shadowkv.ops.registry import LIBRARIES, PREFERENCE, choose

HEADS, GROUP = 8, 4
"""Llama-3.1-8B's number of kv heads, and of query heads per kv head."""
DIMS = (64, 128, 256)
PROMPTS = {"cuda": [(8192, 8192), (8192, 65536)], "cpu": [(33, 33), (20, 70)]}
"""Number of queries, and number of keys up to the last query. Prompts are computed in blocks of 8,192."""
PACKS = {"cuda": [[1024] * 8, [4095, 2000, 1000, 500, 300, 200, 97], [64] * 128], "cpu": [[5, 40, 1]]}
STEPS = {"cuda": [(32, 61440)], "cpu": [(2, 130)]}
"""Number of sequences, and tokens of each sequence."""
SLOW = ("reference", "cuda_masked")
"""Backends that are not measured on a GPU, because they are slow."""
LARGE_PAGE = 256
"""Tokens of a page for flash-attn, whose pages must be multiples of this."""
ROUNDS = 5
COLUMNS = ("op", "case", "head_dim", "backend", "ms", "first_ms", "tflops", "gb_s", "error", "gpu", "commit")

Ways = dict[str, Callable[[], Tensor]]


def functions(op: str, dim: int, device: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yields the backends of an op that are available here: names and functions."""
    case = Case(frozenset({op}), dtype(device), dim, HEADS * GROUP, HEADS, dim)
    for name in (*PREFERENCE[device], *LIBRARIES.values()):
        if device == "cuda" and name in SLOW:
            continue
        try:
            yield name, choose(op, device, (case,), override=name).function
        except ValueError:
            continue


def dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def prompt(n: int, m: int, dim: int, device: str) -> Ways:
    """Returns each backend's attention for a block of a prompt: the queries are the last n of m positions."""
    q = torch.randn(n, HEADS * GROUP, dim, device=device).to(dtype(device))
    k, v = torch.randn(2, m, HEADS, dim, device=device).to(dtype(device))
    found = functions("dense_attention.causal", dim, device)
    return {name: lambda attend=attend: attend(q, k, v) for name, attend in found}


def pack(lengths: list[int], dim: int, device: str) -> Ways:
    """Packed prompts."""
    q = torch.randn(sum(lengths), HEADS * GROUP, dim, device=device).to(dtype(device))
    k, v = torch.randn(2, sum(lengths), HEADS, dim, device=device).to(dtype(device))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    found = functions("dense_attention.packed", dim, device)
    return {name: lambda attend=attend: attend(q, k, v, Packed(starts, lengths)) for name, attend in found}


def step(batch: int, length: int, dim: int, device: str) -> Ways:
    """Returns each backend's attention for a decode step: one query for each of several sequences of one length, on
    shuffled pages. The other packages are not backends of this op, because FlashInfer must plan on the host when
    lengths change, and flash-attn needs pages of another size. They are added here. PyTorch gets contiguous copies of
    all keys and values."""
    width = -(-length // PAGE)
    q = torch.randn(batch, HEADS * GROUP, dim, device=device).to(dtype(device))
    k, v = (torch.randn(batch * width, HEADS, PAGE, dim, device=device, dtype=dtype(device)) for _ in range(2))
    pages = torch.randperm(batch * width, device=device).view(batch, width)
    counts = (length - PAGE * torch.arange(width, device=device)).clamp(max=PAGE).expand(batch, width).contiguous()
    found = functions("paged_attention", dim, device)
    ways: Ways = {name: lambda attend=attend: attend(q, k, v, pages, counts)[0] for name, attend in found}
    dense = [x[pages].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous() for x in (k, v)]  # [B, H, m, d]
    ways["sdpa"] = lambda: scaled_dot_product_attention(q[:, :, None], *dense, enable_gqa=True)[:, :, 0]
    if not flashinfer.missing():
        ways["flashinfer"] = planned_step(q, k, v, pages, length)
    if not flash_attn.missing() and length % LARGE_PAGE == 0:
        ways["flash_attn"] = large_pages_step(q, *(x.transpose(1, 2).contiguous() for x in dense))
    return ways


def planned_step(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, length: int) -> Callable[[], Tensor]:
    """Returns FlashInfer's attention for the decode step, planned in advance."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, width = pages.shape
    workspace = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = width * torch.arange(batch + 1, dtype=torch.int32)
    last = torch.full((batch,), length - PAGE * (width - 1), dtype=torch.int32)
    shape = q.shape[1], k.shape[1], q.shape[2], PAGE
    wrapper.plan(starts, pages.flatten().int(), last, *shape, q_data_type=q.dtype, kv_data_type=k.dtype)
    return lambda: wrapper.run(q, (k, v))


def large_pages_step(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Returns flash-attn's attention for a decode step over k and v [B, m, H, d] (B sequences, m tokens, H kv heads, d
    dimensions), in pages of 256 tokens."""
    from flash_attn import flash_attn_with_kvcache

    (batch, length), page_ids = k.shape[:2], torch.arange(k.shape[0] * k.shape[1] // LARGE_PAGE, device=k.device)
    pages = [x.view(-1, LARGE_PAGE, *x.shape[2:]) for x in (k, v)]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=k.device)
    table = page_ids.int().view(batch, -1)
    return lambda: flash_attn_with_kvcache(q[:, None], *pages, cache_seqlens=lengths, block_table=table)[:, 0]


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Returns the time of a call, as the median over rounds of several calls. Calls are launched without a CUDA graph,
    as in a prefill."""
    times = []
    for _ in range(ROUNDS + 1):
        if device == "cpu":
            begun = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begun))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times[1:])


def rows(op: str, case: str, dim: int, ways: Ways, work: float, device: str) -> Iterator[dict[str, object]]:
    """Yields a row for each backend in ``ways``. The row of a backend that fails has its error message. ``work`` is the
    work of one call: floating-point operations for prompts, bytes of keys and values for decode steps."""
    expected: Tensor | None = None
    for backend, call in ways.items():
        row: dict[str, object] = {"op": op, "case": case, "head_dim": dim, "backend": backend}
        try:
            begun = time.perf_counter()
            out = call()
            if device == "cuda":
                torch.cuda.synchronize()
            row["first_ms"] = round(1e3 * (time.perf_counter() - begun), 1)
            expected = out.float() if expected is None else expected
            torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.02)
            taken = milliseconds(call, device)
        except (RuntimeError, AssertionError, ValueError, ImportError) as error:
            yield row | {"error": " ".join(str(error).split())[:200]}
            continue
        row["ms"] = float(f"{taken:.4g}")
        unit, scale = ("gb_s", 1e6) if op == "paged_attention" else ("tflops", 1e9)
        yield row | {unit: float(f"{work / taken / scale:.4g}")}


def table(device: str, dims: list[int]) -> Iterator[dict[str, object]]:
    """Yields all rows, one head dimension after another."""
    for dim in dims:
        pair = 4 * HEADS * GROUP * dim
        for n, m in PROMPTS[device]:
            seen = n * (m - n) + n * (n + 1) / 2
            yield from rows("dense_attention.causal", f"{n} x {m}", dim, prompt(n, m, dim, device), pair * seen, device)
        for lengths in PACKS[device]:
            seen = sum(n * (n + 1) / 2 for n in lengths)
            case = f"{len(lengths)} up to {max(lengths)}"
            yield from rows("dense_attention.packed", case, dim, pack(lengths, dim, device), pair * seen, device)
        for batch, length in STEPS[device]:
            ways, nbytes = step(batch, length, dim, device), 2 * batch * length * HEADS * dim * dtype(device).itemsize
            yield from rows("paged_attention", f"{batch} x {length}", dim, ways, nbytes, device)
            del ways
        if device == "cuda":
            torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status, which is 1 if a backend failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS), help="head dims (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device, about, failed = "cuda" if torch.cuda.is_available() else "cpu", provenance(), False
    write(args.out, COLUMNS)
    for row in table(device, args.dims):
        append(args.out, COLUMNS, [row | {"gpu": about["gpu"], "commit": about["commit"]}])
        failed |= "error" in row
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
