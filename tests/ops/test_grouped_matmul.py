"""Products of sorted rows with experts' matrices: the loop, Triton's kernel on a GPU or in its interpreter, and
PyTorch's on a GPU, eager and in a graph."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.grouped_matmul import cuda, reference

COUNTS = [(3, 0, 5, 1), (0, 0, 0, 0), (0, 9, 0, 0), (1, 1, 1, 1)]
gpu = pytest.mark.skipif(
    bool(cuda.missing()) or torch.cuda.get_device_capability()[0] not in cuda.CAPABILITIES, reason="needs a Hopper GPU"
)


def made(counts: tuple[int, ...], n: int, k: int, behind: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, of which the last ``behind`` belong to no expert; matrices; and offsets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts) + behind, k, generator=generator)
    weight = torch.randn(len(counts), n, k, generator=generator) * k**-0.5
    return x, weight, torch.tensor((0, *counts)).cumsum(0).int()


def by_rows(x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.einsum("sk,snk->sn", x[: len(experts)], weight[experts])


@pytest.mark.parametrize("behind", [0, 4])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_is_multiplied_with_its_experts_matrix(counts: tuple[int, ...], behind: int) -> None:
    x, weight, offsets = made(counts, 24, 40, behind)
    out = reference.grouped_matmul(x, weight, offsets)
    assert out.shape == (len(x), 24)
    torch.testing.assert_close(out[: sum(counts)], by_rows(x, weight, counts))


def test_what_the_kernel_does_not_take_is_refused() -> None:
    x, weight, offsets = made((1, 1), 24, 36)
    with pytest.raises(
        ValueError, match="needs sizes in multiples of 8 and at most 1023 experts, not 2 experts of 24 x 36"
    ):
        cuda.grouped_matmul(x, weight, offsets)


@pytest.mark.parametrize(("rows", "total_experts", "kernel"), [
    (256, None, "tiles"), (257, None, "PyTorch"), (257, 8, "tiles"), (1024, 8, "tiles"), (1025, 8, "PyTorch")
])  # fmt: skip
def test_the_kernel_is_chosen_by_the_rows_that_an_expert_has_on_average(
    rows: int, total_experts: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert of two has 128 rows of 256, and an expert of eight 128 of 1,024, wherever the other six are."""
    pytest.importorskip("triton")
    monkeypatch.setattr("shadowkv.ops.grouped_matmul.triton.multiply_in_tiles", lambda *_: "tiles")
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **rest: "PyTorch", raising=False)
    x, weight, offsets = made((rows, 0), 24, 40)
    assert cuda.grouped_matmul(x, weight, offsets, total_experts) == kernel


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or the interpreter"
)
@pytest.mark.parametrize(("behind", "total_experts"), [(0, None), (5, None), (5, 40)])
@pytest.mark.parametrize("size", [(24, 40), (136, 264)])
@pytest.mark.parametrize("counts", [*COUNTS, (1, 40, 0, 23, 5), (0, 0, 300), (33,) * 3, (100, 170)])
def test_tritons_kernel_is_the_loop(
    counts: tuple[int, ...], size: tuple[int, int], behind: int, total_experts: int | None
) -> None:
    """As few rows of each expert as there are tiles for, and more; and more than an expert has on average."""
    from shadowkv.ops.grouped_matmul import triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, weight, offsets = made(counts, *size, behind)
    expected = reference.grouped_matmul(x, weight, offsets)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    out = triton.grouped_matmul(x.to(device, dtype), weight.to(device, dtype), offsets.to(device), total_experts)
    assert out.shape == (sum(counts) + behind, size[0]) and out.dtype == dtype
    rows, loose = slice(sum(counts)), 2e-2 if device.type == "cuda" else 1e-5
    torch.testing.assert_close(out[rows].float().cpu(), expected[rows], rtol=loose, atol=loose)


@gpu
@pytest.mark.parametrize("behind", [0, 64])
@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (2048, 768), (2816, 4096), (64, 48)])
@pytest.mark.parametrize("counts", [*COUNTS, (0,) * 120 + (1,) * 8, (700, 0, 9, 3000)])
def test_the_kernel_is_the_loop(counts: tuple[int, ...], n: int, k: int, behind: int) -> None:
    x, weight, offsets = made(counts, n, k, behind)
    used = sum(counts)
    expected = by_rows(x, weight, counts) if used < 100 else reference.grouped_matmul(x, weight, offsets)[:used]
    x, weight, offsets = x.cuda().bfloat16(), weight.cuda().bfloat16(), offsets.cuda()
    low = reference.grouped_matmul(x, weight, offsets)[:used].float().cpu()
    out = cuda.grouped_matmul(x, weight, offsets)
    assert out.shape == (used + behind, n) and out.dtype == torch.bfloat16
    error = (out[:used].float().cpu() - expected).abs()
    assert not used or error.max() <= 2 * (low - expected).abs().max() + 1e-3


@gpu
def test_a_graph_reads_where_rows_end_when_it_is_replayed() -> None:
    x, weight, offsets = (one.cuda() for one in made((2, 3, 3), 64, 48))
    x, weight = x.bfloat16(), weight.bfloat16()
    cuda.grouped_matmul(x, weight, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.grouped_matmul(x, weight, offsets)
    for counts in ((8, 0, 0), (0, 1, 7)):
        offsets.copy_(torch.tensor((0, *counts)).cumsum(0))
        graph.replay()
        torch.testing.assert_close(out, reference.grouped_matmul(x, weight, offsets), rtol=2e-2, atol=2e-2)
