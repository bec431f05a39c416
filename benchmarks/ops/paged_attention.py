"""Paged decode attention by every backend of a device: time per call, and bytes of keys and values read per second.

On a GPU, the attention is Llama-3.1-8B's (32 query and 8 kv heads of 128), or that of Gemma-4-31B's full layers (32
query and 4 kv heads of 512). On a CPU, it is SmolLM2's (9 query and 3 kv heads of 64), over pages that together are
much larger than the CPU's caches. CPU times are wall-clock times, in rounds that alternate between the backends.
Results are checked against a softmax in float64.

``verified_rows`` measures steps that verify drafts, on a GPU, with 1, 4 and 8 rows for every sequence. Tokens are
``pages`` of exact keys and values, or compressed pages of ``dense`` or ``fp8`` rows (``attend_coded``). In ``each``,
every row reads the pages. In ``folded``, the op is told which rows belong to one sequence, as in engine steps, and
must return the same. The
floor is the larger time of reading every key and value once, and of all products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, against_floor, bench, microseconds
from shadowkv.kvcache.codecs.fp8 import Fp8Rows
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.attend_coded import cuda_dense, cuda_fp8
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention import cuda
from shadowkv.ops.registry import PREFERENCE, Ops
from shadowkv.ops.sequence_rows import SequenceRows

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
WIDE_SHAPE = (4, 8, 512)
WIDE: dict[str, list[int]] = {
    "9 x 122880 of 512 dims": [122880] * 9,
    "36 x 640 of 512 dims": [640] * 36,
    "1 x 122880 of 512 dims": [122880],
}
"""As ``ON_CUDA``, with heads of ``WIDE_SHAPE``, which is as ``SHAPES``."""
ON_CPU = {"48 x 64-960": [64 + round(i * (960 - 64) / 47) for i in range(48)], "1 x 8192": [8192]}
ROUNDS = 9
VERIFIED = [(1, 61440), (15, 61440), (7, 124928)]
"""Number of sequences, and tokens of each sequence: a single one, and the largest batches of ``full`` on an H200."""
ROWS_OF_SEQUENCE = (1, 4, 8)
PRODUCT_SPEED = 989e12
"""Peak of an H200's 16-bit products, in operations per second."""


