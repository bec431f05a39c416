"""Attention over all coded tokens on a GPU: time of a call, bytes read per second, and error.

The attention is Llama-3.1-8B's (32 query and 8 kv heads of 128). Pages are shuffled in an arena as in the KV cache. The
bench ``attend_coded`` has keys and values in the formats that the CUDA kernel supports, with and without a mean of the
keys. Its times include the products with both rotations, and its floor is the time to read every byte once. The bench
``attend_mixed`` has the keys and values of the preset ``shard`` (mixed latents, codebook entries), on a Hopper GPU. Its
floor is the time of the product of latents and bases alone. The error is the largest one of the first row, compared
with the reference in float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, arena, bench, microseconds
from shadowkv import baselines
from shadowkv.baselines.shard import MixedLatents
from shadowkv.baselines.vq import ENTRIES, GROUP, VectorRows
from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import cuda, reference
from shadowkv.ops.attend_coded import cuda_mixed_sm90 as cuda_mixed
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, LatentKeys
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
    """Returns the arguments of a call for each layer. Codes are random. Rows are full or of random lengths, in whole
    pages. Layers have 1 GB in total, so that no call finds its bytes in the L2 cache."""
    baselines.register()
    rows, tokens, ragged, group, *names, centred = case
    columns, device = tokens // PAGE, torch.device("cuda")
    codecs = {axis: ROW_CODECS[name].for_axis(axis) for axis, name in zip(("keys", "values"), names, strict=True)}
    fields = []
    for axis, codec in codecs.items():
        fields.append(Field(f"{axis} codes", (HEADS, PAGE, 1, codec.row_bytes(DIM)), torch.uint8))
        if codec.scales(DIM):
            fields.append(Field(f"{axis} scale", (HEADS, PAGE, codec.scales(DIM)), codec.scale_dtype))
    views, pages = arena(fields, rows, columns, most_layers=20)
    counts = torch.randint(columns // 8, columns + 1, (rows,)) if ragged else torch.full((rows,), columns)
    begin, end = torch.zeros(rows, dtype=torch.int64, device=device), PAGE * counts.cuda()
    row = torch.arange(rows, device=device)
    mean, rotary = torch.randn(rows, HEADS, DIM, device=device), RotaryTables(RopeConfig(DIM), tokens, device)
    calls = []
    for layer in range(len(views["keys codes"])):
        sides = []
        for axis, codec in codecs.items():
            codes = views[f"{axis} codes"][layer]
            scale = views[f"{axis} scale"][layer] if codec.scales(DIM) else codes[..., :0].flatten(2, 3)
            for part in pages.flatten().split(4096):
                fill(codec, codes, scale, part)
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
    """Sets the scales of pages with random codes to realistic ones: those of rows whose entries have a magnitude of
    about 1."""
    if codec.id == CodecId.TQ3_0:
        blocks = codes[pages].unflatten(-1, (-1, 14))
        blocks[..., 12:] = (
            (0.5 + torch.rand(blocks.shape[:-1], device=codes.device)).half()[..., None].view(torch.uint8)
        )
        codes[pages] = blocks.flatten(-2)
    elif codec.tile == PAGE:
        rows = torch.randn(8, HEADS, PAGE, DIM, device=codes.device)  # pages get the scales of these in turn
        stored = codec.encode(rows, None)[1]
        scale[pages] = stored[torch.arange(len(pages), device=codes.device) % len(stored)]
    else:
        scale[pages] = 8 + 4 * torch.rand(len(pages), *scale.shape[1:], device=codes.device).to(scale.dtype)


def error(call: Call) -> float:
    """Returns the largest error of the first row, over its first 128 pages."""
    q, keys, values, begin, end = call
    sides = []
    for side in (keys, values):
        fields = {**vars(side), "pages": side.pages[:1, :128]}
        if isinstance(side, CentredKeys):
            fields |= {"states": side.states[:1], "first": side.first[:1]}
        sides.append(type(side)(**fields))
    small = *sides, begin[:1], end[:1].clamp(max=PAGE * 128)
    out, exact = cuda.attend_coded(q[:1].float(), *small), reference.attend_coded(q[:1].float(), *small)
    return max(float((a - b).abs().max()) for a, b in zip(out, exact, strict=True))


@bench(CASES, lambda: not cuda.missing())
def attend_coded(case: Case) -> list[Row]:
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


PRODUCTS = 8e14
"""Operations per second that matrix products in half precision reach on an H200, about."""
MIXED_CASES = [  # rows, tokens, group, rank, bits of each 16 rank dimensions
    (32, 8192, 4, 192, (4,)),
    (32, 8192, 4, 192, (8, 6, 6, 4, 4, 4, 4, 4, 2, 2, 2, 2)),
    (32, 8192, 4, 160, (4,)),
    (32, 8192, 7, 192, (4,)),
    (64, 8192, 4, 192, (4,)),
    (8, 61440, 4, 192, (4,)),
    (1, 124928, 4, 192, (4,)),
]
MixedCase = tuple[int, int, int, int, tuple[int, ...]]
MixedCall = tuple[Tensor, LatentKeys, CodedRows, Tensor, Tensor]


def mixed_problem(case: MixedCase) -> list[MixedCall]:
    """Returns the arguments of a call for each layer, with random codes. Layers have 1 GB in total, so that no call
    finds its bytes in the L2 cache."""
    rows, tokens, group, rank, bits = case
    columns, device = tokens // PAGE, torch.device("cuda")
    latent, vector = MixedLatents(), VectorRows()
    width, dtype = latent.field(rank, torch.bfloat16)
    fields = [
        Field("latents", (PAGE, 1, width), dtype),
        Field("codes", (HEADS, PAGE, 1, vector.row_bytes(DIM)), torch.uint8),
    ]
    views, pages = arena(fields, rows, columns, most_layers=8)
    row = torch.arange(rows, device=device)
    rotary = RotaryTables(RopeConfig(DIM, theta=5e5), tokens, device)
    widths = torch.tensor(bits, dtype=torch.uint8, device=device).repeat_interleave(16).repeat(rank)[:rank]
    step = 1 / 50 / rank**0.5 / ((1 << widths.int() >> 1) - 1).clamp(min=1)
    nothing = torch.empty(1, HEADS, PAGE, 0, device=device).half()
    rotation = vector.rotation_matrix(DIM, "values").cuda()
    calls = []
    for latents, codes in zip(views["latents"], views["codes"], strict=True):
        basis = torch.randint(-127, 128, (rows, rank, HEADS, DIM), device=device, dtype=torch.int8)
        mean = torch.randn(rows, HEADS, DIM, device=device).bfloat16()
        of_rows = widths.expand(rows, -1).contiguous(), step.expand(rows, -1).contiguous()
        first = torch.zeros_like(row)
        keys = LatentKeys(latents, latent, basis, mean, row, pages, first, rotary, *of_rows)
        state = (
            torch.rand(rows, HEADS, DIM, device=device) + 1,
            torch.rand(rows, 1, ENTRIES, GROUP, device=device) * 2 - 1,
        )
        values = CodedRows(codes, nothing, vector, DIM, rotation, pages, None, state, row)
        q = torch.randn(rows, HEADS * group, DIM, device=device).bfloat16()
        calls.append((q, keys, values, torch.zeros_like(row), torch.full_like(row, tokens)))
    return calls


def mixed_error(call: MixedCall) -> float:
    """Returns the largest error of the first row, over its first 64 pages."""
    q, keys, values, begin, end = call
    assert keys.mean is not None and values.states is not None
    first = {"pages": keys.pages[:1, :64], "states": keys.states[:1]}
    sides = replace(keys, first=keys.first[:1], **first), replace(values, **first)
    small = *sides, begin[:1], end[:1].clamp(max=PAGE * 64)
    out = cuda_mixed.attend_coded(q[:1], *small)
    exact = reference.attend_coded(q[:1].float(), replace(small[0], mean=keys.mean.float()), *small[1:])
    return max(float((a - b).abs().max()) for a, b in zip(out, exact, strict=True))


@bench(MIXED_CASES, lambda: not cuda_mixed.missing())
def attend_mixed(case: MixedCase) -> list[Row]:
    """One row of the table."""
    rows, tokens, group, rank, bits = case
    calls = mixed_problem(case)
    worst = mixed_error(calls[0])
    if not worst < 0.02:
        raise SystemExit(f"off by {worst} from the reference")
    time = microseconds([partial(cuda_mixed.attend_coded, *call) for call in calls])
    floor = 2 * rows * tokens * HEADS * rank * DIM / PRODUCTS * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "group": group, "rank": rank, "bits": " ".join(map(str, bits)),
        "us": round(time, 1), "MB": round(rows * tokens * (rank // 2 + HEADS * DIM // GROUP) / 1e6, 1),
        "of the floor's speed": round(floor / time, 3), "error": f"{worst:.1e}",
    }  # fmt: skip
    return [row]
