"""What FlashInfer's and flash-attn's backends must compute, with stubs on a CPU and with the libraries on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from precision import assert_close_like_lowp
from test_dense_attention import doubles
from torch import Tensor

from shadowkv.ops.dense_attention import reference
from shadowkv.ops.dense_attention.forms import Packed


def drawn(
    n: int, m: int, heads: int, group: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [n, H_q, d], and keys and values [m, H, d] within larger tensors of NaN, as scratch is strided."""
    scratch = torch.full((2, m + 3, heads + 1, dim), math.nan, device=device)
    scratch[:, 2 : 2 + m, :heads] = torch.randn(2, m, heads, dim, device=device)
    k, v = scratch.to(dtype)[:, 2 : 2 + m, :heads]
    return (2 * torch.randn(n, heads * group, dim, device=device)).to(dtype), k, v


def partial(library: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-sum-exps of the library, of the reference in float64, and of the reference in the same dtype."""
    out, lse = library.partial(q, k, v, is_causal)
    exact, low = reference.partial(*doubles(q, k, v), is_causal), reference.partial(q, k, v, is_causal)
    assert (out.dtype, lse.dtype, lse.shape) == (q.dtype, torch.float32, q.shape[:2])
    assert_close_like_lowp(out, exact[0], low[0])
    return lse, exact[1], low[1]


def causal(library: Any, *args: Tensor) -> None:
    assert_close_like_lowp(library.causal(*args), reference.causal(*doubles(*args)), reference.causal(*args))


def windowed(library: Any, args: Sequence[Tensor], window: int, with_sinks: bool, pack: Packed | None = None) -> None:
    sinks = 3 * torch.randn(args[0].shape[1], device=args[0].device) if with_sinks else None
    exact, low = (reference.windowed(*some, window, sinks, pack) for some in (doubles(*args), args))
    assert_close_like_lowp(library.windowed(*args, window, sinks, pack), exact, low)


def packed(library: Any, args: Sequence[Tensor], pack: Packed, given: Packed | None = None) -> None:
    """``given`` is the pack that the library gets, if it is another."""
    exact, low = reference.packed(*doubles(*args), pack), reference.packed(*args, pack)
    assert_close_like_lowp(library.packed(*args, given or pack), exact, low)


def no_packed_sequences(library: Any, device: str = "cpu") -> None:
    q, k = torch.empty(0, 8, 128, device=device), torch.empty(0, 2, 128, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    assert library.packed(q, k, k, Packed(starts, ())).shape == q.shape
