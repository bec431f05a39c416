"""Selection by a sketch on a GPU: coarse scores from the keys' signs (``sign_scores``), and the two-level selection
that uses these scores (``select_by_sketch``).

Pages are shuffled in an arena among other bytes, as in the KV cache. Counted bytes of ``sign_scores`` are the signs and
scales of all valid pages. The float16 scores, which are written, are not counted; with heads of 128 dimensions they are
1/68 of the counted bytes. Before each call, ``sketch_queries`` is called. Its time is included, and is also a column of
its own. Counted bytes of ``select_by_sketch`` are the coarse scores, and both bit planes and the scales of the kept
runs, which are random. Page ids and the result are not counted. If a call reads less than the L2 cache holds, each call
has its own rows. The first rows of every shape are checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.ops.timing import Row, against_floor, arena, bench, microseconds
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.page import PAGE
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.select_by_sketch import cuda as select_cuda
from shadowkv.ops.select_by_sketch import reference as select_reference
from shadowkv.ops.sign_scores import cuda as scores_cuda
from shadowkv.ops.sign_scores import reference as scores_reference
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, encode_scale
from shadowkv.ops.sketch_queries import cuda as queries_cuda
from shadowkv.ops.sketch_queries.reference import SketchQueries, plane_bytes, sketch_queries

OTHER_BYTES = 32 * 1024
SCORED = [  # rows, tokens, kv heads, group, dim, whether rows are ragged
    (63, 61440, 8, 4, 128, False),
    (30, 124928, 8, 4, 128, False),
    (63, 61440, 8, 4, 128, True),
    (1, 61440, 8, 4, 128, False),
    (1, 124928, 8, 4, 128, False),
    (63, 61440, 8, 4, 64, False),
    (30, 61440, 8, 4, 256, False),
    (63, 61440, 4, 7, 128, False),
    (63, 61440, 8, 8, 128, False),
    (36, 122880, 4, 8, 512, False),
]
UNCACHED_BYTES = 200e6
PER_ROW = (1, 5, 6, 7)  # indices of arguments that have rows, besides queries and sampling
SELECTED = [  # rows, tokens, kv heads, group, dim, policy
    (76, 61440, 8, 4, 128, "turbo"),
    (63, 61440, 8, 4, 128, "turbo:sampled=0.0"),
    (63, 61440, 8, 4, 128, "turbo-host"),
    (36, 124928, 8, 4, 128, "turbo"),
    (36, 124928, 8, 4, 128, "turbo:sampled=0.0"),
    (18, 249856, 8, 4, 128, "turbo"),
    (63, 61440, 8, 4, 64, "turbo"),
    (63, 61440, 4, 7, 128, "turbo"),
    (32, 61440, 8, 4, 256, "turbo"),
    (36, 122880, 4, 8, 512, "turbo"),
    (1, 61440, 8, 4, 128, "turbo"),
    (1, 1048576, 8, 4, 128, "turbo"),
]


def signs_of(rows: int, tokens: int, heads: int, group: int, dim: int, ragged: bool) -> tuple[Tensor, ...]:
    """Returns queries, their maps and states, and the other arguments of a call. Rows are full, or of random lengths if
    ``ragged``."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES,), torch.uint8),
        Field("signs", (heads, PAGE, plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, PAGE), torch.uint8),
    ]
    views, pages = arena(fields, rows, columns)
    signs, scale = views["signs"][0], views["scale"][0]
    for part in pages.flatten().split(4096):
        scale[part] = encode_scale(0.3 + torch.rand(len(part), heads, PAGE, device=device))
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    counts = torch.randint(columns // 8, columns + 1, (rows,)) if ragged else torch.full((rows,), columns)
    maps = random_rotation(dim, "sketch").to(device).bfloat16().repeat(rows, heads, 1, 1)
    return q, maps, torch.arange(rows, device=device), signs, scale, pages, counts.cuda()


def check_scores(args: tuple[Tensor, ...], scores: Tensor) -> None:
    """Raises an error if the scores of the first two rows differ from the reference's by more than rounding
    explains."""
    q, maps, states, signs, scale, pages, counts = args
    queries = sketch_queries(q[:2], maps, states[:2])
    exact = scores_reference.sign_scores(queries, signs, scale, pages[:2], counts[:2])
    torch.testing.assert_close(scores[:2], exact, atol=0.02, rtol=1e-3)


@bench(SCORED, lambda: not scores_cuda.missing() and not queries_cuda.missing())
def sign_scores(case: tuple[int, int, int, int, int, bool]) -> list[Row]:
    """One row of the table."""
    rows, tokens, heads, group, dim, ragged = case
    args = signs_of(*case)
    q, maps, states, *fields = args

    def call() -> Tensor:
        return scores_cuda.sign_scores(queries_cuda.sketch_queries(q, maps, states), *fields)

    check_scores(args, call())
    time = microseconds([call] * 10)
    queries_time = microseconds([lambda: queries_cuda.sketch_queries(q, maps, states)] * 10)
    moved = int(args[6].sum()) * heads * PAGE * (plane_bytes(dim) + 1)
    row: Row = {"rows": rows, "tokens": tokens, "kv heads": heads, "group": group, "dim": dim, "ragged": ragged}
    return [row | {"queries us": round(queries_time, 1)} | against_floor(moved, time)]


def selected_by(kv: str, tokens: int) -> tuple[int, int, int]:
    """Returns the number of tokens of a chunk, the number of chunks that a decode step of the policy selects from a
    context, and how many of these are sampled."""
    layout = Layout(preset(kv), ModelShape(1, 32, 8, 128), torch.bfloat16, tokens)
    budget = layout.spec.budget_chunks(np.array(tokens))
    return layout.spec.chunk, int(budget), int(layout.parts.index.sampled_chunks(budget, np.array(tokens)))


def planes_of(rows: int, tokens: int, heads: int, group: int, dim: int, chunk: int, budget: int, sampled: int) -> tuple:
    """Returns the arguments of a call. Every row is full."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES // 2,), torch.uint8),
        Field("signs", (heads, PAGE, plane_bytes(dim)), torch.uint8),
        Field("rest", (heads, PAGE, plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, PAGE), torch.uint8),
    ]
    views, pages = arena(fields, rows, columns)
    signs, rest, scale = (views[field.name][0] for field in fields[1:])
    for part in pages.flatten().split(4096):
        excluded = torch.rand(len(part), heads, PAGE // chunk, device=device) < 0.01
        coded = encode_scale(0.3 + torch.rand(len(part), heads, PAGE, device=device))
        scale[part] = coded.masked_fill(excluded.repeat_interleave(chunk, -1), EXCLUDED_SCALE)
    coarse = (5 + 2 * torch.randn(rows, heads, 8 * columns, device=device)).half()
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    counts = torch.full((rows,), columns, device=device)
    budgets = torch.full((rows,), budget - sampled, device=device)
    sampling = Sampling(torch.full_like(budgets, sampled), torch.arange(rows, device=device)) if sampled else None
    queries = sketch_queries(q, torch.eye(dim, device=device)[None, None], torch.zeros_like(counts))
    return queries, coarse, signs, rest, scale, pages, counts, budgets, chunk, budget, sampling


def rows_of(args: tuple, rows: slice) -> tuple:
    """Returns the arguments of a call for a part of the rows."""
    parts = {field.name: getattr(args[0], field.name)[rows] for field in dataclasses.fields(SketchQueries)}
    sampling = args[-1] and Sampling(args[-1].counts[rows], args[-1].seeds[rows])
    return SketchQueries(**parts), *(x[rows] if i in PER_ROW else x for i, x in enumerate(args[1:-1], 1)), sampling


def counted_bytes(heads: int, tokens: int, dim: int, chunk: int, budget: int) -> int:
    """Returns the bytes of the coarse scores and of the kept runs of one row."""
    runs = int(select_reference.kept_runs(torch.tensor([tokens // PAGE]), torch.tensor([budget]), chunk))
    return heads * (tokens // 8 * 2 + runs * 8 * (2 * plane_bytes(dim) + 1))


def check_selection(args: tuple, selected: Tensor) -> None:
    """Raises an error if a call without sampling selects other chunks in the first rows than the reference does, more
    than ties and rounding explain."""
    exact, _ = select_reference.select_by_sketch(*rows_of(args, slice(2))[:-1])
    for own, expected in zip(selected[:2].flatten(0, 1), exact.flatten(0, 1)):
        assert len(own) == len(expected)
        common = torch.isin(own, expected).sum()
        assert common >= 0.97 * len(own), f"{common} of {len(own)} chunks are right"


@bench(SELECTED, lambda: not select_cuda.missing())
def select_by_sketch(case: tuple[int, int, int, int, int, str]) -> list[Row]:
    """One row of the table."""
    rows, tokens, heads, group, dim, kv = case
    chunk, budget, sampled = selected_by(kv, tokens)
    moved = rows * counted_bytes(heads, tokens, dim, chunk, budget)
    copies = math.ceil(UNCACHED_BYTES / moved)
    args = planes_of(rows * copies, tokens, heads, group, dim, chunk, budget, sampled)
    check_selection(args, select_cuda.select_by_sketch(*args[:-1])[0])

    def call(part: slice) -> Callable[[], object]:
        own = rows_of(args, part)
        return lambda: select_cuda.select_by_sketch(*own)

    calls = [call(slice(i * rows, (i + 1) * rows)) for i in range(copies)]
    time = microseconds(calls * math.ceil(10 / copies))
    row: Row = {
        "rows": rows, "tokens": tokens, "kv heads": heads, "group": group, "dim": dim, "chunk": chunk,
        "budget": budget, "sampled": sampled,
    }  # fmt: skip
    return [row | against_floor(moved, time)]
