"""Ragged top-k by the CUDA kernel, on a GPU if there is one, else on a CPU whose threads take turns: it selects the
right number of chunks, and none that is worse than one left out."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from compiled_source import kernel_on_cpu
from torch import Tensor

from shadowkv.ops.select_top_chunks import cuda

DEVICE = "cpu" if cuda.missing() else "cuda"
IN_SHARED_MEMORY = 49_000
"""Most chunks of a row that fit in shared memory."""

Select = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu("select_top_chunks", tmp_path_factory.mktemp("source"))


@pytest.fixture(params=["cuda"] if DEVICE == "cuda" else [256, 512], ids=str)
def select(request: pytest.FixtureRequest) -> Select:
    """The op on a GPU, or the kernel on a CPU with some number of threads per block."""
    if request.param == "cuda":
        return cuda.select_top_chunks
    run = request.getfixturevalue("library").select_top_chunks
    run.restype = ctypes.c_bool

    def on_cpu(logits: Tensor, lse: Tensor, budget: Tensor, k: int) -> Tensor:
        batch, heads, group, chunks = logits.shape
        selected = torch.full((batch, heads, k), -7)
        outside = batch * heads * -(-chunks // 32) * 34 if chunks > IN_SHARED_MEMORY else 0
        workspace = torch.full((outside,), -1, dtype=torch.int32)
        given = logits.contiguous(), lse.contiguous(), budget, workspace, selected
        places = [ctypes.c_void_p(x.data_ptr() if x.numel() else None) for x in given]
        sizes = batch, heads, group, chunks, lse.shape[3], k, 4 if chunks % 4 == 0 else 1, request.param
        assert run(*places, *sizes), "threads wait for others that have ended"
        return selected

    return on_cpu


def partial_sums(logits: Tensor, parts: int) -> Tensor:
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % parts), value=-math.inf)
    return padded.nan_to_num(-math.inf, neginf=-math.inf).unflatten(-1, (parts, -1)).logsumexp(-1)


def check(select: Select, logits: Tensor, lse: Tensor, budget: Tensor, k: int) -> Tensor:
    selected = select(logits, lse, budget, k)
    assert selected.shape == (*logits.shape[:2], k)
    assert selected.dtype == torch.int64
    shares = logits.double() - lse.double().logsumexp(-1, keepdim=True)
    scores = shares.masked_fill(~shares.isfinite(), -math.inf).amax(2)
    allowed = scores > -math.inf
    wanted = torch.minimum(budget[:, None], allowed.sum(-1))
    there = selected >= 0
    assert torch.equal(there.sum(-1), wanted)
    assert torch.equal(there, torch.arange(k, device=there.device) < wanted.unsqueeze(-1))
    chosen = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.int64, device=scores.device)
    chosen.scatter_add_(-1, selected.where(there, scores.shape[-1]), torch.ones_like(selected))
    chosen = chosen[..., :-1]
    assert chosen.max() <= 1
    assert (chosen.bool() <= allowed).all()
    worst = scores.masked_fill(chosen == 0, math.inf).amin(-1)
    best_left = scores.masked_fill(chosen == 1, -math.inf).amax(-1)
    # Sums of the normaliser round, in shares of up to some hundred.
    assert (worst >= best_left - 2e-6 * (1 + best_left.abs().nan_to_num(0, 0, 0))).all()
    return selected


def ragged(batch: int, heads: int, group: int, chunks: int, spread: float = 2.0) -> Tensor:
    logits = spread * torch.randn(batch, heads, group, chunks, device=DEVICE)
    excluded = torch.rand(batch, heads, 1, chunks, device=DEVICE) < 0.2
    ends = torch.randint(0, chunks + 1, (batch, 1, 1, 1), device=DEVICE)
    ends[0] = chunks
    return logits.masked_fill(excluded | (torch.arange(chunks, device=DEVICE) >= ends), -math.inf)


@pytest.mark.parametrize("group", [1, 3, 4, 6, 7, 8, 12] if DEVICE == "cuda" else [1, 4, 12])
@pytest.mark.parametrize("chunks", [1, 7, 33, 1000, 7680, 15616] if DEVICE == "cuda" else [1, 33, 1000, 2052])
def test_the_largest_shares_of_ragged_rows(seed, select, group, chunks):
    logits = ragged(6, 3, group, chunks)
    k = max(1, chunks // 20)
    budget = torch.tensor([k, 0, 1, k, k // 2, k]).to(DEVICE)
    check(select, logits, partial_sums(logits, 1 + chunks // 300), budget, k)


@pytest.mark.parametrize("chunks", [49_000, 62_464, 131_072, 131_071] if DEVICE == "cuda" else [49_024, 49_001])
def test_rows_that_do_not_fit_in_shared_memory(seed, select, chunks):
    logits = ragged(3, 2, 4, chunks)
    check(select, logits, partial_sums(logits, 61), torch.tensor([976, 2000, 0]).to(DEVICE), 2000)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.1, 30.0, 300.0, 1e6])
def test_scores_close_together_and_far_apart(seed, select, spread):
    logits = ragged(4, 3, 4, 5000, spread)
    check(select, logits, partial_sums(logits, 3), torch.tensor([100, 1, 3000, 5000]).to(DEVICE), 5000)


@pytest.mark.parametrize("levels", [1, 2, 50])
def test_exactly_the_budget_of_ties(seed, select, levels):
    logits = torch.randint(0, levels, (4, 3, 2, 9000), device=DEVICE).float()
    logits[..., ::7] = -math.inf
    budget = torch.tensor([1, 700, 5000, 9000]).to(DEVICE)
    first = check(select, logits, partial_sums(logits, 2), budget, 9000)
    assert torch.equal(first, select(logits, partial_sums(logits, 2), budget, 9000))


def test_a_budget_of_more_than_there_is_takes_everything(seed, select):
    logits = ragged(3, 2, 4, 100)
    selected = check(select, logits, partial_sums(logits, 1), torch.full((3,), 300).to(DEVICE), 300)
    assert torch.equal(selected[0, 0][selected[0, 0] >= 0], (logits[0, 0, 0] > -math.inf).nonzero().flatten())


def test_nan_and_empty_rows_are_never_selected(seed, select):
    logits = ragged(4, 2, 4, 2000)
    lse = partial_sums(logits, 4)
    logits[0, 0, :, 3::5] = math.nan
    logits[0, 1, 2, ::2] = math.nan
    logits[1, 0] = math.nan
    logits[1, 1], lse[1, 1] = -math.inf, -math.inf
    lse[2, 0, 1] = math.nan
    lse[2, 1] = math.nan
    check(select, logits, lse, torch.tensor([100, 100, 50, 2000]).to(DEVICE), 2000)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_an_index_without_chunks_selects_none():
    selected = cuda.select_top_chunks(
        torch.empty(2, 3, 4, 0).cuda(), torch.empty(2, 3, 4, 0).cuda(), torch.tensor([3, 0]).cuda(), 3
    )
    assert torch.equal(selected, torch.full((2, 3, 3), -1).cuda())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_call_follows_its_inputs(seed, select):
    logits = ragged(4, 2, 4, 3000)
    lse, budget = partial_sums(logits, 5), torch.tensor([30, 0, 3, 17]).to(DEVICE)
    cuda.select_top_chunks(logits, lse, budget, 30)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = cuda.select_top_chunks(logits, lse, budget, 30)
    logits.copy_(ragged(4, 2, 4, 3000))
    lse.copy_(partial_sums(logits, 5))
    budget.copy_(torch.tensor([1, 30, 0, 29]))
    graph.replay()
    assert torch.equal(selected, cuda.select_top_chunks(logits, lse, budget, 30))
