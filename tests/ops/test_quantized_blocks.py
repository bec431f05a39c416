"""Rows in blocks against ggml's own library, and products with them against products with plain numbers."""

import gguf
import numpy as np
import pytest
import torch
from devices import by_threads
from gguf.quants import dequantize
from precision import integer_step
from torch import Tensor

from shadowkv.ops.extension import cpu_missing
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.cpu import FORMATS
from shadowkv.ops.registry import Ops

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of the float16 numbers in a block."""

needs_extension = pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")


def random_blocks(form: str, rows: int, columns: int) -> Tensor:
    """Rows of random codes with scales of about 0.01, of either sign."""
    known = BLOCKS[form]
    blocks = torch.randint(0, 256, (rows, columns // known.values, known.bytes), dtype=torch.uint8)
    for start in HALVES[form]:
        scale = 0.01 * torch.randn(*blocks.shape[:2], 1)
        blocks[..., start : start + 2] = scale.half().view(torch.uint8)
    return blocks.flatten(1)


def rows_of(blocks: Tensor, form: str) -> QuantizedRows:
    return QuantizedRows((blocks,), BLOCKS[form])


def exact(blocks: Tensor, form: str) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks.numpy(), gguf.GGMLQuantizationType[form]))


def assert_products(ops: Ops, form: str, x: Tensor, blocks: Tensor) -> None:
    """Checks that the error of each product is within the bound of its terms."""
    found, weight = ops.quantized_matmul(x, rows_of(blocks, form)), exact(blocks, form).double()
    assert found.dtype == x.dtype
    # What adding in any order may lose, and weights in the tokens' dtype, is in proportion to the magnitudes added.
    allowed = max(1e-6, torch.finfo(x.dtype).eps) * (x.double().abs() @ weight.T.abs())
    if ops.backends["quantized_matmul"] == "cpu" and form in FORMATS:
        largest = x.double().unflatten(1, (-1, 32)).abs().amax(2)
        magnitudes = weight.unflatten(1, (-1, 32)).abs().sum(2)
        allowed += integer_step() * (largest @ magnitudes.T)
    error = (found - x.double() @ weight.T).abs()
    assert (error <= allowed).all()


def tokens_of(count: int, columns: int) -> Tensor:
    """Random activations, some of which are much larger than their neighbours."""
    x = torch.randn(count, columns)
    x[:, 3] *= 100
    return x


@pytest.mark.parametrize("form", BLOCKS)
def test_any_bytes_are_what_ggml_makes_of_them(seed: int, ops: Ops, form: str) -> None:
    known = BLOCKS[form]
    blocks = torch.randint(0, 256, (400, 3 * known.bytes), dtype=torch.uint8)  # scales of any kind
    for row, scale in enumerate((0.0, -0.0, 6e-8, -6e-8, 65504.0, torch.inf, -torch.inf, torch.nan)):
        for start in HALVES[form]:
            blocks[row, start : start + 2] = torch.tensor([scale]).half().view(torch.uint8)
    blocks[8], blocks[9] = 0, 255
    found = ops.dequantize_rows(rows_of(blocks, form))
    assert (found.shape, found.dtype) == ((400, 3 * known.values), torch.float32)
    torch.testing.assert_close(found, exact(blocks, form), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 7, 13, 97])
@pytest.mark.parametrize("form", BLOCKS)
def test_products_of_shapes_that_fill_no_tile(seed: int, ops: Ops, form: str, tokens: int) -> None:
    for rows, columns in (
        (1, BLOCKS[form].values),
        (67, 3 * BLOCKS[form].values),
        (5, 9 * BLOCKS[form].values),
        (6, 2304),
    ):
        assert_products(ops, form, tokens_of(tokens, columns), random_blocks(form, rows, columns))


def test_rows_of_a_matrix_and_other_dtypes(seed: int, ops: Ops) -> None:
    blocks, x = random_blocks("Q4_K", 700, 2048), torch.randn(200, 2048)
    whole = ops.quantized_matmul(x, rows_of(blocks, "Q4_K"))
    part = ops.quantized_matmul(x, rows_of(blocks[600:650], "Q4_K"))
    torch.testing.assert_close(part, whole[:, 600:650], rtol=1e-5, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        for few in (x[:3], x):
            assert_products(ops, "Q4_K", few.to(dtype), blocks)


def test_what_is_not_finite_stays_in_its_row_and_token(seed: int, ops: Ops) -> None:
    blocks, x = random_blocks("Q8_0", 9, 64), torch.randn(3, 64)
    blocks[4, :2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    x[1, 5] = torch.inf
    broken = torch.zeros(3, 9, dtype=torch.bool)
    broken[1], broken[:, 4] = True, True
    assert torch.equal(~ops.quantized_matmul(x, rows_of(blocks, "Q8_0")).isfinite(), broken)


@needs_extension
@pytest.mark.parametrize(("tokens", "batches"), [(9, (1, 4)), (45, (15,)), (205, (1, 5, 13))])
@pytest.mark.parametrize("form", FORMATS)
def test_neither_threads_nor_neighbours_change_a_bit(
    seed: int, form: str, tokens: int, batches: tuple[int, ...]
) -> None:
    if tokens == 205 and torch.ops.shadowkv.cpu_isa() != "avx512":
        pytest.skip("without VNNI few tokens are integers and many are floats")
    blocks, matmul = random_blocks(form, 301, 1280), torch.ops.shadowkv.quantized_matmul
    x = torch.randn(tokens, 1280)
    results = by_threads(lambda: matmul(x, blocks, form))
    results += [torch.cat([matmul(some, blocks, form) for some in x.split(batch)]) for batch in batches]
    results += [torch.cat([matmul(x, part, form) for part in blocks.split(7)], 1)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_sizes_that_do_not_fit_are_named(ops: Ops) -> None:
    blocks = random_blocks("Q4_0", 3, 64)
    with pytest.raises((ValueError, RuntimeError), match=r"x has shape \S+ ?32\S+ rows of \w+ have 64 numbers"):
        ops.quantized_matmul(torch.zeros(2, 32), rows_of(blocks, "Q4_0"))
    for call in (ops.dequantize_rows, lambda rows: ops.quantized_matmul(torch.zeros(2, 64), rows)):
        with pytest.raises((ValueError, RuntimeError), match="blocks of Q4_0 have 18 bytes, and rows have 35"):
            call(rows_of(blocks[:, :-1], "Q4_0"))


@needs_extension
def test_the_binding_refuses_other_arguments() -> None:
    ops, blocks = torch.ops.shadowkv, random_blocks("Q4_0", 3, 64)
    with pytest.raises(RuntimeError, match="no format of blocks is called Q5_0"):
        ops.dequantize_blocks(blocks, "Q5_0")
    with pytest.raises(RuntimeError, match="blocks is Char, not Byte"):
        ops.dequantize_blocks(blocks.view(torch.int8), "Q4_0")
    with pytest.raises(RuntimeError, match="rows have 18 in steps of 2"):
        ops.dequantize_blocks(blocks[:, ::2], "Q4_0")
    with pytest.raises(RuntimeError, match="x is Double, not Float"):
        ops.quantized_matmul(torch.zeros(2, 64, dtype=torch.float64), blocks, "Q4_0")


@needs_extension
def test_the_fakes_have_the_shapes_of_the_ops() -> None:
    ops, blocks = torch.ops.shadowkv, random_blocks("Q4_K", 3, 256)
    for op, args in (
        (ops.quantized_matmul, (torch.randn(2, 256), blocks, "Q4_K")),
        (ops.dequantize_blocks, (blocks, "Q4_K")),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