def problem(
    lengths: list[int], dtype: torch.dtype, device: str, shape: tuple[int, int, int] | None = None
) -> list[Call]:
    """Returns the arguments of one call per layer, on views like the KV cache's. Each layer evicts the previous one
    from the caches. With uint8, keys and values are 8-bit floats (e4m3), and queries bfloat16."""
    heads, group, dim = shape or SHAPES[device]
    used = [-(-length // PAGE) for length in lengths]
    fields = [Field(name, (heads, PAGE, dim), dtype) for name in "kv"]
    block = sum(field.nbytes for field in fields)
    layers = 8 if block * sum(used) < 2**30 else 2
    tier = Tier("device", layers, block, sum(used), torch.device(device))
    views = tier.views(fields)
    for layer in range(layers):
        if dtype == torch.uint8:
            codes = tier.arena[layer].random_()
            codes.masked_fill_(codes % 128 == 127, 0)  # NaN
        else:
            tier.arena[layer].view(dtype).normal_()
    page_ids = torch.tensor(tier.allocate(sum(used)))[torch.randperm(sum(used))]
    pages = torch.zeros(len(lengths), max(used), dtype=torch.int64)
    counts = torch.zeros_like(pages)
    for row, (length, count) in enumerate(zip(lengths, used)):
        pages[row, :count], page_ids = page_ids[:count], page_ids[count:]
        counts[row, :count] = (length - PAGE * torch.arange(count)).clamp(max=PAGE)
    q = torch.randn(len(lengths), heads * group, dim).to(device, torch.bfloat16 if dtype == torch.uint8 else dtype)
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
            attend = Ops(device, overrides={"paged_attention": name}).paged_attention
            found = attend(*call)
        except ValueError:
            print(f"no backend {name!r} here")
            continue
        backends[name] = attend
        for own, expected in zip(found, exact):
            error = (own.double() - expected).abs().max().item()
            if not error <= allowed:
                raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed}")
    return backends


def bytes_read(lengths: list[int], dtype: torch.dtype, device: str, shape: tuple[int, int, int] | None = None) -> int:
    """Returns the bytes of all keys and values, each counted once."""
    heads, _, dim = shape or SHAPES[device]
    return 2 * sum(lengths) * heads * dim * dtype.itemsize


@bench([*ON_CUDA, *WIDE])
def paged_attention(case: str) -> list[Row]:
    """A row for each backend. A CUDA graph goes over all layers four times."""
    lengths, shape = (WIDE[case], WIDE_SHAPE) if case in WIDE else (ON_CUDA[case], SHAPES["cuda"])
    arguments = lengths, torch.bfloat16, "cuda", shape
    calls, nbytes = problem(*arguments), bytes_read(*arguments)
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


def coded_rows(stored: Tensor, pages: Tensor, kind: str) -> DenseRows | CodedRows:
    """Returns stored pages as rows of compressed pages."""
    rows, (_, heads, _, dim) = stored.unflatten(2, (PAGE // 8, 8)), stored.shape
    if kind == "dense":
        return DenseRows(rows, pages)
    state = torch.full((1, heads, 1), 0.01, device=stored.device)
    scale = torch.empty(1, heads, PAGE, 0, device=stored.device)
    return CodedRows(rows, scale, Fp8Rows(), dim, None, pages, None, (state,), torch.zeros_like(pages[:, 0]))


def verifying(
    layers: Sequence[Call], q: Tensor, rows: int, kind: str, sequences: SequenceRows | None
) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Returns a call for each layer of ``problem``, with queries [S * rows, H * G, d]."""
    made = list[Callable[[], tuple[Tensor, Tensor]]]()
    for _, k, v, of_sequences, _ in layers:
        pages = of_sequences.repeat_interleave(rows, 0)
        if kind == "pages":
            counts = torch.full_like(pages, PAGE)
            counts[:, -1] -= torch.arange(rows, device=q.device).flip(0).repeat(len(of_sequences))
            made.append(partial(cuda.paged_attention, q, k, v, pages, counts, sequences))
        else:
            attend = cuda_dense.attend_coded if kind == "dense" else cuda_fp8.attend_coded
            begin = torch.zeros_like(pages[:, 0])
            keys, values = (coded_rows(x, pages, kind) for x in (k, v))
            made.append(partial(attend, q, keys, values, begin, begin + PAGE * pages.shape[1], sequences))
    return made


@bench(
    [(kind, *batch) for kind in ("pages", "dense", "fp8") for batch in VERIFIED],
    lambda: not (cuda.missing() or cuda_dense.missing() or cuda_fp8.missing()),
)
def verified_rows(case: tuple[str, int, int]) -> list[Row]:
    """A row for each number of rows, with and without ``sequences``, after a check that both give the same results."""
    (kind, count, tokens), (heads, group, dim) = case, SHAPES["cuda"]
    dtype = torch.uint8 if kind == "fp8" else torch.bfloat16
    layers, nbytes = problem([tokens] * count, dtype, "cuda"), bytes_read([tokens] * count, dtype, "cuda")
    results: list[Row] = []
    first: dict[str, float] = {}
    for rows in ROWS_OF_SEQUENCE:
        q = torch.randn(count * rows, heads * group, dim, device="cuda").bfloat16()
        sequences = SequenceRows(rows * torch.arange(count + 1, device="cuda"), rows)
        timed = {
            "each": verifying(layers, q, rows, kind, None),
            "folded": verifying(layers, q, rows, kind, sequences),
        }
        each, folded = (made[0]()[0].float() for made in timed.values())
        worst = float((each - folded).abs().max() / each.abs().max())
        if not worst < 0.02:
            raise SystemExit(f"{kind}: rows and folded rows differ by {worst} of the largest output")
        products = 4 * count * rows * tokens * heads * group * dim
        floor = 1e6 * max(nbytes / READ_SPEED, products / PRODUCT_SPEED)
        for name, functions in timed.items():
            time = microseconds(functions)
            of_one = time / first.setdefault(name, time)
            results.append({
                "shape": f"{count} x {tokens}", "stored": kind, "rows": rows, "kernel": name, "us": round(time, 1),
                "of one row": round(of_one, 3), "floor us": round(floor, 1),
            })  # fmt: skip
    return results
