"""Attention within a window of the newest tokens, against a softmax over exactly those."""

from __future__ import annotations

import pytest
import torch

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
