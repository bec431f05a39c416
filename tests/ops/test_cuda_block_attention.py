"""Attention over a block of keys on a GPU against the reference in float64."""

import pytest
import torch
from plain_formulas import SHAPES
from precision import assert_close_like_lowp

from shadowkv.ops.block_attention import cuda, reference

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

MORE_SHAPES = [*SHAPES, (1, 6, 128), (2, 3, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "group", "dim"), MORE_SHAPES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 77), (64, 64), (37, 300), (300, 300), (5, 5000), (700, 1500)])
def test_blocks_of_a_longer_buffer(
    heads: int, group: int, dim: int, n: int, m: int, causal: bool, dtype: torch.dtype
) -> None:
    q = torch.randn(n, heads * group, dim, device="cuda").to(dtype)
    # As blocks and new tokens are strided: heads outside, or inside.
    buffers = torch.full((2, heads, m + 1, dim), torch.nan, device="cuda", dtype=dtype)
    if causal:
        buffers = buffers.transpose(1, 2).contiguous().transpose(1, 2)
    buffers[:, :, :m] = torch.randn(2, heads, m, dim, device="cuda")
    k, v = buffers[:, :, :m]
    out, lse = cuda.block_attention(q, k, v, causal)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    assert lse.dtype == torch.float32
    exact = reference.block_attention(q.double(), k.double(), v.double(), causal)
    low = reference.block_attention(q, k, v, causal)
    assert_close_like_lowp(out, exact[0], low[0])
    assert_close_like_lowp(lse, exact[1], low[1])
