"""Products of sorted rows with experts' matrices in the library's layout, against those of the numbers in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from test_cuda_quantized_matmul import ALL, DEVICE, close, drawn, fits, poisoned
from torch import Tensor
from torch.nn import functional as F

from shadowkv.layers.quantized_matrix import QuantizedMatrix, RowBlock
from shadowkv.models.filling import fill_random
from shadowkv.ops.grouped_matmul.reference import experts_rows
from shadowkv.ops.grouped_quantized_matmul.humming import grouped_quantized_matmul
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul import humming
from shadowkv.ops.quantized_matmul.reference import dequantize_rows

Sizes = tuple[int, int, int]
SMALL: Sizes = (8, 264, 272)
"""E, N and K. N and K are not multiples of the stored sizes."""
LARGE: list[tuple[str, Sizes]] = [
    *(
        (form, sizes)
        for form in ("int4-g128", "mxfp4", "nvfp4", "fp8")
        for sizes in ((128, 1536, 2048), (128, 2048, 768))
    ),
    *(("mxfp4", sizes) for sizes in ((32, 5760, 2880), (32, 2880, 2880), (32, 2880, 720))),
]
"""Sizes of Qwen3-30B-A3B, gpt-oss-20b, and one of four ranks of gpt-oss-20b."""
FORMS = {**ALL, "int4-g128": GroupForm("int4", 128, torch.float16)}
CASES = [*((name, SMALL) for name in ALL if fits(name, SMALL[2])), *LARGE]
ROWS = [1, 3, 8, 64, 65, 700, 4096]


@cache
def packed(name: str, sizes: Sizes, spikes: bool) -> tuple[QuantizedRows, humming.PackedExperts]:
    experts, rows, columns = sizes
    form = FORMS[name]
    if isinstance(form, GroupForm) and sizes != SMALL:
        stored = random_on_the_gpu(form, experts * rows, columns, spikes)
    else:
        stored = drawn(name, experts * rows, columns, spikes)
    return stored, humming.pack_experts(stored, experts)


def random_on_the_gpu(form: GroupForm, rows: int, columns: int, spikes: bool) -> QuantizedRows:
    """Random rows. With ``spikes``, groups of a few rows have larger scales."""
    matrix = QuantizedMatrix(columns, [RowBlock(rows, form)], dtype=torch.bfloat16, device=DEVICE)
    fill_random(matrix, torch.Generator(DEVICE).manual_seed(rows))
    (stored,) = matrix.stored(0, rows)
    assert isinstance(stored, QuantizedRows)
    if spikes:
        scales = stored.tensors[1]
        larger = scales[::97, -1].float() * 32
        scales[::97, -1] = larger.to(scales.dtype)
    return stored


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(humming, "FEW_OF_EXPERTS", (64,))
        patch.setattr(humming, "OF_EACH", (16,))
        humming.compile_kernels(packed(name, sizes, False)[1] for name, sizes in CASES)
        yield
        packed.cache_clear()


def routed(rows: int, experts: int, behind: int, seed: int) -> Tensor:
    """Random offsets of ``rows`` rows. The last ``behind`` rows belong to no expert, and some experts have no rows."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(experts, generator=generator) ** 2
    chances[:: 3 if experts > 3 else experts] = 0
    numbers = torch.multinomial(chances, rows - behind, True, generator=generator) if rows > behind else torch.empty(0)
    counts = numbers.long().bincount(minlength=experts)
    return torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(DEVICE)


def check(x: Tensor, stored: QuantizedRows, got: Tensor, offsets: Tensor) -> None:
    """Compares with products of bfloat16 numbers, as ``close``."""
    each = got.shape[1]
    exact, plain = (torch.zeros(got.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for expert, rows in experts_rows(offsets):
        numbers = dequantize_rows(stored[expert * each : (expert + 1) * each])
        exact[rows] = x[rows].double() @ numbers.double().T
        plain[rows] = F.linear(x[rows], numbers.bfloat16()).double()
    used = int(offsets[-1])
    close((got[:used].double() - exact[:used]).abs(), (plain[:used] - exact[:used]).abs(), exact)


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_products_are_those_of_the_numbers(seed: int, name: str, sizes: Sizes, spikes: bool) -> None:
    experts, out, columns = sizes
    stored, weight = packed(name, sizes, spikes)
    for rows in ROWS:
        offsets = routed(rows, experts, min(rows - 1, 5), rows)
        x = torch.randn(rows, columns, device=DEVICE).bfloat16()
        if spikes:
            x[:, 3] = 300
        poisoned(rows, out)
        got = grouped_quantized_matmul(x, weight, offsets)
        assert (got.shape, got.dtype) == ((rows, out), torch.bfloat16)
        check(x, stored, got, offsets)
    assert grouped_quantized_matmul(x[:0], weight, 0 * offsets).shape == (0, out)


@pytest.mark.parametrize(("name", "sizes"), [("int4", SMALL), *LARGE[:2], ("mxfp4", (32, 5760, 2880))])
def test_rows_of_one_expert_and_of_none(seed: int, name: str, sizes: Sizes) -> None:
    experts, _, columns = sizes
    stored, weight = packed(name, sizes, False)
    x = torch.randn(300, columns, device=DEVICE).bfloat16()
    for expert in (0, experts // 2, experts - 1):
        offsets = torch.zeros(experts + 1, dtype=torch.int32, device=DEVICE)
        offsets[expert + 1 :] = 300
        check(x, stored, grouped_quantized_matmul(x, weight, offsets), offsets)
    grouped_quantized_matmul(x, weight, torch.zeros_like(offsets))
    x[5:] = torch.nan  # of rows behind the experts'
    check(x, stored, grouped_quantized_matmul(x, weight, offsets.clamp_max(5)), offsets.clamp_max(5))


@pytest.mark.parametrize(("name", "sizes"), [("int4", SMALL), ("Q4_1", (8, 264, 256)), *LARGE[:4], *LARGE[-3:]])
def test_a_graph_reads_where_rows_end_when_it_is_replayed(seed: int, name: str, sizes: Sizes) -> None:
    """Offsets are written by the kernel right before the product."""
    experts, _, columns = sizes
    stored, weight = packed(name, sizes, False)
    humming.compile_kernels([weight])
    for rows in (8, 64, 700):
        x, written = torch.randn(rows, columns, device=DEVICE).bfloat16(), routed(rows, experts, 0, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            offsets = written + 0
            out = grouped_quantized_matmul(x, weight, offsets)
        for turn in range(1, 4):
            x.copy_(torch.randn(rows, columns, device=DEVICE))
            written.copy_(routed(rows, experts, turn - 1, turn))
            out.fill_(torch.nan)
            graph.replay()
            check(x, stored, out, written)
    assert not weight.tensors["locks"].any()


def test_many_products_one_after_the_other_leave_their_locks_open(seed: int) -> None:
    stored, weight = packed("int4-g128", (128, 1536, 2048), False)
    x = torch.randn(64, 2048, device=DEVICE).bfloat16()
    for turn in range(60):
        offsets = routed(64, 128, 0, turn)
        got = grouped_quantized_matmul(x, weight, offsets)
    check(x, stored, got, offsets)
    assert not weight.tensors["locks"].any()
