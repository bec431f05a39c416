"""Attention of packed sequences against a softmax per position: the reference, and Triton's kernel on a GPU or in its
interpreter."""

import math
import os
from itertools import accumulate, pairwise

import pytest
import torch
from plain_formulas import SHAPES, assert_close, attend_rows
from precision import assert_close_like_lowp
from torch import Tensor

from shadowkv.ops.causal_attention.reference import causal_attention
from shadowkv.ops.ragged_attention import reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = [[1], [1, 1, 1], [7, 1, 64, 65], [130, 3, 128, 1, 1, 40], [300]]
shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)


def packed(
    lengths: list[int], heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Arguments of the op. Keys and values are parts of larger tensors, with NaN before and behind them."""
    total = sum(lengths)
    q = 2 * torch.randn(total, heads * group, dim, device=DEVICE)
    scratch = torch.full((2, total + 20, heads + 1, dim), math.nan, device=DEVICE)
    scratch[:, 10 : 10 + total, :heads] = torch.randn(2, total, heads, dim, device=DEVICE)
    k, v = scratch.to(dtype)[:, 10 : 10 + total, :heads]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return q.to(dtype), k, v, starts, tuple(lengths)


def with_cached(
    lengths: list[int], cached: list[int], heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Tensor]:
    """Arguments of the op for sequences that have ``cached`` keys before those of their queries, and NaN behind the
    last key."""
    _, k, v, key_starts, _ = packed([n + m for n, m in zip(lengths, cached, strict=True)], heads, group, dim, dtype)
    q, _, _, starts, _ = packed(lengths, heads, group, dim, dtype)
    k, v = (torch.cat((x, torch.full_like(x[:1], math.nan).expand(200, -1, -1))) for x in (k, v))
    return q, k, v, starts, tuple(lengths), key_starts


CACHED = [
    ([1], [1]),
    ([40, 1, 130], [0, 500, 77]),
    ([1, 200, 64, 3], [128, 56, 192, 0]),
    ([5, 0, 0, 7], [300, 0, 0, 1]),
]


def rows(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What each position attends to."""
    return [
        (q[i], k[a : i + 1].transpose(0, 1), v[a : i + 1].transpose(0, 1))
        for a, b in pairwise(starts.tolist())
        for i in range(a, b)
    ]


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="once is enough")
@shapes
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [7, 1, 33], [20, 1, 1, 40]])
def test_positions_of_the_reference_see_their_own_sequence_up_to_themselves(
    seed: str, heads: int, group: int, dim: int, lengths: list[int]
) -> None:
    q, k, v, starts, _ = args = packed(lengths, heads, group, dim)
    out = reference.ragged_attention(*args)
    assert_close(out, attend_rows(rows(q, k, v, starts))[0])
    for a, b in pairwise(starts.tolist()):
        assert torch.equal(out[a:b], causal_attention(q[a:b], k[a:b], v[a:b]))


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="once is enough")
@pytest.mark.parametrize(("lengths", "cached"), CACHED)
def test_queries_of_the_reference_are_the_last_positions_of_their_keys(
    seed: str, lengths: list[int], cached: list[int]
) -> None:
    q, k, v, starts, known, key_starts = with_cached(lengths, cached, 2, 3, 16)
    seen = [
        (q[a + i], k[b : b + before + i + 1].transpose(0, 1), v[b : b + before + i + 1].transpose(0, 1))
        for a, b, n, before in zip(starts.tolist(), key_starts.tolist(), lengths, cached, strict=False)
        for i in range(n)
    ]
    for of_host in (known, None):
        out = reference.ragged_attention(q, k, v, starts, of_host, key_starts)
        assert_close(out, attend_rows(seen)[0])


if ON_GPU or INTERPRETED:
    pytest.importorskip("triton")
    from shadowkv.ops.ragged_attention import triton as kernel

    @pytest.mark.parametrize("dim", [64, 128, 256] if ON_GPU else [64])
    @pytest.mark.parametrize(("lengths", "cached"), CACHED)
    def test_the_kernel_of_sequences_with_cached_keys(
        seed: str, lengths: list[int], cached: list[int], dim: int
    ) -> None:
        q, k, v, starts, _, key_starts = with_cached(lengths, cached, 2, 2, dim)
        exact = reference.ragged_attention(*(x.double() for x in (q, k, v)), starts, None, key_starts)
        assert_close(kernel.ragged_attention(q, k, v, starts, None, key_starts), exact)

    # The interpreter is slow: lengths that stress the kernel most of every shape, and the others of two.
    @pytest.mark.parametrize(
        ("lengths", "heads", "group", "dim"),
        [(n, *shape) for shape in SHAPES for n in LENGTHS if ON_GPU or n == LENGTHS[3] or shape in SHAPES[:2]],
        ids=str,
    )
    def test_the_kernel_equals_the_reference(seed: str, lengths: list[int], heads: int, group: int, dim: int) -> None:
        args = packed(lengths, heads, group, dim)
        exact = reference.ragged_attention(*(x.double() for x in args[:3]), *args[3:])
        assert_close(kernel.ragged_attention(*args), exact)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
    def test_the_kernel_in_16_bits(seed: str, dtype: torch.dtype) -> None:
        args = packed([130, 3, 40], 2, 3, 96, dtype)
        exact = reference.ragged_attention(*(x.double() for x in args[:3]), *args[3:])
        assert_close_like_lowp(kernel.ragged_attention(*args), exact, reference.ragged_attention(*args))

    def test_large_scores_do_not_overflow(seed: str) -> None:
        q, *rest = packed([70, 20], 2, 1, 64)
        exact = reference.ragged_attention(100 * q.double(), *(x.double() for x in rest[:2]), *rest[2:])
        assert_close(kernel.ragged_attention(100 * q, *rest), exact, atol=2e-4, rtol=2e-4)
