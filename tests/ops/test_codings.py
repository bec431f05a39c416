"""Rows that were converted to a coding have the same numbers as before."""

from __future__ import annotations

import pytest
import torch
from test_quantized_blocks import random_blocks, rows_of
from test_quantized_groups import FORMS, random_rows
from torch import Tensor

from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.codings import Coded, Coding, code, coding
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.reference import dequantize_rows

OTHERS = {
    "groups of 256": GroupForm("int4", 256, torch.float16),
    "groups of 96": GroupForm("int8", 96, torch.float16, zeros=True),
}


def numbers(coded: Coded, found: Coding) -> Tensor:
    """The numbers of rows in a coding, float64 [N, K]."""
    codes = coded.codes
    if found.element in ("e2m1", "e4m3"):
        form = GroupForm(found.element, None, torch.float32)
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if found.bits == 4 else codes.view(torch.float8_e4m3fn)
        values = form.unpack((packed, torch.ones(len(codes), 1))).double()
    else:
        values = codes.double()
    columns = codes.shape[1]

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.double().repeat_interleave(found.group or columns, 1)[:, :columns]

    if coded.zeros is not None:
        values = values - spread(coded.zeros)
    elif found.element.startswith("uint"):
        values = values - 2 ** (found.bits - 1)
    values = values * spread(coded.scales)
    return values if coded.factor is None else values * coded.factor.double()


def check(rows: QuantizedRows) -> Coding:
    found = coding(rows.form)
    assert found is not None
    coded = code(rows)
    assert coded.codes.dtype == torch.uint8 and int(coded.codes.amax()) < 2**found.bits
    assert (coded.zeros is None, coded.factor is None) == (not found.zeros, not found.factor)
    expected = dequantize_rows(rows).double()
    torch.testing.assert_close(numbers(coded, found), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().amax()))
    return found


@pytest.mark.parametrize("columns", [128, 272])
@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_codes_of_groups(seed: int, name: str, columns: int) -> None:
    form = (FORMS | OTHERS)[name]
    found = check(random_rows(form, 5, columns, spikes=True))
    assert (found.bits, found.zeros) == (form.bits, form.zeros)
    assert found.group == {"groups of 256": 128, "groups of 96": 32}.get(name, form.group)


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_of_blocks(seed: int, name: str) -> None:
    found = check(rows_of(random_blocks(name, 40, 512), name))
    assert found.bits == BLOCKS[name].bits


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q5_K"])
def test_groups_without_a_scale_have_their_minimum(seed: int, name: str) -> None:
    blocks = random_blocks(name, 20, 512)
    blocks.view(-1, BLOCKS[name].bytes)[::3, :2] = 0
    blocks.view(-1, BLOCKS[name].bytes)[1::5] = 0
    check(rows_of(blocks, name))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_zero_points_are_counted_from_the_nearer_end(seed: int, name: str) -> None:
    """Numbers around zero have zero points among their codes: in bfloat16 these are off by less than one in 2^9 of half
    the codes' range."""
    form = BLOCKS[name]
    blocks = random_blocks(name, 30, 512)
    per_block = blocks.view(-1, form.bytes)
    per_block[:, :2] = per_block[:, 2:4] = torch.tensor([0.01]).half().view(torch.uint8)
    per_block[:, 4:16] = torch.randint(16, 32, per_block[:, 4:16].shape).to(torch.uint8)
    coded = code(rows_of(blocks, name))
    assert coded.zeros is not None
    within = (coded.zeros >= 0) & (coded.zeros <= 2**form.bits - 1)
    assert within.any() and coded.zeros[within].amax() <= (2**form.bits - 1) / 2
    check(rows_of(blocks, name))


def test_groups_of_few_columns_have_no_coding() -> None:
    assert coding(GroupForm("int4", 8, torch.float16)) is None
    assert coding(GroupForm("int4", 24, torch.float16)) is None
