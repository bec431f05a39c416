"""Rows of codes with scales for groups of columns: their numbers, parts of them, and products with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows, empty_rows, row_bytes
from shadowkv.ops.registry import Ops

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FORMS = {
    "int4": GroupForm("int4", 32, torch.float16),
    "int4, zero points": GroupForm("int4", 128, torch.bfloat16, zeros=True),
    "int4, rows": GroupForm("int4", None, torch.float32),
    "int8": GroupForm("int8", 64, torch.float16),
    "int8, zero points": GroupForm("int8", None, torch.float16, zeros=True),
    "fp8": GroupForm("e4m3", 128, torch.float32),
    "fp8, rows": GroupForm("e4m3", None, torch.float32),
    "nvfp4": GroupForm("e2m1", 16, torch.float8_e4m3fn, factor=True),
    "mxfp4": GroupForm("e2m1", 32, torch.float8_e8m0fnu),
}


def random_rows(form: GroupForm, rows: int, columns: int, spikes: bool = False) -> QuantizedRows:
    """Random codes. With ``spikes`` a few scales are a hundred times as large as the others."""
    made = QuantizedRows(empty_rows(form, rows, columns, torch.device("cpu")), form)
    codes, scales, *rest = made.tensors
    codes.copy_((100 * torch.randn(codes.shape)).to(codes.dtype) if form.element == "e4m3" else whole(codes, 256))
    wide = 0.01 * (0.5 + torch.rand(scales.shape))
    if spikes:
        wide[:: max(1, rows // 3), -1] *= 100
    scales.copy_(wide)
    if form.zeros:
        rest[0].copy_(whole(rest[0], 1 << form.bits))
    if form.factor:
        rest[-1].copy_(torch.randn(rest[-1].shape))
    return made


def whole(like: Tensor, stop: int) -> Tensor:
    return torch.randint(0, stop, like.shape).to(like.dtype)


def exact(rows: QuantizedRows) -> Tensor:
    """The numbers of rows, computed one by one in Python, float64."""
    form, (codes, scales, *rest) = rows.form, rows.tensors
    assert isinstance(form, GroupForm)
    columns = codes.shape[1] * 8 // form.bits
    out = torch.empty(len(rows), columns, dtype=torch.float64)
    for i in range(len(rows)):
        for k in range(columns):
            group = 0 if form.group is None else k // form.group
            if form.element == "e4m3":
                number = float(codes[i, k])
            else:
                byte = int(codes[i, k * form.bits // 8])
                code = byte if form.bits == 8 else (byte >> 4 if k % 2 else byte & 15)
                zero = int(rest[0][i, group]) if form.zeros else 1 << (form.bits - 1)
                number = code - zero if form.element != "e2m1" else (-1) ** (code >> 3) * E2M1[code & 7]
            out[i, k] = number * float(scales[i, group]) * (float(rest[-1][i, 0]) if form.factor else 1)
    return out


@pytest.mark.parametrize("columns", [32, 128, 160, 272])
@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_of_codes_scales_and_zero_points(seed: int, ops: Ops, name: str, columns: int) -> None:
    """Of rows with whole groups, with a last one that is cut off, and with less than one."""
    rows = random_rows(FORMS[name], 5, columns)
    found = ops.dequantize_rows(rows)
    assert (found.shape, found.dtype, rows.columns, len(rows)) == ((5, columns), torch.float32, columns, 5)
    torch.testing.assert_close(found.double(), exact(rows), rtol=3e-7, atol=0)
    assert rows.nbytes == 5 * row_bytes(rows.form, columns)
    some = torch.tensor([3, 0, 3])
    assert torch.equal(ops.dequantize_rows(rows[some]), found[some])
    assert torch.equal(ops.dequantize_rows(rows[1:4]), found[1:4])


def test_every_code_of_8_bit_floats_is_pytorchs(ops: Ops) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    found = ops.dequantize_rows(QuantizedRows((codes, torch.ones(1, 1)), FORMS["fp8, rows"]))
    torch.testing.assert_close(found, codes.float(), rtol=0, atol=0, equal_nan=True)
    assert found.isnan().sum() == 2


def test_scales_of_powers_of_two(ops: Ops) -> None:
    exponents = torch.tensor([[1, 100, 127, 254, 255]], dtype=torch.uint8)
    ones = torch.full((1, 80), 0x22, dtype=torch.uint8)  # two of 1.0
    found = ops.dequantize_rows(QuantizedRows((ones, exponents.view(torch.float8_e8m0fnu)), FORMS["mxfp4"]))
    expected = torch.tensor([2.0**-126, 2.0**-27, 1.0, 2.0**127, torch.nan])
    torch.testing.assert_close(found[0, ::32], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("start", "stop"), [(0, 160), (0, 80), (80, 160), (16, 112), (112, 320), (32, 288)])
@pytest.mark.parametrize("name", FORMS)
def test_parts_of_columns_have_the_same_numbers(seed: int, ops: Ops, name: str, start: int, stop: int) -> None:
    """Also where a border is within a group; the end of the row may be."""
    form = FORMS[name]
    rows = random_rows(form, 6, 320)
    part = rows.cut(start, stop)
    assert torch.equal(ops.dequantize_rows(part), ops.dequantize_rows(rows)[:, start:stop])
    assert isinstance(part.form, GroupForm) and part.form == form.cut_form(320, start, stop)
    if form.group is None:
        assert part.form == form
    elif start % form.group == 0 and (stop % form.group == 0 or stop == 320):
        assert part.form.group == form.group


def test_a_part_that_would_share_a_byte_is_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="columns 3 to 64 of 64 cannot be cut out of rows in int4-g32"):
        random_rows(FORMS["int4"], 2, 64).cut(3, 64)


@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize("name", FORMS)
def test_products(seed: int, ops: Ops, name: str, tokens: int) -> None:
    for rows, columns in ((1, 32), (67, 272), (3, 2048)):
        for spikes in (False, True):
            weight, x = random_rows(FORMS[name], rows, columns, spikes), torch.randn(tokens, columns)
            wide = ops.dequantize_rows(weight).double()
            found = ops.quantized_matmul(x, weight)
            assert (found.shape, found.dtype) == ((tokens, rows), torch.float32)
            limit = 1e-6 * (x.double().abs() @ wide.T.abs())
            assert ((found - x.double() @ wide.T).abs() <= limit).all()


@pytest.mark.parametrize("name", FORMS)
def test_in_bfloat16_as_much_is_lost_as_with_plain_weights(seed: int, ops: Ops, name: str) -> None:
    for spikes in (False, True):
        weight, x = random_rows(FORMS[name], 96, 1024, spikes), torch.randn(40, 1024).bfloat16()
        wide = ops.dequantize_rows(weight)
        expected = x.double() @ wide.double().T
        plain = (x @ wide.bfloat16().T - expected).norm()
        found = ops.quantized_matmul(x, weight)
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() <= 1.01 * plain


def test_rows_of_many_tiles(seed: int, ops: Ops) -> None:
    weight, x = random_rows(FORMS["int4"], 1100, 2048), torch.randn(2, 2048)
    wide = ops.dequantize_rows(weight)
    torch.testing.assert_close(ops.quantized_matmul(x, weight), x @ wide.T, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named(ops: Ops) -> None:
    rows = random_rows(FORMS["int4"], 2, 64)
    with pytest.raises(ValueError, match=r"x has shape \(3, 32\), rows of int4-g32 have 64 numbers"):
        ops.quantized_matmul(torch.zeros(3, 32), rows)
    codes, scales = rows.tensors
    for broken in ((codes, scales[:, :1]), (codes, scales.float()), (codes,)):
        with pytest.raises(ValueError, match="int4-g32 of 64 columns are stored as"):
            ops.dequantize_rows(QuantizedRows(broken, rows.form))
    with pytest.raises(ValueError, match="int4-g32 stores two numbers per byte, so rows cannot have 33"):
        rows.form.layout(33)
