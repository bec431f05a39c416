"""Attention over selected chunks in CUDA: time per call, and bytes read per second.

The attention is Llama-3.1-8B's (32 query and 8 kv heads of 128, rank 160). It goes over random chunks, in ascending
order, of sequences on shuffled pages. Each call of a CUDA graph selects other chunks, so that no call finds its bytes
in the L2 cache. Counted bytes: latents and values once per selected token and kv head, the basis once per sequence, and
the selection.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

from benchmarks.ops.timing import Row, against_floor, arena, bench, microseconds, selected_by_turbo
from shadowkv.kvcache.codecs.latents import DenseLatents, Int4Latents
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cuda, cuda_sm90, reference
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource, LatentKeys, ValueSource
from shadowkv.ops.codec import CodecId, LatentCodec
from shadowkv.ops.page import PAGE

HEADS, GROUP, DIM, RANK = 8, 4, 128, 160
COLD = 200 << 20
"""Minimum number of bytes that the calls of a graph read in total. The L2 cache has 50 MiB."""

Case = tuple[int, int, int, int, str, str]
OF_TURBO = ((63, 61440), (37, 124928), (1, 61440), (1, 124928), (15, 249856))
"""Rows and tokens of decode steps with the default policy."""
CASES: list[Case] = [  # rows, tokens, selected, chunk, keys, values
    *(
        (batch, length, selected_by_turbo(length), 1, "int4", values)
        for values in ("4-bit", "3-bit")
        for batch, length in OF_TURBO
    ),
    (63, 61440, selected_by_turbo(61440), 1, "int4", "2-bit"),
    *((48, 61440, 1024, chunk, "int4", "4-bit") for chunk in (8, 2)),
    (48, 61440, 1024, 8, "bf16", "bf16"),
]

LATENTS: dict[str, LatentCodec] = {"int4": Int4Latents(), "bf16": DenseLatents()}

WIDTHS = {"4-bit": 4, "3-bit": 3, "2-bit": 2, "bf16": 16}
"""Bits per dimension of a value."""

Call = tuple[torch.Tensor, KeySource, ValueSource, torch.Tensor]


def problem(batch: int, length: int, budget: int, chunk: int, keys: str, values: str) -> list[Call]:
    """Returns the arguments of several calls over the same pages."""
    chunks, device = PAGE // chunk, torch.device("cuda")
    codec = LATENTS[keys]
    row, stored = codec.field(RANK, torch.bfloat16)
    key = Field("latents", (chunks, chunk, row), stored)
    bits, coded = WIDTHS[values], values != "bf16"
    width, dtype = (DIM * bits // 8, torch.uint8) if coded else (DIM, torch.bfloat16)
    fields = [
        key,
        Field("values", (HEADS, chunks, chunk, width), dtype),
        Field("scale", (HEADS, PAGE, 1), torch.float16),
    ]
    views, pages = arena(fields, batch, -(-length // PAGE))
    view = {name: layers[0] for name, layers in views.items()}
    for part in pages.flatten().split(4096):
        view["scale"][part] = torch.rand(len(part), HEADS, PAGE, 1, device=device).half()
        for name in ("latents", "values"):
            if view[name].dtype == torch.bfloat16:
                view[name][part] = torch.randn(len(part), *view[name].shape[1:], device=device).bfloat16()
    basis = torch.randn(batch, RANK, HEADS, DIM, device=device) / RANK**0.5
    if codec.largest:  # random codes have a standard deviation of the largest code / 3**0.5
        basis *= (3**0.5 / codec.largest_codes(RANK, device))[:, None, None]
    mean = torch.randn(batch, HEADS, DIM, device=device)
    rotary = RotaryTables(RopeConfig(DIM, theta=500000.0), length, device)
    states = torch.randperm(batch, device=device)
    first, state = torch.zeros_like(states), (basis.bfloat16(), mean.bfloat16())
    k = LatentKeys(view["latents"], codec, *state, states, pages, first, rotary)
    v: ValueSource = DenseRows(view["values"], pages)
    if coded:
        rotation = torch.linalg.qr(torch.randn(DIM, DIM, device=device))[0].contiguous()
        v = CodedRows(view["values"], view["scale"], ROTATED_ROWS[bits], DIM, rotation, pages)
    q = torch.randn(batch, HEADS * GROUP, DIM, device=device).bfloat16()
    calls = max(4, -(-COLD // nbytes(batch, budget, chunk, keys, values)))
    selections = (
        torch.rand(batch, HEADS, length // chunk, device=device).topk(budget // chunk)[1].sort(-1)[0]
        for _ in range(calls)
    )
    return [(q, k, v, selected) for selected in selections]


def nbytes(batch: int, budget: int, chunk: int, keys: str, values: str) -> int:
    """Returns the number of bytes that a call has to read."""
    row, dtype = LATENTS[keys].field(RANK, torch.bfloat16)
    token = row * dtype.itemsize + DIM * WIDTHS[values] // 8 + (0 if values == "bf16" else 2)
    return batch * HEADS * (budget * token + budget // chunk * 8 + RANK * DIM * 2)


def backend_of(call: Call) -> ModuleType:
    """Returns the backend that the engine would choose for this call on this GPU."""
    latents = isinstance(call[1], LatentKeys) and call[1].codec.id == CodecId.LATENT_INT4
    return cuda_sm90 if latents and isinstance(call[2], CodedRows) and not cuda_sm90.missing() else cuda


def check(call: Call) -> None:
    """Ends the program if the kernel's error in the first row is larger than rounding explains."""
    q, k, v, selected = call
    out, lse = backend_of(call).attend_selected(*call)
    assert isinstance(k, LatentKeys)
    mean = None if k.mean is None else k.mean.float()
    latents = k.latents if k.codec.largest else k.latents[k.pages[0]].float()
    pages = k.pages if k.codec.largest else torch.arange(k.pages.shape[1], device=q.device)[None]
    wide = replace(
        k, latents=latents, basis=k.basis.float(), mean=mean, states=k.states[:1], pages=pages[:1], first=k.first[:1]
    )
    near = DenseRows(v.rows, v.pages[:1]) if isinstance(v, DenseRows) else v
    if isinstance(near, CodedRows):
        near = replace(near, pages=near.pages[:1])
    exact = reference.attend_selected(q[:1].float(), wide, near, selected[:1])
    for name, own, expected in zip(("out", "lse"), (out, lse), exact):
        error = (own[:1].float() - expected).abs().max().item()
        allowed = 2e-2 * expected.abs().max().item()
        if not error <= allowed:
            raise SystemExit(f"{name} is off by {error:.2g}, allowed {allowed:.2g}")


@bench(CASES, lambda: not cuda.missing())
def attend_selected(case: Case) -> list[Row]:
    """One row of the table."""
    batch, length, budget, chunk, keys, values = case
    calls = problem(*case)
    check(calls[0])
    time = microseconds([partial(backend_of(call).attend_selected, *call) for call in calls])
    row: Row = {
        "rows": batch, "tokens": length, "selected": budget, "chunk": chunk, "keys": keys, "values": values,
    }  # fmt: skip
    return [row | against_floor(nbytes(batch, budget, chunk, keys, values), time)]
