"""Fused attention with its log-sum-exp on a GPU, few queries and many, against the reference in float64."""

import math

import pytest
import torch
from precision import assert_close_like_lowp

from shadowkv.ops.attend_blocks import cuda_sm90 as hopper
from shadowkv.ops.block_attention import cuda as flash_block
from shadowkv.ops.block_attention import cuda_sm90_flash as hopper_block
from shadowkv.ops.block_attention import reference
from shadowkv.ops.causal_attention import cuda as flash_causal
from shadowkv.ops.causal_attention import cuda_sm90_flash as hopper_causal
from shadowkv.ops.causal_attention import reference as causal_reference
from shadowkv.ops.fused_attention import MIN_TILES

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

BACKENDS = [(flash_block, flash_causal)]
if not hopper.missing():
    BACKENDS.append((hopper_block, hopper_causal))
NAMES = ["cuda", "cuda_sm90_flash"][: len(BACKENDS)]
SHAPES = [(2, 4, 128), (1, 7, 128), (2, 1, 64), (2, 3, 96)]


def case(n: int, m: int, heads: int, group: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries [n, H_q, d], keys and values [m, H, d], parts of larger tensors with NaN behind them."""
    k, v = torch.full((2, m + 130, heads, dim), math.nan, device="cuda", dtype=dtype)[:, :m]
    for x in (k, v):
        x.copy_(torch.randn(m, heads, dim, device="cuda"))
    return [torch.randn(n, heads * group, dim, device="cuda").to(dtype), k, v]


@pytest.fixture(params=[MIN_TILES, 1], ids=["by size", "ours"], autouse=True)
def fewest_tiles(request, monkeypatch):
    """As it is on a Hopper, and always our kernel there."""
    monkeypatch.setattr("shadowkv.ops.fused_attention.MIN_TILES", request.param)
    return request.param


def skip_what_is_not_supported(backend, dim: int) -> None:
    if backend in (hopper_block, hopper_causal) and dim not in hopper.DIMS:
        pytest.skip("not a head dim of the kernel for Hopper")


@pytest.mark.parametrize("backend", [block for block, _ in BACKENDS], ids=NAMES)
@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "m", "masked"),
    [
        (1, 1, False), (37, 300, False), (64, 64, True), (37, 300, True), (1, 300, True), (300, 37, False),
        (4096, 4096, False), (4096, 4096, True), (4200, 4200, True), (1700, 10240, False), (1700, 10300, False),
        (3000, 6000, True), (130, 128, False),
    ],
)  # fmt: skip
def test_a_block(backend, n: int, m: int, masked: bool, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    skip_what_is_not_supported(backend, dim)
    q, k, v = case(n, m, heads, group, dim, dtype)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = backend.block_attention(q, k, v, masked)
    exact, exact_lse = reference.block_attention(q.double(), k.double(), v.double(), masked)
    low, _ = reference.block_attention(q, k, v, masked)
    assert out.dtype == dtype
    assert_close_like_lowp(out, exact, low)
    torch.testing.assert_close(lse, exact_lse.float(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", [causal for _, causal in BACKENDS], ids=NAMES)
@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (4500, 4500), (1000, 20000), (3000, 9000), (512, 75000)])
def test_large_blocks_of_a_prompt(backend, n: int, m: int, heads: int, group: int, dim: int) -> None:
    skip_what_is_not_supported(backend, dim)
    q, k, v = case(n, m, heads, group, dim, torch.bfloat16)
    exact = causal_reference.causal_attention(q.double(), k.double(), v.double())
    assert_close_like_lowp(backend.causal_attention(q, k, v), exact, causal_reference.causal_attention(q, k, v))
