"""Attention within a window of the newest tokens, against a softmax over exactly those: references, and Triton's
kernels on a GPU or in its interpreter."""

from __future__ import annotations

import os
from itertools import accumulate

import pytest
import torch
from plain_formulas import assert_close
from precision import assert_close_like_lowp

from shadowkv.ops.add_sinks.reference import add_sinks
from shadowkv.ops.causal_window_attention import reference as causal
from shadowkv.ops.paged_window_attention.reference import paged_window_attention


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query [H_q, d] over k, v [m, H, d], and its log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("hd,mhd->hm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hm,mhd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(("new", "tokens", "window"), [(1, 1, 1), (7, 7, 3), (5, 40, 9), (300, 700, 64), (20, 30, 100)])
def test_each_query_sees_the_newest_tokens_up_to_its_own(
    seed: str, new: int, tokens: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "QUERIES_AT_ONCE", 128)
    q, k, v = torch.randn(new, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    k[: max(0, tokens - new - window + 1)] = v[: max(0, tokens - new - window + 1)] = torch.nan
    got = causal.causal_window_attention(q, k, v, window)
    for row in range(new):
        seen = slice(max(0, tokens - new + row - window + 1), tokens - new + row + 1)
        torch.testing.assert_close(got[row], plain(q[row], k[seen], v[seen])[0], atol=1e-5, rtol=1e-4)
    sinks = torch.tensor([-50.0, -2.0, 0.0, 1.0, 3.0, 50.0])
    got = causal.causal_window_attention(q, k, v, window, sinks)
    for row in range(new):
        seen = slice(max(0, tokens - new + row - window + 1), tokens - new + row + 1)
        wanted, _ = add_sinks(*plain(q[row], k[seen], v[seen]), sinks)
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-4)


def test_a_sink_is_a_position_without_a_value(seed: str) -> None:
    q, k, v, sinks = torch.randn(6, 16), torch.randn(40, 6, 16), torch.randn(40, 6, 16), 3 * torch.randn(6)
    out, lse = add_sinks(*plain(q, k, v), sinks)
    scores = torch.cat((torch.einsum("hd,mhd->hm", q, k) / 4, sinks[:, None]), 1)
    torch.testing.assert_close(out, torch.einsum("hm,mhd->hd", scores.softmax(-1)[:, :-1], v), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-4)
    out, lse = add_sinks(torch.zeros(6, 16), torch.full((6,), float("-inf")), sinks)  # no tokens
    assert not out.any() and torch.equal(lse, sinks)


def test_pages_are_read_from_their_first_valid_token_to_their_last(seed: str) -> None:
    k, v = torch.randn(9, 2, 64, 16), torch.randn(9, 2, 64, 16)
    pages = torch.tensor([[3, 1, 4], [8, 2, 0], [5, 6, 7]])
    starts = torch.tensor([[0, 60, 0], [7, 0, 64], [0, 9, 30]])
    counts = torch.tensor([[64, 64, 1], [20, 0, 64], [0, 9, 20]])
    q, rows = torch.randn(3, 6, 16), [[], []]
    unread = torch.ones(9, 64, dtype=torch.bool)
    for row in range(2):
        for page, first, last in zip(pages[row], starts[row], counts[row], strict=True):
            rows[row] += [(int(page), token) for token in range(int(first), int(last))]
            unread[page, first:last] = False
    for x in (k, v):
        x.masked_fill_(unread[:, None, :, None], torch.nan)
    out, lse = paged_window_attention(q, k, v, pages, starts, counts)
    for row in range(2):
        page, token = zip(*rows[row], strict=True)
        wanted, total = plain(q[row], k[page, :, token], v[page, :, token])
        torch.testing.assert_close(out[row], wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[row], total, atol=1e-5, rtol=1e-4)
    assert not out[2].any() and (lse[2] == float("-inf")).all()


def test_packed_sequences_see_themselves_alone(seed: str) -> None:
    lengths, sinks = [1, 40, 7, 90], torch.randn(6)
    q, k, v = torch.randn(138, 6, 16), torch.randn(138, 2, 16), torch.randn(138, 2, 16)
    got = causal.causal_window_attention(q, k, v, 9, sinks, starts_of(lengths), lengths)
    for each in zip(*(x.split(lengths) for x in (got, q, k, v)), strict=True):
        assert torch.equal(each[0], causal.causal_window_attention(*each[1:], 9, sinks))


def test_packed_sequences_see_what_they_have_cached(seed: str) -> None:
    lengths, keys, sinks = [1, 40, 7], [30, 40, 60], torch.randn(6)
    q, k, v = torch.randn(48, 6, 16), torch.randn(150, 2, 16), torch.randn(150, 2, 16)
    k[130:] = v[130:] = torch.nan
    got = causal.causal_window_attention(q, k, v, 9, sinks, starts_of(lengths), None, starts_of(keys))
    parts = zip(got.split(lengths), q.split(lengths), k[:130].split(keys), v[:130].split(keys), strict=True)
    for each in parts:
        assert torch.equal(each[0], causal.causal_window_attention(*each[1:], 9, sinks))


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.importorskip("triton")
    from shadowkv.ops.add_sinks import triton as sinks_kernel
    from shadowkv.ops.causal_window_attention import triton as kernel

    SINKS = pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
    LOW = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]

    def drawn(
        new: int, tokens: int, heads: int, group: int, dim: int, with_sinks: bool, unread: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k, v and sinks; keys and values are parts of larger tensors with NaN around them, and their first
        ``unread`` rows are NaN too."""
        scratch = torch.full((2, tokens + 20, heads + 1, dim), torch.nan, device=DEVICE)
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
    def test_the_kernel_of_one_sequence(
        seed: str, new: int, tokens: int, window: int, heads: int, group: int, dim: int, with_sinks: bool
    ) -> None:
        q, k, v, sinks = drawn(new, tokens, heads, group, dim, with_sinks, max(0, tokens - new - window + 1))
        exact = causal.causal_window_attention(*(x.double() for x in (q, k, v)), window, sinks)
        assert_close(kernel.causal_window_attention(q, k, v, window, sinks), exact)

    @SINKS
    @pytest.mark.parametrize("window", [1, 50, 1000])
    def test_the_kernel_of_packed_sequences(seed: str, window: int, with_sinks: bool) -> None:
        lengths = [130, 3, 128, 1, 1, 200]
        q, k, v, sinks = drawn(463, 463, 2, 2, 64, with_sinks, 0)
        exact = causal.causal_window_attention(
            *(x.double() for x in (q, k, v)), window, sinks, starts_of(lengths), lengths
        )
        assert_close(kernel.causal_window_attention(q, k, v, window, sinks, starts_of(lengths).to(DEVICE)), exact)

    @SINKS
    @pytest.mark.parametrize("window", [1, 50, 1000])
    def test_the_kernel_of_packed_sequences_with_cached_keys(seed: str, window: int, with_sinks: bool) -> None:
        lengths, keys = [130, 3, 1, 200, 0, 2], [200, 3, 300, 263, 0, 130]
        _, k, v, sinks = drawn(1, 896, 2, 2, 64, with_sinks, 0)
        q, starts, key_starts = torch.randn(336, 4, 64, device=DEVICE), starts_of(lengths), starts_of(keys)
        exact = causal.causal_window_attention(
            *(x.double() for x in (q, k, v)), window, sinks, starts, lengths, key_starts
        )
        starts, key_starts = starts.to(DEVICE), key_starts.to(DEVICE)
        assert_close(kernel.causal_window_attention(q, k, v, window, sinks, starts, None, key_starts), exact)

    @pytest.mark.parametrize("dtype", LOW)
    @pytest.mark.parametrize("dim", [64, 128, 256] if ON_GPU else [64])
    def test_the_kernel_in_16_bits(seed: str, dtype: torch.dtype, dim: int) -> None:
        q, k, v, sinks = drawn(300, 420, 2, 4, dim, True, 21)
        low = [x.to(dtype) for x in (q, k, v)]
        exact = causal.causal_window_attention(*(x.double() for x in low), 100, sinks)
        assert_close_like_lowp(
            kernel.causal_window_attention(*low, 100, sinks), exact, causal.causal_window_attention(*low, 100, sinks)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, *LOW])
    def test_the_kernel_of_sinks(seed: str, dtype: torch.dtype) -> None:
        out, lse = torch.randn(5, 6, 96, device=DEVICE).to(dtype), 3 * torch.randn(5, 6, device=DEVICE)
        lse[1], lse[2], out[1] = float("-inf"), 80.0, 0.0
        sinks = torch.tensor([-90.0, -3.0, 0.0, 1.0, 5.0, 90.0], device=DEVICE)
        for found, wanted in zip(sinks_kernel.add_sinks(out, lse, sinks), add_sinks(out, lse, sinks), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4 if dtype == torch.float32 else 1e-2)
