"""8-bit floats: codes and scales of rows against the format's own table, products against float64."""

import pytest
import torch

from shadowkv.ops.activation_rows.reference import FP8
from shadowkv.ops.registry import Ops
from shadowkv.ops.scaled_matmul import cuda, reference

TABLE = torch.arange(256, dtype=torch.uint8).view(FP8).double()
NUMBERS = TABLE[TABLE.isfinite()]
"""All numbers of the format: up to 448 in steps of an eighth of a power of two, and of 2^-9 below 2^-6."""


def rows_of_every_kind(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(9, 48)
    x[1] *= torch.exp2(-torch.arange(48.0))  # most of it below the smallest codes
    x[2] = 0
    x[3, 5] = 3e4
    x[4] *= 1e-38
    x[5] = torch.arange(48.0) - 20  # numbers half way between two codes
    x[6] = -448
    x[7, 1:] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_numbers_of_the_format(seed: int, ops: Ops, dtype: torch.dtype) -> None:
    x = rows_of_every_kind(dtype)
    codes, scale = ops.quantize_tokens(x)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (FP8, (9, 48), torch.float32, (9, 1))
    largest = x.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scale.double(), (largest / 448).clamp(min=2.0**-126), rtol=3e-7, atol=0)
    exact = x.double() / scale.double()
    nearest = (exact[..., None] - NUMBERS).abs().amin(-1)
    assert ((codes.double() - exact).abs() <= nearest + 1e-6 * exact.abs()).all()  # the quotient is rounded too
    assert (codes[2].double() == 0).all()
    kept = largest.squeeze(1) > 448 * 2.0**-126
    assert (codes.double().abs().amax(1)[kept] == 448).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_off_by_at_most_a_sixteenth(seed: int, ops: Ops, dtype: torch.dtype) -> None:
    x = rows_of_every_kind(dtype)[[0, 1, 3, 5, 6, 8]]
    codes, scale = ops.quantize_tokens(x)
    error = (codes.double() * scale - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scale.double() * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(seed: int, ops: Ops, bad: float) -> None:
    x = torch.randn(3, 32)
    alone, _ = ops.quantize_tokens(x)
    x[1, 7] = bad
    codes, _ = ops.quantize_tokens(x)
    assert codes[1].double().isnan().any()
    assert torch.equal(codes[::2].view(torch.uint8), alone[::2].view(torch.uint8))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 16, 16), (3, 48, 96), (37, 80, 16)])
def test_products(seed: int, ops: Ops, rows: int, k: int, n: int, with_bias: bool) -> None:
    codes, weight = torch.randn(rows, k).to(FP8), torch.randn(n, k).to(FP8)
    scale, weight_scale = torch.rand(rows, 1), torch.rand(n, 1)
    bias = torch.randn(n) if with_bias else None
    exact = (codes.double() * scale) @ (weight.double() * weight_scale).t() + (0 if bias is None else bias.double())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        found = ops.scaled_matmul(codes, scale, weight, weight_scale, bias, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def scaled_by_row() -> bool:
    """Whether this PyTorch supports a scale per row on a CPU. Some versions support only one for all rows."""
    codes, scale = torch.ones(16, 16).to(FP8), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not scaled_by_row(), reason="this PyTorch's CPU takes one scale for all rows")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 76])
def test_pytorch_takes_what_a_gpu_would_be_given(seed: int, rows: int, with_bias: bool) -> None:
    """The same call on the CPU: which side each scale is for, and that a run of rows needs no copy.

    PyTorch may round the product to bfloat16 before it adds the bias: where the two cancel, the error is measured
    by the larger of them and not by the sum.
    """
    codes, weight = torch.randn(rows, 64).to(FP8), torch.randn(160, 64).to(FP8)
    scale, weight_scale = torch.rand(rows, 1), torch.rand(160, 1)
    bias = torch.randn(160).bfloat16() if with_bias else None
    for run in (slice(0, 160), slice(48, 96)):
        part = None if bias is None else bias[run]
        given = codes, scale, weight[run], weight_scale[run]
        found = cuda.scaled_matmul(*given, part, torch.bfloat16)
        assert found.dtype == torch.bfloat16
        product = reference.scaled_matmul(*given, None, torch.float32)
        exact = product if part is None else product + part.float()
        assert bool(((found.float() - exact).abs() <= 1e-2 * (product.abs() + exact.abs()) + 1e-4).all())


@pytest.mark.parametrize(
    ("dtype", "n", "k", "reason"),
    [
        (torch.float16, 16, 16, "gives torch.bfloat16, not torch.float16"),
        (torch.bfloat16, 24, 16, "needs multiples of 16, not 24 x 16"),
        (torch.bfloat16, 16, 40, "needs multiples of 16, not 16 x 40"),
    ],
)
def test_a_gpu_says_what_it_does_not_take(dtype: torch.dtype, n: int, k: int, reason: str) -> None:
    codes, weight = torch.zeros(2, k).to(FP8), torch.zeros(n, k).to(FP8)
    with pytest.raises(ValueError, match=reason):
        cuda.scaled_matmul(codes, torch.ones(2, 1), weight, torch.ones(n, 1), None, dtype)
