"""Products with rows of quantized numbers in the library's layout, against those of the numbers in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_quantized_groups import FORMS, random_rows
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.quantized.blocks import BLOCKS, BlockForm
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows, empty_rows
from shadowkv.ops.quantized_matmul import humming, reference
from shadowkv.ops.quantized_matmul.reference import dequantize_rows

if reasons := humming.missing():
    pytest.skip("; ".join(reasons), allow_module_level=True)

DEVICE = torch.device("cuda:0")
ALL = {
    **FORMS,
    **BLOCKS,
    "large groups": GroupForm("int4", 256, torch.float16),
    "zeros of 16": FORMS["int4, zero points"],
}
SIZES = [(264, 72), (1536, 392)]
"""K and N, which are not multiples of the stored sizes."""
TOKENS = [1, 2, 7, 16, 33, 256, 2048]
FEW = (8, 48, 256)
"""Batches that kernels are tuned for: fewer are compiled than an engine needs."""


def drawn(name: str, rows: int, columns: int, spikes: bool) -> QuantizedRows:
    form = ALL[name]
    if isinstance(form, GroupForm):
        made = random_rows(form, rows, columns, spikes)
        if form.element == "e4m3":  # the largest codes may be NaN
            made.tensors[0].copy_((40 * torch.randn(rows, columns)).clamp(-400, 400))
        if name == "zeros of 16":
            made.tensors[2].fill_(16)
        return made.to(DEVICE)
    return blocks(form, rows, columns, spikes).to(DEVICE)


def blocks(form: BlockForm, rows: int, columns: int, spikes: bool) -> QuantizedRows:
    """Random blocks with scales around 0.01. One block of a row has scale 0, and with ``spikes`` another has larger
    scales."""
    made = QuantizedRows(empty_rows(form, rows, columns, torch.device("cpu")), form)
    per_block = made.tensors[0].view(-1, form.bytes)
    per_block.random_()
    places = {"Q6_K": [208], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(form.name, [0])
    for place in places:
        scales = (0.01 * (0.5 + torch.rand(len(per_block)))).half()
        if spikes:
            scales[::17] *= 50
        if place == 0 or form.name == "Q6_K":
            scales[5::11] = 0
        per_block[:, place : place + 2] = scales.view(-1, 1).view(torch.uint8)
    return made


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(humming, "BATCHES", FEW)
        humming.compile_kernels(
            humming.pack_rows(drawn(name, n, k, False)) for k, n in SIZES for name in ALL if fits(name, k)
        )
        yield


def fits(name: str, columns: int) -> bool:
    form = ALL[name]
    return not (isinstance(form, BlockForm) and columns % form.values)


def poisoned(tokens: int, rows: int) -> None:
    """Frees memory that holds NaN, which the next result of this size probably gets."""
    for _ in range(4):
        torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16, device=DEVICE)


def check(got: Tensor, x: Tensor, numbers: Tensor) -> None:
    """Compares with a product of bfloat16 numbers, as ``close``."""
    exact = x.double() @ numbers.double().T
    close((got.double() - exact).abs(), (F.linear(x, numbers.bfloat16()).double() - exact).abs(), exact)


def close(error: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Checks errors against those of products of bfloat16 numbers.

    There are up to ten roundings more. A row's factor or scale is rounded to bfloat16, and up to ten thread blocks
    share a tile of the result and add their parts in bfloat16. The largest error is within twice theirs, plus nine
    roundings of the largest result. The norm is within three times theirs, plus √10 roundings of at most a 256th part,
    since roundings go up as often as down.
    """
    assert error.isfinite().all()
    assert error.amax() <= 2 * plain.amax() + 9 * 2**-9 * exact.abs().amax(), (error.amax(), plain.amax())
    assert error.norm() <= 3 * plain.norm() + 10**0.5 * 2**-8 * exact.norm(), (error.norm(), plain.norm())


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_the_numbers(seed: int, name: str, columns: int, rows: int, spikes: bool) -> None:
    if not fits(name, columns):
        pytest.skip("rows have whole blocks")
    stored = drawn(name, rows, columns, spikes)
    packed, numbers = humming.pack_rows(stored), dequantize_rows(stored)
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
        if spikes:
            x[:, 3] = 300
        poisoned(tokens, rows)
        got = humming.quantized_matmul(x, packed)
        assert (got.shape, got.dtype) == ((tokens, rows), torch.bfloat16)
        check(got, x, numbers)
    assert humming.quantized_matmul(x[:0], packed).shape == (0, rows)
    torch.testing.assert_close(
        reference.quantized_matmul(x, stored),
        F.linear(x, numbers.bfloat16()),
        rtol=2e-2,
        atol=2e-2 * float(got.abs().amax()),
    )


@pytest.mark.parametrize("name", ["int4", "int4, zero points", "nvfp4", "Q4_K", "Q6_K"])
def test_products_in_a_graph_are_those_outside(seed: int, name: str) -> None:
    columns, rows = SIZES[1]
    packed = humming.pack_rows(drawn(name, rows, columns, False))
    for tokens in (1, 33, 256):
        x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = humming.quantized_matmul(x, packed)
        for _ in range(3):
            x.copy_(torch.randn(tokens, columns, device=DEVICE))
            out.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(
                out, humming.quantized_matmul(x, packed), rtol=2e-2, atol=2e-2 * float(out.abs().amax())
            )
            assert out.isfinite().all()


def test_many_products_one_after_the_other_leave_their_locks_open(seed: int) -> None:
    columns, rows = SIZES[1]
    packed = humming.pack_rows(drawn("int4", rows, columns, False))
    x = torch.randn(16, columns, device=DEVICE).bfloat16()
    first = humming.quantized_matmul(x, packed)
    for _ in range(200):
        again = humming.quantized_matmul(x, packed)
    torch.testing.assert_close(again, first, rtol=2e-2, atol=2e-2 * float(first.abs().amax()))
    assert not packed.tensors["locks"].any()


def test_bad_activations_are_refused(seed: int) -> None:
    columns, rows = SIZES[1]
    packed = humming.pack_rows(drawn("int4", rows, columns, False))
    with pytest.raises(ValueError, match=f"K = {columns} in bfloat16"):
        humming.quantized_matmul(torch.zeros(1, columns, device=DEVICE), packed)
    with pytest.raises(ValueError, match=f"K = {columns} in bfloat16"):
        humming.quantized_matmul(torch.zeros(1, columns - 8, device=DEVICE).bfloat16(), packed)
