"""Prefill attention on a GPU against the reference in float32."""

import pytest
import torch
from plain_formulas import SHAPES
from precision import assert_close_like_lowp

from shadowkv.ops.causal_attention import cuda, cuda_masked, reference

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("backend", [cuda, cuda_masked], ids=["flash", "masked"])
@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 77), (64, 64), (37, 300), (300, 300), (700, 1500)])
def test_the_last_queries_see_everything_up_to_themselves(
    backend, heads: int, group: int, dim: int, n: int, m: int
) -> None:
    q = torch.randn(n, heads * group, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, m, heads, dim, device="cuda").bfloat16()
    exact = reference.causal_attention(q.double(), k.double(), v.double())
    low = reference.causal_attention(q, k, v)
    assert_close_like_lowp(backend.causal_attention(q, k, v), exact, low)


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (20, torch.bfloat16), (264, torch.float16)])
@pytest.mark.parametrize(("n", "m"), [(1, 77), (64, 64), (37, 300)])
def test_what_flash_attention_does_not_take(n: int, m: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(rows, heads, dim, device="cuda").to(dtype) for rows, heads in ((n, 6), (m, 2), (m, 2)))
    exact = reference.causal_attention(q.double(), k.double(), v.double())
    assert_close_like_lowp(cuda_masked.causal_attention(q, k, v), exact, reference.causal_attention(q, k, v))
