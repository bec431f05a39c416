"""Bounds that hold on any CPU: a result may lose what its oracle loses in the same precision, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DRAWS = 16
"""Of rounding: the largest error among so many is hardly ever half of what another order of sums may give."""


class InFloat64(TorchFunctionMode):
    """Computes in float64 what is asked for in float32: of arguments in float64, an oracle's results are exact."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Rounded(TorchFunctionMode):
    """Changes what is multiplied with weights at random, as far as rounding may: each run is another draw of what
    another order of sums gives.

    Args:
        step: the most that it changes, in parts of the largest number of a row.
    """

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step, self.generator = step, torch.Generator().manual_seed(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, torch.mm):
            x, *rest = args
            most = self.step * x.abs().amax(-1, keepdim=True)
            args = (x + most * (2 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 1), *rest)
        return func(*args, **(kwargs or {}))


def draws(oracle: Callable[[], Any], step: float = torch.finfo(torch.float32).eps) -> list[Any]:
    """What an oracle gives where rounding changes what it multiplies with weights by up to ``step``."""
    with Rounded(step):
        return [oracle() for _ in range(DRAWS)]


def assert_close_like_lowp(out: Tensor, exact: Tensor, *lowp: Tensor) -> None:
    """max|out - exact| <= 2 max|lowp - exact| + atol, with one step of lowp's dtype at the largest value as atol.

    Args:
        out: what is tested.
        exact: the oracle's result in float64.
        lowp: its results in the precision of ``out``, one or more draws.
    """
    assert out.shape == exact.shape
    assert out.isfinite().all()
    if not out.numel():
        return
    error = (out.double() - exact).abs().max()
    lost = max(float((one.double() - exact).abs().max()) for one in lowp)
    allowed = 2 * lost + torch.finfo(lowp[0].dtype).eps * exact.abs().max()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"
