"""Attention over all coded tokens on a GPU: time of a call, bytes of codes and scales read per second, and its error.

``python -m benchmarks.ops.attend_coded [--out file.json]``: Llama-3.1-8B's attention (32 query and 8 kv heads of
128), pages shuffled in an arena as in the KV cache, keys and values in the formats that the CUDA kernel knows, with and
without a mean of the keys. The floor is the time of reading every byte once at 4.5 TB/s. Times are medians over replays
of a CUDA graph, with the products with both rotations, and the largest error is that of the first row against the
reference in float32.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, microseconds, run
from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import cuda, reference
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.page import PAGE

HEADS, DIM = 8, 128
L4, L3, L2 = "lloyd-4bit", "lloyd-3bit", "lloyd-2bit"
POLAR, TQ3, KVARN = ("polar-int4", "polar-int4"), ("tq3_0", "tq3_0"), ("kvarn-4bit", "kvarn-2bit")
CASES = [  # rows, tokens, whether rows are ragged, group, formats of keys and values, whether keys are centred
    (15, 61440, False, 4, L4, L4, False),
    (15, 61440, False, 4, L3, L3, False),
    (15, 61440, False, 4, L4, L3, False),
    (15, 61440, False, 4, L2, L2, False),
    (15, 61440, False, 4, L4, L4, True),
    (15, 61440, False, 4, L3, L3, True),
    (15, 61440, False, 8, L4, L4, False),
    (15, 61440, True, 4, L4, L4, False),
    (48, 19200, False, 4, L4, L4, False),
    (48, 2048, False, 4, L4, L4, False),
    (1, 61440, False, 4, L4, L4, False),
    (1, 124928, False, 4, L4, L4, False),
    *((15, 61440, False, 4, *pair, False) for pair in (POLAR, KVARN, TQ3)),
    *((48, 19200, False, 4, *pair, False) for pair in (POLAR, KVARN, TQ3)),
    *((1, 124928, False, 4, *pair, False) for pair in (POLAR, KVARN, TQ3)),
    *((15, 61440, False, 4, *pair, True) for pair in (POLAR, KVARN, TQ3)),
]
Case = tuple[int, int, bool, int, str, str, bool]
Call = tuple[Tensor, CodedRows, CodedRows, Tensor, Tensor]


def problem(case: Case) -> list[Call]:
    """Arguments of a call per layer, layers of 1 GB in total, so that none is found in a cache: random codes, rows full
    or of random lengths, all in whole pages."""
    rows, tokens, ragged, group, *names, centred = case
    columns, device = tokens // PAGE, torch.device("cuda")
    codecs = {axis: ROW_CODECS[name].for_axis(axis) for axis, name in zip(("keys", "values"), names, strict=True)}
    fields = []
    for axis, codec in codecs.items():
        fields.append(Field(f"{axis} codes", (HEADS, PAGE, 1, codec.row_bytes(DIM)), torch.uint8))
        if codec.scales(DIM):
            fields.append(Field(f"{axis} scale", (HEADS, PAGE, codec.scales(DIM)), codec.scale_dtype))
    size = -(-sum(field.nbytes for field in fields) // 256) * 256
    layers = max(2, min(20, 2**30 // (size * rows * columns)))
    tier = Tier("device", layers, size, rows * columns, device)
    tier.arena.random_()
    views = tier.views(fields)
    taken = torch.tensor(tier.allocate(rows * columns)).cuda()
    pages = taken[torch.randperm(len(taken), device=device)].view(rows, columns)
    counts = torch.randint(columns // 8, columns + 1, (rows,)) if ragged else torch.full((rows,), columns)
    begin, end = torch.zeros(rows, dtype=torch.int64, device=device), PAGE * counts.cuda()
    row = torch.arange(rows, device=device)
    mean, rotary = torch.randn(rows, HEADS, DIM, device=device), RotaryTables(RopeConfig(DIM), tokens, device)
    calls = []
    for layer in range(layers):
        sides = []
        for axis, codec in codecs.items():
            codes = views[f"{axis} codes"][layer]
            scale = views[f"{axis} scale"][layer] if codec.scales(DIM) else codes[..., :0].flatten(2, 3)
            for some in taken.split(4096):
                fill(codec, codes, scale, some)
            rotation = codec.rotation_matrix(DIM, axis).to(device)
            sides.append(CodedRows(codes, scale, codec, DIM, rotation, pages))
        keys, values = sides
        if centred:
            coded = {**vars(keys), "states": row}
            keys = CentredKeys(**coded, mean=mean, first=torch.zeros_like(row), rotary=rotary)
        q = torch.randn(rows, HEADS * group, DIM, device=device).bfloat16()
        calls.append((q, keys, values, begin, end))
    return calls


def fill(codec: RowCodec, codes: Tensor, scale: Tensor, pages: Tensor) -> None:
    """Sets the scales of pages, whose codes are random, to realistic ones: those of rows with entries of about 1."""
    if codec.id == CodecId.TQ3_0:
        blocks = codes[pages].unflatten(-1, (-1, 14))
        blocks[..., 12:] = (
            (0.5 + torch.rand(blocks.shape[:-1], device=codes.device)).half()[..., None].view(torch.uint8)
        )
        codes[pages] = blocks.flatten(-2)
    elif codec.tile == PAGE:
        rows = torch.randn(8, HEADS, PAGE, DIM, device=codes.device)  # all pages have the scales of these
        stored = codec.encode(rows, None)[1]
        scale[pages] = stored[torch.arange(len(pages), device=codes.device) % len(stored)]
    else:
        scale[pages] = 8 + 4 * torch.rand(len(pages), *scale.shape[1:], device=codes.device).to(scale.dtype)


def error(call: Call) -> float:
    """The largest error of the first row over its first 128 pages."""
    q, keys, values, begin, end = call
    sides = []
    for side in (keys, values):
        fields = {**vars(side), "pages": side.pages[:1, :128]}
        if isinstance(side, CentredKeys):
            fields |= {"states": side.states[:1], "first": side.first[:1]}
        sides.append(type(side)(**fields))
    small = *sides, begin[:1], end[:1].clamp(max=PAGE * 128)
    found, exact = cuda.attend_coded(q[:1].float(), *small), reference.attend_coded(q[:1].float(), *small)
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


def measure(case: Case) -> list[Row]:
    """One row of the table."""
    rows, tokens, ragged, group, key_format, value_format, centred = case
    calls = problem(case)
    worst = error(calls[0])
    if not worst < 0.01:
        raise SystemExit(f"off by {worst} from the reference")
    time = microseconds([partial(cuda.attend_coded, *call) for call in calls])
    sides = calls[0][1:3]
    a_token = sum(x.codec.row_bytes(DIM) + x.codec.scales(DIM) * x.scale.element_size() for x in sides)
    moved = int(calls[0][4].sum()) * HEADS * a_token
    floor = moved / READ_SPEED * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "ragged": ragged, "group": group, "keys": key_format,
        "values": value_format, "centred": centred, "us": round(time, 1), "MB": round(moved / 1e6, 1),
        "GB/s": round(moved / time / 1e3), "of the floor's speed": round(floor / time, 3), "error": f"{worst:.1e}",
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda.available(), CASES, measure))
