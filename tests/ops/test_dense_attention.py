"""Dense attention against a softmax per position: the reference, and Triton's kernel on a GPU or in its interpreter."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU, TRITON_RUNS
from plain_formulas import SHAPES, assert_close, attend, attend_rows, check
from precision import assert_close_like_lowp
from torch import Tensor

from shadowkv.ops.dense_attention import reference
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.partial_attention.reference import add_sinks, merge_attention

LENGTHS = [[1], [1, 1, 1], [7, 1, 64, 65], [130, 3, 128, 1, 1, 40], [300]]
shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
once = pytest.mark.skipif(ON_GPU or INTERPRETED, reason="once is enough")


def packed(
    lengths: list[int], heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Packed]:
    """Arguments of the op. Keys and values are parts of larger tensors, with NaN before and behind them."""
    total = sum(lengths)
    q = 2 * torch.randn(total, heads * group, dim, device=DEVICE)
    scratch = torch.full((2, total + 20, heads + 1, dim), math.nan, device=DEVICE)
    scratch[:, 10 : 10 + total, :heads] = torch.randn(2, total, heads, dim, device=DEVICE)
    k, v = scratch.to(dtype)[:, 10 : 10 + total, :heads]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return q.to(dtype), k, v, Packed(starts, tuple(lengths))


def with_cached(
    lengths: list[int], cached: list[int], heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Packed]:
    """Arguments of the op for sequences that have ``cached`` keys before those of their queries, and NaN behind the
    last key."""
    _, k, v, keys = packed([n + m for n, m in zip(lengths, cached, strict=True)], heads, group, dim, dtype)
    q, _, _, pack = packed(lengths, heads, group, dim, dtype)
    k, v = (torch.cat((x, torch.full_like(x[:1], math.nan).expand(200, -1, -1))) for x in (k, v))
    return q, k, v, pack._replace(cu_seqlens_k=keys.cu_seqlens)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


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


@once
@shapes
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [7, 1, 33], [20, 1, 1, 40]])
def test_positions_of_the_reference_see_their_own_sequence_up_to_themselves(
    seed: str, heads: int, group: int, dim: int, lengths: list[int]
) -> None:
    q, k, v, pack = packed(lengths, heads, group, dim)
    out = reference.dense_attention(q, k, v, pack)
    assert_close(out, attend_rows(rows(q, k, v, pack.cu_seqlens))[0])
    for a, b in pairwise(pack.cu_seqlens.tolist()):
        assert torch.equal(out[a:b], reference.dense_attention(q[a:b], k[a:b], v[a:b]))


@once
@pytest.mark.parametrize(("lengths", "cached"), CACHED)
def test_queries_of_the_reference_are_the_last_positions_of_their_keys(
    seed: str, lengths: list[int], cached: list[int]
) -> None:
    q, k, v, pack = with_cached(lengths, cached, 2, 3, 16)
    starts, key_starts = pack.cu_seqlens, pack.cu_seqlens_k
    seen = [
        (q[a + i], k[b : b + before + i + 1].transpose(0, 1), v[b : b + before + i + 1].transpose(0, 1))
        for a, b, n, before in zip(starts.tolist(), key_starts.tolist(), lengths, cached, strict=False)
        for i in range(n)
    ]
    for lengths_known in (True, False):
        out = reference.dense_attention(q, k, v, pack if lengths_known else pack._replace(lengths=None))
        assert_close(out, attend_rows(seen)[0])


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@once
@pytest.mark.parametrize(("new", "tokens", "window"), [(1, 1, 1), (7, 7, 3), (5, 40, 9), (300, 700, 64), (20, 30, 100)])
def test_each_query_sees_the_newest_tokens_up_to_its_own(
    seed: str, new: int, tokens: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "QUERIES_AT_ONCE", 128)
    q, k, v = torch.randn(new, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    k[: max(0, tokens - new - window + 1)] = v[: max(0, tokens - new - window + 1)] = torch.nan
    sinks = torch.tensor([-50.0, -2.0, 0.0, 1.0, 3.0, 50.0])
    got = reference.dense_attention(q, k, v, window=window)
    with_sinks = reference.dense_attention(q, k, v, window=window, sinks=sinks)
    for row in range(new):
        seen = slice(max(0, tokens - new + row - window + 1), tokens - new + row + 1)
        wanted = attend(q[row], k[seen].transpose(0, 1), v[seen].transpose(0, 1), torch.float32)
        torch.testing.assert_close(got[row], wanted[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(with_sinks[row], add_sinks(*wanted, sinks)[0], atol=1e-5, rtol=1e-4)


@once
def test_packed_sequences_have_windows_of_their_own(seed: str) -> None:
    lengths, sinks = [1, 40, 7, 90], torch.randn(6)
    q, k, v = torch.randn(138, 6, 16), torch.randn(138, 2, 16), torch.randn(138, 2, 16)
    got = reference.dense_attention(q, k, v, Packed(starts_of(lengths), lengths), window=9, sinks=sinks)
    for each in zip(*(x.split(lengths) for x in (got, q, k, v)), strict=True):
        assert torch.equal(each[0], reference.dense_attention(*each[1:], window=9, sinks=sinks))


@once
def test_windows_reach_into_what_packed_sequences_have_cached(seed: str) -> None:
    lengths, keys, sinks = [1, 40, 7], [30, 40, 60], torch.randn(6)
    q, k, v = torch.randn(48, 6, 16), torch.randn(150, 2, 16), torch.randn(150, 2, 16)
    k[130:] = v[130:] = torch.nan
    got = reference.dense_attention(q, k, v, Packed(starts_of(lengths), None, starts_of(keys)), window=9, sinks=sinks)
    parts = zip(got.split(lengths), q.split(lengths), k[:130].split(keys), v[:130].split(keys), strict=True)
    for each in parts:
        assert torch.equal(each[0], reference.dense_attention(*each[1:], window=9, sinks=sinks))


@once
@shapes
@dtypes
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 7), (1, 40), (5, 23)])
def test_causal_attention_sees_each_position_up_to_its_own(
    seed: str, heads: int, group: int, dim: int, dtype: torch.dtype, n: int, m: int
) -> None:
    q = torch.randn(n, heads * group, dim).to(dtype)
    k, v = torch.randn(2, m, heads, dim).to(dtype)
    rows = [(q[i], k[: m - n + i + 1].transpose(0, 1), v[: m - n + i + 1].transpose(0, 1)) for i in range(n)]
    out = reference.dense_attention(q, k, v)
    check((out, attend_rows(rows)[1].float()), rows, dtype)


@once
@shapes
@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 64), (6, 37)])
@pytest.mark.parametrize("at_once", [2**24, 1, 300])
def test_block_attention_attends_to_a_block(
    seed: str,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    causal: bool,
    n: int,
    m: int,
    at_once: int,
) -> None:
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", at_once)
    q = torch.randn(n, heads * group, dim).to(dtype)
    k, v = torch.randn(2, m, heads, dim).to(dtype)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    seen = [m - n + i + 1 if causal else m for i in range(n)]
    rows = [(q[i], keys[:, :end], values[:, :end]) for i, end in enumerate(seen)]
    check(reference.dense_attention(q, k, v, causal=causal, return_lse=True), rows, dtype)


@once
@shapes
def test_blocks_and_a_causal_last_block_merge_into_causal_attention(
    seed: str, heads: int, group: int, dim: int
) -> None:
    n, m, step = 9, 70, 24
    q, (k, v) = torch.randn(n, heads * group, dim), torch.randn(2, m, heads, dim)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    parts = [
        reference.dense_attention(q, k[start:stop], v[start:stop], causal=False, return_lse=True)
        for start in range(0, m - n, step)
        for stop in (min(start + step, m - n),)
    ]
    parts.append(reference.dense_attention(q, k[m - n :], v[m - n :], return_lse=True))
    rows = [(q[i], keys[:, : m - n + i + 1], values[:, : m - n + i + 1]) for i in range(n)]
    merged = merge_attention(parts)
    assert_close(merged, attend_rows(rows)[0])
    torch.testing.assert_close(merged, reference.dense_attention(q, k, v), atol=2e-5, rtol=2e-5)


def test_what_has_no_kernels_is_refused() -> None:
    q, k, _, pack = packed([3], 2, 2, 16)
    for options in ({"causal": False}, {"return_lse": True, "window": 5}, {"return_lse": True, "pack": pack}):
        with pytest.raises(TypeError, match="return_lse=True is only for calls with causal alone"):
            reference.dense_attention(q, k, k, **options)


if TRITON_RUNS:
    pytest.importorskip("triton")
    from shadowkv.ops.dense_attention import triton as kernel

    @pytest.mark.parametrize("dim", [64, 128, 256] if ON_GPU else [64])
    @pytest.mark.parametrize(("lengths", "cached"), CACHED)
    def test_the_kernel_of_sequences_with_cached_keys(
        seed: str, lengths: list[int], cached: list[int], dim: int
    ) -> None:
        q, k, v, pack = with_cached(lengths, cached, 2, 2, dim)
        pack = pack._replace(lengths=None)
        assert_close(kernel.packed(q, k, v, pack), reference.packed(*doubles(q, k, v), pack))

    # The interpreter is slow: lengths that stress the kernel most of every shape, and the others of two.
    @pytest.mark.parametrize(
        ("lengths", "heads", "group", "dim"),
        [(n, *shape) for shape in SHAPES for n in LENGTHS if ON_GPU or n == LENGTHS[3] or shape in SHAPES[:2]],
        ids=str,
    )
    def test_the_kernel_equals_the_reference(seed: str, lengths: list[int], heads: int, group: int, dim: int) -> None:
        *args, pack = packed(lengths, heads, group, dim)
        assert_close(kernel.packed(*args, pack), reference.packed(*doubles(*args), pack))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
    def test_the_kernel_in_16_bits(seed: str, dtype: torch.dtype) -> None:
        *args, pack = packed([130, 3, 40], 2, 3, 96, dtype)
        exact = reference.packed(*doubles(*args), pack)
        assert_close_like_lowp(kernel.packed(*args, pack), exact, reference.packed(*args, pack))

    @pytest.mark.parametrize("dim", [512, 320])
    @pytest.mark.parametrize(("n", "m"), [(1, 1), (70, 70), (40, 150)])
    def test_the_kernel_of_wide_heads(seed: str, n: int, m: int, dim: int) -> None:
        """Of one sequence, and packed."""
        q, k, v, pack = with_cached([n], [m - n], 2, 2, dim, torch.bfloat16 if ON_GPU else torch.float16)
        k, v = k[:m], v[:m]
        exact, low = reference.causal(*doubles(q, k, v)), reference.causal(q, k, v)
        for found in (kernel.causal(q, k, v), kernel.packed(q, k, v, pack)):
            assert_close_like_lowp(found, exact, low)

    def test_large_scores_do_not_overflow(seed: str) -> None:
        q, k, v, pack = packed([70, 20], 2, 1, 64)
        exact = reference.packed(*doubles(100 * q, k, v), pack)
        assert_close(kernel.packed(100 * q, k, v, pack), exact, atol=2e-4, rtol=2e-4)

    SINKS = pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
    LOW = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]

    def drawn(
        new: int, tokens: int, heads: int, group: int, dim: int, with_sinks: bool, unread: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and sinks; keys and values are parts of larger tensors with NaN around them, and their first
        ``unread`` rows are NaN too."""
        scratch = torch.full((2, tokens + 20, heads + 1, dim), math.nan, device=DEVICE)
        scratch[:, 10 + unread : 10 + tokens, :heads] = torch.randn(2, tokens - unread, heads, dim, device=DEVICE)
        k, v = scratch[:, 10 : 10 + tokens, :heads]
        sinks = 3 * torch.randn(heads * group, device=DEVICE) if with_sinks else None
        return 2 * torch.randn(new, heads * group, dim, device=DEVICE), k, v, sinks

    @SINKS
    @pytest.mark.parametrize(
        ("new", "tokens", "window", "heads", "group", "dim"),
        [
            *((1, 1, 1, 1, 1, 16), (1, 300, 100, 2, 3, 64), (70, 70, 200, 1, 2, 96), (150, 400, 1, 1, 2, 64)),
            *(
                (300, 300, 64, 1, 2, 64),
                (200, 333, 129, 2, 1, 128),
                (130, 258, 128, 1, 2, 256),
                (129, 129, 128, 1, 8, 64),
            ),
        ],
        ids=str,
    )
    def test_windows_of_one_sequence(
        seed: str, new: int, tokens: int, window: int, heads: int, group: int, dim: int, with_sinks: bool
    ) -> None:
        q, k, v, sinks = drawn(new, tokens, heads, group, dim, with_sinks, max(0, tokens - new - window + 1))
        exact = reference.windowed(*doubles(q, k, v), window, sinks, None)
        assert_close(kernel.windowed(q, k, v, window, sinks, None), exact)

    @SINKS
    @pytest.mark.parametrize("window", [1, 50, 1000])
    def test_windows_of_packed_sequences(seed: str, window: int, with_sinks: bool) -> None:
        lengths = [130, 3, 128, 1, 1, 200]
        q, k, v, sinks = drawn(463, 463, 2, 2, 64, with_sinks, 0)
        exact = reference.windowed(*doubles(q, k, v), window, sinks, Packed(starts_of(lengths), lengths))
        assert_close(kernel.windowed(q, k, v, window, sinks, Packed(starts_of(lengths).to(DEVICE))), exact)

    @SINKS
    @pytest.mark.parametrize("window", [1, 50, 1000])
    def test_windows_of_packed_sequences_with_cached_keys(seed: str, window: int, with_sinks: bool) -> None:
        lengths, keys = [130, 3, 1, 200, 0, 2], [200, 3, 300, 263, 0, 130]
        _, k, v, sinks = drawn(1, 896, 2, 2, 64, with_sinks, 0)
        q, starts, key_starts = torch.randn(336, 4, 64, device=DEVICE), starts_of(lengths), starts_of(keys)
        exact = reference.windowed(*doubles(q, k, v), window, sinks, Packed(starts, lengths, key_starts))
        pack = Packed(starts.to(DEVICE), None, key_starts.to(DEVICE))
        assert_close(kernel.windowed(q, k, v, window, sinks, pack), exact)

    @pytest.mark.parametrize("dtype", LOW)
    @pytest.mark.parametrize("dim", [64, 128, 256] if ON_GPU else [64])
    def test_windows_in_16_bits(seed: str, dtype: torch.dtype, dim: int) -> None:
        q, k, v, sinks = drawn(300, 420, 2, 4, dim, True, 21)
        low = [x.to(dtype) for x in (q, k, v)]
        exact = reference.windowed(*doubles(*low), 100, sinks, None)
        found = kernel.windowed(*low, 100, sinks, None)
        assert_close_like_lowp(found, exact, reference.windowed(*low, 100, sinks, None))
