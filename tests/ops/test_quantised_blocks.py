"""Rows of quantised blocks are what ggml's own library makes of them, and products with them those of plain numbers."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from shadowkv.ops.extension import cpu_missing
from shadowkv.ops.quantised.blocks import BLOCKS
from shadowkv.ops.quantised.rows import QuantisedRows
from shadowkv.ops.registry import Ops

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 numbers of a block begin."""

needs_extension = pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")


def random_blocks(form: str, rows: int, columns: int) -> Tensor:
    """Rows of any codes whose scales are about 0.01, of either sign."""
    known = BLOCKS[form]
    blocks = torch.randint(0, 256, (rows, columns // known.values, known.bytes), dtype=torch.uint8)
    for start in HALVES[form]:
        scale = 0.01 * torch.randn(*blocks.shape[:2], 1)
        blocks[..., start : start + 2] = scale.half().view(torch.uint8)
    return blocks.flatten(1)


def rows_of(blocks: Tensor, form: str) -> QuantisedRows:
    return QuantisedRows((blocks,), BLOCKS[form])


def exact(blocks: Tensor, form: str) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks.numpy(), gguf.GGMLQuantizationType[form]))


def assert_products(ops: Ops, form: str, rows: int, columns: int, tokens: int) -> None:
    blocks, x = random_blocks(form, rows, columns), torch.randn(tokens, columns)
    weight = exact(blocks, form).double()
    found = ops.quantised_matmul(x, rows_of(blocks, form))
    assert found.dtype == torch.float32
    # What float32 may lose by adding in any order is in proportion to the magnitudes that are added.
    error = (found - x.double() @ weight.T).abs() / (x.double().abs() @ weight.T.abs())
    assert error.max() < 1e-6


@pytest.mark.parametrize("form", BLOCKS)
def test_any_bytes_are_what_ggml_makes_of_them(seed: int, ops: Ops, form: str) -> None:
    known = BLOCKS[form]
    blocks = torch.randint(0, 256, (400, 3 * known.bytes), dtype=torch.uint8)  # scales of any kind
    for row, scale in enumerate((0.0, -0.0, 6e-8, -6e-8, 65504.0, torch.inf, -torch.inf, torch.nan)):
        for start in HALVES[form]:
            blocks[row, start : start + 2] = torch.tensor([scale]).half().view(torch.uint8)
    blocks[8], blocks[9] = 0, 255
    found = ops.dequantise_rows(rows_of(blocks, form))
    assert (found.shape, found.dtype) == ((400, 3 * known.values), torch.float32)
    torch.testing.assert_close(found, exact(blocks, form), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 7, 97])
@pytest.mark.parametrize("form", BLOCKS)
def test_products_of_shapes_that_fill_no_tile(seed: int, ops: Ops, form: str, tokens: int) -> None:
    for rows, blocks in ((1, 1), (67, 3), (5, 9)):
        assert_products(ops, form, rows, blocks * BLOCKS[form].values, tokens)
    assert_products(ops, form, 6, 2304, tokens)


def test_rows_of_a_matrix_and_other_dtypes(seed: int, ops: Ops) -> None:
    blocks, x = random_blocks("Q4_K", 700, 2048), torch.randn(30, 2048)
    whole = ops.quantised_matmul(x, rows_of(blocks, "Q4_K"))
    part = ops.quantised_matmul(x, rows_of(blocks[600:650], "Q4_K"))
    torch.testing.assert_close(part, whole[:, 600:650], rtol=1e-5, atol=1e-4)
    for dtype, error in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        for few in (x[:3], x):
            found = ops.quantised_matmul(few.to(dtype), rows_of(blocks, "Q4_K"))
            assert found.dtype == dtype
            expected = few.to(dtype).double() @ exact(blocks, "Q4_K").double().T
            assert (found - expected).abs().max() < error * expected.abs().max()


def test_what_is_not_finite_stays_in_its_row_and_token(seed: int, ops: Ops) -> None:
    blocks, x = random_blocks("Q8_0", 9, 64), torch.randn(3, 64)
    blocks[4, :2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    x[1, 5] = torch.inf
    broken = torch.zeros(3, 9, dtype=torch.bool)
    broken[1], broken[:, 4] = True, True
    assert torch.equal(~ops.quantised_matmul(x, rows_of(blocks, "Q8_0")).isfinite(), broken)


@needs_extension
def test_neither_threads_nor_neighbours_change_a_bit(seed: int) -> None:
    blocks, x, before = random_blocks("Q6_K", 301, 1280), torch.randn(9, 1280), torch.get_num_threads()
    matmul, results = torch.ops.shadowkv.quantised_matmul, []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(matmul(x, blocks, "Q6_K"))
    finally:
        torch.set_num_threads(before)
    results += [torch.cat([matmul(token[None], blocks, "Q6_K") for token in x])]
    results += [torch.cat([matmul(x, part, "Q6_K") for part in blocks.split(7)], 1)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_sizes_that_do_not_fit_are_named(ops: Ops) -> None:
    blocks = random_blocks("Q4_0", 3, 64)
    with pytest.raises((ValueError, RuntimeError), match=r"x has shape \S+ ?32\S+ rows of \w+ have 64 numbers"):
        ops.quantised_matmul(torch.zeros(2, 32), rows_of(blocks, "Q4_0"))
    for call in (ops.dequantise_rows, lambda rows: ops.quantised_matmul(torch.zeros(2, 64), rows)):
        with pytest.raises((ValueError, RuntimeError), match="blocks of Q4_0 have 18 bytes, and rows have 35"):
            call(rows_of(blocks[:, :-1], "Q4_0"))


@needs_extension
def test_the_binding_refuses_other_arguments() -> None:
    ops, blocks = torch.ops.shadowkv, random_blocks("Q4_0", 3, 64)
    with pytest.raises(RuntimeError, match="no format of blocks is called Q5_0"):
        ops.dequantise_blocks(blocks, "Q5_0")
    with pytest.raises(RuntimeError, match="blocks is Char, not Byte"):
        ops.dequantise_blocks(blocks.view(torch.int8), "Q4_0")
    with pytest.raises(RuntimeError, match="rows have 18 in steps of 2"):
        ops.dequantise_blocks(blocks[:, ::2], "Q4_0")
    with pytest.raises(RuntimeError, match="x is Double, not Float"):
        ops.quantised_matmul(torch.zeros(2, 64, dtype=torch.float64), blocks, "Q4_0")


@needs_extension
def test_the_fakes_have_the_shapes_of_the_ops() -> None:
    ops, blocks = torch.ops.shadowkv, random_blocks("Q4_K", 3, 256)
    for op, args in (
        (ops.quantised_matmul, (torch.randn(2, 256), blocks, "Q4_K")),
        (ops.dequantise_blocks, (blocks, "Q4_K")),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
