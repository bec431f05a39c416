"""Products of 8-bit floats on tensor cores, and projections that run on them, eager and in a CUDA graph."""

import pytest
import torch

from shadowkv.layers.linear import FP8Linear
from shadowkv.models.checkpoints.stored_weight import fill_fp8
from shadowkv.models.loader import unfit
from shadowkv.ops.activation_rows import reference as quantize_reference
from shadowkv.ops.registry import Ops
from shadowkv.ops.scaled_matmul import cuda, reference

if cuda.missing():
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

DEVICE = torch.device("cuda")
ROWS = [1, 3, 76, 8192]
SIZES = [(4096, 6144), (14336, 4096), (64, 48)]
"""K and N: Llama-3.1-8B's joined q, k, v, its largest K, and a small one that is no power of two."""


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_the_references(seed: int, rows: int, k: int, n: int, with_bias: bool) -> None:
    codes, scale = quantize_reference.quantize_tokens(torch.randn(rows, k, device=DEVICE))
    weight, weight_scale = quantize_reference.quantize_tokens(torch.randn(n, k, device=DEVICE) * k**-0.5)
    bias = torch.randn(n, device=DEVICE).bfloat16() if with_bias else None
    wanted = reference.scaled_matmul(codes, scale, weight, weight_scale, bias, torch.float32)
    got = cuda.scaled_matmul(codes, scale, weight, weight_scale, bias, torch.bfloat16)
    assert got.shape == (rows, n) and got.dtype == torch.bfloat16
    # Numbers are around 1. Each of a sum's K / 32 steps is cut to about 14 bits; codes alone are off by 0.026.
    torch.testing.assert_close(got.float(), wanted, rtol=4e-2, atol=4e-2)
    assert (got.float() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("rows", ROWS)
def test_codes_are_the_references_bit_for_bit(seed: int, rows: int) -> None:
    x = torch.randn(rows, 14336, device=DEVICE).bfloat16()
    x[rows // 2, 7] = 900
    x[0] *= 1e-4
    got, wanted = Ops(DEVICE).quantize_tokens(x), quantize_reference.quantize_tokens(x)
    assert torch.equal(got[0].float(), wanted[0].float()) and torch.equal(got[1], wanted[1])


def projection(k: int, n: int, bias: bool, overrides: dict[str, str] | None = None) -> FP8Linear:
    generator = torch.Generator(DEVICE).manual_seed(0)
    ops = Ops(DEVICE, overrides=overrides)
    linear = FP8Linear(k, n, bias=bias, dtype=torch.bfloat16, device=DEVICE)
    linear.ops = ops
    fill_fp8(linear.weight, linear.weight_scale, torch.randn(n, k, generator=generator, device=DEVICE) * k**-0.5)
    if linear.bias is not None:
        linear.bias.normal_(generator=generator)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_run_of_rows_is_part_of_the_whole(seed: int, rows: int, bias: bool) -> None:
    linear, x = projection(4096, 6144, bias), torch.randn(rows, 4096, device=DEVICE).bfloat16()
    whole = linear(x)
    for start, stop in ((0, 4096), (4096, 6144), (5120, 5136)):
        torch.testing.assert_close(linear.rows(x, start, stop), whole[:, start:stop], rtol=3e-2, atol=3e-2)
    exact = x.float() @ (linear.weight.float() * linear.weight_scale).t() + (linear.bias if bias else 0)
    assert (whole.float() - exact).norm() < 0.05 * exact.norm()  # what activations lose


@pytest.mark.parametrize("rows", ROWS)
def test_in_a_graph_as_without(seed: int, rows: int) -> None:
    linear, x = projection(4096, 6144, True), torch.randn(rows, 4096, device=DEVICE).bfloat16()
    linear(x)  # compiles, and makes handles and workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole, part = linear(x), linear.rows(x, 4096, 6144)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(whole, linear(x)) and torch.equal(part, linear.rows(x, 4096, 6144))


def test_on_a_gpu_as_by_the_references(seed: int) -> None:
    names = ("quantize_tokens", "scaled_matmul")
    fast, slow = projection(4096, 6144, True), projection(4096, 6144, True, dict.fromkeys(names, "reference"))
    assert [fast.ops.backends[name] for name in names] == ["triton", "cuda"]
    x = torch.randn(76, 4096, device=DEVICE).bfloat16()
    torch.testing.assert_close(fast(x), slow(x), rtol=3e-2, atol=3e-2)


def test_this_gpu_runs_fp8_in_bfloat16_alone() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert unfit(device, torch.bfloat16) is None
    assert unfit(device, torch.float16) == "fp8 goes with dtype='bfloat16', not float16"
