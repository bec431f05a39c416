"""Scores of blocks by pooled keys against their formula in float64, on every backend that runs here: on a CPU, in
Triton's interpreter or on a GPU."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.pooled_scores.reference import KeyNorm

PAGES, ROWS, EACH, EPS = 13, 3, 4, 1e-6


@pytest.fixture(params=("triton",) if ON_GPU or INTERPRETED else ("reference",))
def backend(request: pytest.FixtureRequest) -> Any:
    return import_module(f"shadowkv.ops.pooled_scores.{request.param}")


def plain(
    queries: Tensor, keys: Tensor, pages: Tensor, first: Tensor, norm: KeyNorm, config: RopeConfig, size: int
) -> Tensor:
    """The formula, block by block, in float64 with the roundings of the dtype of ``keys``."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(keys.dtype).double()

    half, scores = config.dim // 2, torch.empty(*pages.shape, 64 // size, dtype=torch.float64)
    for row, page in torch.cartesian_prod(*map(torch.arange, pages.shape)).tolist():
        for block in range(64 // size):
            mean = rounded(keys[pages[row, page], block * size : (block + 1) * size].double().mean(0))
            root = (mean.square().sum() / norm.dim + norm.eps).sqrt()
            key = rounded(mean / root * norm.weight.double())
            angle = (first[row, page].double() + block * size) * config.inverse_frequencies().to(key.device)
            a, b = key[:half].clone(), key[half : 2 * half].clone()
            key[:half] = rounded(a * angle.cos() - b * angle.sin())
            key[half : 2 * half] = rounded(b * angle.cos() + a * angle.sin())
            scores[row, page, block] = (queries[row].double() @ key).clamp(min=0).sum()
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("heads", "dim", "own", "turning"), [(4, 256, 128, 64), (3, 48, 40, 12), (1, 32, 32, 32)])
def test_the_formula(
    seed: str, backend: Any, heads: int, dim: int, own: int, turning: int, size: int, dtype: torch.dtype
) -> None:
    """Keys and queries are filled up with zeros. Pages that no row names have NaN, and pages lie apart in memory."""

    def random(*shape: int) -> Tensor:
        return torch.cat((torch.randn(*shape, own), torch.zeros(*shape, dim - own)), -1).to(DEVICE, dtype)

    config = RopeConfig(dim, rotary_dim=turning)
    pages = torch.randperm(PAGES, device=DEVICE)[: ROWS * EACH].view(ROWS, EACH)
    keys = torch.full((PAGES, 2, 64, dim), float("nan"), device=DEVICE, dtype=dtype)[:, 1]
    keys[pages.flatten()] = random(ROWS * EACH, 64)
    queries, weight = random(ROWS, heads), 1 + 0.3 * random()
    first = 64 * torch.randint(5, (ROWS, EACH), device=DEVICE)
    norm = KeyNorm(weight, own, EPS)
    found = backend.pooled_scores(queries, keys, pages, first, norm, RotaryTables(config, 320, DEVICE), size)
    assert found.dtype == torch.float32 and found.shape == (ROWS, EACH, 64 // size)
    wanted = plain(queries, keys, pages, first, norm, config, size)
    # A number may be rounded up where the formula rounds down: one of its 8 bits (24 in float32) differs.
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    length = queries.double().norm(dim=-1).sum(-1).cpu()[:, None, None] * weight.double().norm().cpu()
    assert ((found.double().cpu() - wanted.cpu()).abs() <= 3 * step * length).all()
    assert wanted.abs().mean() > 100 * step


def test_interleaved_rope_is_left_to_the_reference() -> None:
    pytest.importorskip("triton")
    supports = import_module("shadowkv.ops.pooled_scores.triton").supports
    assert supports(SimpleNamespace(interleaved=False)) == []
    assert supports(SimpleNamespace(interleaved=True)) == ["RoPE rotates neighbouring dimensions"]
