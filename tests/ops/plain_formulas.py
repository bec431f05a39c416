"""What the ops compute, head by head and token by token, in the dtype that is asked for."""

import math

import torch
from precision import assert_close_like_lowp
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig

SHAPES = [(2, 1, 64), (3, 3, 96), (1, 4, 128), (2, 7, 64), (1, 8, 256)]
"""kv heads, query heads of each, head dim."""


def attend(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """One query [H_q, d] over k, v [H, m, d], or a list of one [m, d] per kv head: out [H_q, d] and lse [H_q]."""
    group = q.shape[0] // len(k)
    outs, sums = [], []
    for head, query in enumerate(q.to(dtype)):
        keys, values = k[head // group].to(dtype), v[head // group].to(dtype)
        if not len(keys):
            outs.append(torch.zeros_like(query))
            sums.append(torch.tensor(-math.inf, dtype=dtype))
            continue
        scores = keys @ query / math.sqrt(len(query))
        outs.append(torch.softmax(scores, 0) @ values)
        sums.append(torch.logsumexp(scores, 0))
    return torch.stack(outs), torch.stack(sums)


def attend_rows(rows: list[tuple], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """``attend`` of every (q, k, v), stacked."""
    outs, sums = zip(*(attend(*row, dtype) for row in rows))
    return torch.stack(outs), torch.stack(sums)


def rope(x: Tensor, position: int, config: RopeConfig) -> Tensor:
    """One vector [d] rotated pair by pair, float64."""
    x = x.double().clone()
    half = config.dim // 2
    for i, frequency in enumerate(config.inverse_frequencies().tolist()):
        a, b = (2 * i, 2 * i + 1) if config.interleaved else (i, i + half)
        angle = position * frequency
        first, second = x[a].item(), x[b].item()
        x[a] = (first * math.cos(angle) - second * math.sin(angle)) * config.magnitude
        x[b] = (first * math.sin(angle) + second * math.cos(angle)) * config.magnitude
    return x


def group_shares(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [G, chunks] of one kv head: softmax over the allowed chunks, maximum over G, -inf elsewhere."""
    result = torch.full((logits.shape[1],), -math.inf, dtype=torch.float64)
    places = allowed.nonzero().flatten().tolist()
    for row in logits.double():
        total = sum(math.exp(row[place] - row[places].max()) for place in places)
        for place in places:
            share = math.exp(row[place] - row[places].max()) / total
            result[place] = max(result[place].item(), share)
    return result


def assert_close(out: Tensor, exact: Tensor, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    """float32 results against float64 ones; infinities must agree."""
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact.double(), atol=atol, rtol=rtol)


def check(out: tuple[Tensor, Tensor], rows: list[tuple], dtype: torch.dtype) -> None:
    """Outputs and log-sum-exps [n, H_q, …] against one (q, k, v) per row."""
    exact, sums = attend_rows(rows)
    assert out[0].dtype == dtype
    assert out[1].dtype == torch.float32
    if dtype == torch.float32:
        assert_close(out[0], exact)
        assert_close(out[1], sums)
        return
    low, low_sums = attend_rows(rows, dtype)
    assert_close_like_lowp(out[0], exact, low)
    full = sums.isfinite()
    assert torch.equal(out[1] == -math.inf, ~full)
    assert_close_like_lowp(out[1][full], sums[full], low_sums[full])


def poison(x: Tensor, keep: Tensor) -> Tensor:
    """``x`` with NaN wherever the mask ``keep`` over its leading dimensions is false."""
    return x.masked_fill(~keep.view(*keep.shape, *[1] * (x.dim() - keep.dim())), math.nan)
