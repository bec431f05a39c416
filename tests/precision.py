"""Bounds that hold on any CPU: a result may lose what its oracle loses in the same precision, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shadowkv.ops.extension import cpu_missing

DRAWS = 16
"""Of rounding: the largest error among so many is hardly ever half of what another order of sums may give."""

INTEGER_RUN = 32
"""Activations that have a scale together where they are multiplied as integers (csrc/cpu/quantized_matmul/)."""


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
        step: the most that it changes, in parts of the largest of a run of numbers of a row.
        run: how many numbers that is; None for the whole row, as it is where rows are no whole runs.
    """

    def __init__(self, step: float, run: int | None = None) -> None:
        super().__init__()
        self.step, self.run, self.generator = step, run, torch.Generator().manual_seed(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, torch.mm):
            x, *rest = args
            size = x.shape[-1]
            runs = x.unflatten(-1, (-1, self.run if self.run and size % self.run == 0 else size))
            most = self.step * runs.abs().amax(-1, keepdim=True)
            change = most * (2 * torch.rand(runs.shape, generator=self.generator, dtype=x.dtype) - 1)
            args = (x + change.flatten(-2), *rest)
        return func(*args, **(kwargs or {}))


def draws(oracle: Callable[[], Any], step: float = torch.finfo(torch.float32).eps, run: int | None = None) -> list[Any]:
    """What an oracle gives where rounding changes what it multiplies with weights by up to ``step`` (``Rounded``)."""
    with Rounded(step, run):
        return [oracle() for _ in range(DRAWS)]


def draws_in_blocks(oracle: Callable[[], Any]) -> list[Any]:
    """What an oracle gives where activations are rounded as for products with blocks of a GGUF file."""
    return draws(oracle, integer_step(), INTEGER_RUN)


def integer_step() -> float:
    """What kernels that multiply activations as integers may change each by, in parts of the largest of
    INTEGER_RUN: half of what one more is worth, and three roundings of float32 on the way there and
    back."""
    of_bytes = not cpu_missing() and torch.ops.shadowkv.cpu_isa() == "avx512"
    return 0.5 / (127 * 257 if of_bytes else 63 * (1 + 2**7 + 2**14)) + 3 * 2.0**-24


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


def assert_close_in_blocks(found: list[Tensor], oracle: Callable[[], list[Tensor]]) -> None:
    """Each is as the oracle's, but for what products with blocks of a GGUF file round activations to."""
    for mine, theirs, *lowp in zip(found, oracle(), *draws_in_blocks(oracle), strict=True):
        assert theirs.abs().max() > 0.1
        assert_close_like_lowp(mine, theirs.double(), *lowp)
