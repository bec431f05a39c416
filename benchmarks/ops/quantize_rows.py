"""Coded rows on a GPU: time to store 61,440 tokens of 8 heads, and bytes read and written per second.

Rows of one layer are coded 512 pages at a time, as in compression, into pages of an arena. Rows in float32 stand for
keys whose mean has been subtracted. Counted bytes are rows, codes and scales. ``back us`` is the time to decode the
same rows to bfloat16. Decoded rows of the first pages are checked against rows that the reference codes and decodes.
"""

from __future__ import annotations

import torch

from benchmarks.ops.timing import Row, against_floor, arena, bench, microseconds
from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.ops.attend_selected.sources import CodedRows
from shadowkv.ops.page import PAGE
from shadowkv.ops.quantize_rows import triton
from shadowkv.ops.rebuild_rows import triton as rebuild
from shadowkv.ops.rotations import random_rotation

PAGES, HEADS, AT_ONCE, CHECKED = 960, 8, 512, 8
NAMES = ("rotated-4bit", "rotated-3bit", "lloyd-8bit", "lloyd-4bit", "lloyd-3bit", "lloyd-2bit", "fp8")
CASES = [(name, dim, dtype) for dtype in (torch.bfloat16, torch.float32) for dim in (128, 64) for name in NAMES]


@bench(CASES)
def quantize_rows(case: tuple[str, int, torch.dtype]) -> list[Row]:
    """One row of the table."""
    name, dim, dtype = case
    codec, device = ROW_CODECS[name], torch.device("cuda")
    rotation = random_rotation(dim, "values").to(device) if codec.rotated else None
    fields = [Field("codes", (HEADS, 8, 8, codec.row_bytes(dim)), torch.uint8)]
    if codec.scales(dim):
        fields.append(Field("scale", (HEADS, PAGE, 1), codec.scale_dtype))
    views, pages = arena(fields, 1, PAGES)
    pages = pages[0]
    codes = views["codes"]
    scale = views["scale"] if codec.scales(dim) else codes[..., :0].flatten(-3, -2)
    rows = torch.randn(1, PAGES, PAGE, HEADS, dim, device=device).to(dtype)
    state = tuple(
        torch.full((1, 1, HEADS, *shape), 1 / 64, device=device) for shape in codec.state_shapes(dim).values()
    )

    def store() -> None:
        for start in range(0, PAGES, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            triton.quantize_rows(rows[:, part], codec, rotation, state, codes, pages[part], scale, pages[part])

    states = torch.zeros(1, dtype=torch.int64, device=device)
    source = CodedRows(codes[0], scale[0], codec, dim, rotation, pages[None], None, tuple(x[0] for x in state), states)
    out = torch.empty(HEADS, PAGE * PAGES, dim, dtype=torch.bfloat16, device=device)
    time = microseconds([store] * 3)
    back = microseconds([lambda: rebuild.rebuild_rows(source, 0, out, False)] * 3)
    exact = codec.decode(*codec.encode(rows[0, :CHECKED], rotation, state), rotation, dim, state)
    own = out[:, : PAGE * CHECKED].unflatten(1, (CHECKED, PAGE)).permute(1, 2, 0, 3)
    assert (own - exact).norm() < 0.01 * exact.norm(), "rebuilt rows are not those of the reference"
    moved = rows.nbytes + PAGES * sum(field.nbytes for field in fields)
    row: Row = {"format": name, "dim": dim, "rows": str(dtype).removeprefix("torch.")}
    return [row | against_floor(moved, time) | {"back us": round(back, 1)}]
