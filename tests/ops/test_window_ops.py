"""Paged attention within a window against a softmax over exactly its tokens; and sinks."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS

from shadowkv.ops.paged_window_attention.reference import paged_window_attention
from shadowkv.ops.partial_attention.reference import add_sinks


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query [H_q, d] over k, v [m, H, d], and its log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("hd,mhd->hm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hm,mhd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


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


if TRITON_RUNS:
    pytest.importorskip("triton")
    from shadowkv.ops.partial_attention import triton as sinks_kernel

    LOW = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]

    @pytest.mark.parametrize("dtype", [torch.float32, *LOW])
    def test_the_kernel_of_sinks(seed: str, dtype: torch.dtype) -> None:
        out, lse = torch.randn(5, 6, 96, device=DEVICE).to(dtype), 3 * torch.randn(5, 6, device=DEVICE)
        lse[1], lse[2], out[1] = float("-inf"), 80.0, 0.0
        sinks = torch.tensor([-90.0, -3.0, 0.0, 1.0, 5.0, 90.0], device=DEVICE)
        for found, wanted in zip(sinks_kernel.add_sinks(out, lse, sinks), add_sinks(out, lse, sinks), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4 if dtype == torch.float32 else 1e-2)
