"""Selection of blocks of keys for tiles of queries, and attention to them, against plain formulas: the references here,
the Triton kernels on a GPU or in Triton's interpreter."""

import importlib
import math

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS
from drawn_blocks import check_draws, free_shares
from torch import Tensor

from shadowkv.ops.case import Case
from shadowkv.ops.dense_attention.reference import dense_attention
from shadowkv.ops.select_blocks.reference import BLOCK, SAMPLED, SINK_BLOCKS, SPREAD, Blocks

pytest.importorskip("triton")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

BACKENDS = ["reference", "triton"] if ON_GPU else ["triton" if TRITON_RUNS else "reference"]
# Queries, keys, query heads, kv heads, head dim.
SHAPES = [
    (300, 1800, 6, 2, 64),
    (256, 1536, 3, 3, 96),
    (129, 1409, 4, 1, 32),
    (1, 1200, 4, 2, 16),
    (700, 700, 2, 1, 80),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def select(backend: str, *args: object, **settings: object) -> Blocks:
    return importlib.import_module(f"shadowkv.ops.select_blocks.{backend}").select_blocks(*args, **settings)


def attend(backend: str, *args: object) -> tuple[Tensor, Tensor]:
    return importlib.import_module(f"shadowkv.ops.attend_blocks.{backend}").attend_blocks(*args)


def inputs(n: int, m: int, query_heads: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. Keys and values are views of a buffer with NaN after them and between tokens."""
    buffer = torch.full((2, m + BLOCK, heads + 1, dim), float("nan"))
    buffer[:, :m, :heads] = torch.randn(2, m, heads, dim)
    k, v = buffer.to(DEVICE, DTYPE)[:, :m, :heads]
    return (2 * torch.randn(n, query_heads, dim)).to(DEVICE, DTYPE), k, v


def mask_of(indices: Tensor, counts: Tensor) -> Tensor:
    """The listed blocks, bool [H_q, tiles, blocks]. Checks that lists ascend."""
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for head, tile in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        listed = indices[head, tile, : counts[head, tile]].long().cpu()
        assert (listed.diff() > 0).all()
        chosen[head, tile, listed] = True
    return chosen


def sample(backend: str, q: Tensor) -> Tensor:
    return importlib.import_module(f"shadowkv.ops.select_blocks.{backend}").sample_queries(q)


# Queries, keys, query heads, kv heads, head dim: prompts of which there is something to leave out.
LONG = [(300, 5000, 4, 2, 64), (129, 4737, 2, 1, 32), (256, 4608, 2, 2, 96), (1, 3000, 4, 2, 16)]


# In the interpreter, which is slow, one shape has every setting.
@pytest.mark.parametrize(
    ("error", "least", "whole", "shape"),
    [
        (*setting, shape)
        for setting in [(0.1, 2, 0), (0.02, 2, 0), (0.5, 16, 0), (0.0, 16, 0), (0.1, 2, 1), (0.1, 2, 140)]
        for shape in LONG
        if ON_GPU or not TRITON_RUNS or setting == (0.1, 2, 0) or shape == LONG[1]
    ],
    ids=str,
)
def test_blocks_are_drawn_as_often_as_their_error_allows(
    backend: str, error: float, least: int, whole: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reference", "triton"):
        monkeypatch.setattr(f"shadowkv.ops.select_blocks.{name}.MIN_BLOCKS", least)
    q, k, _ = inputs(*shape)
    blocks = select(backend, q, k, error, whole)
    unlisted = check_draws(q, k, blocks, sample(backend, q), error, whole, least, 0.02 if ON_GPU else 1e-3)
    if error == 0 or whole > shape[0] - BLOCK or shape[0] < BLOCK:
        assert not unlisted
    elif error >= 0.1:
        assert unlisted, "nothing was left out: the test would show nothing"


def test_draws_are_right_on_average(backend: str) -> None:
    """Over many seeds what is drawn has as much of each sampled query's softmax as everything, and seeds differ."""
    q, k, _ = inputs(128, 4736, 2, 1, 32)
    shares = torch.stack([free_shares(q, k, sample(backend, q)[head, 0].tolist(), head, 32) for head in (0, 1)])
    error, drawn = 0.2, []
    for seed in range(24 if TRITON_RUNS and not ON_GPU else 200):
        indices, counts, weights = (x.cpu() for x in select(backend, q, k, error, seed=seed))
        stands_for = torch.zeros(2, 37, dtype=torch.float64)
        for head in (0, 1):
            listed = slice(0, int(counts[head, 0]))
            stands_for[head, indices[head, 0, listed].long()] = weights[head, 0, listed].double()
        drawn.append((stands_for[:, None, SINK_BLOCKS:32] * shares).sum(2))
    sums = torch.stack(drawn) - shares.sum(2)
    assert sums.square().mean(0).sqrt().max() < 1.5 * error
    assert sums.mean(0).abs().max() < 4 * error / len(drawn) ** 0.5
    assert sums.std(0).min() > 1e-3


def test_draws_do_not_depend_on_how_a_prompt_is_cut(backend: str) -> None:
    q, k, _ = inputs(384, 3200, 2, 1, 32)
    together, alone = select(backend, q, k, 0.2, seed=3), select(backend, q[256:], k, 0.2, seed=3)
    for head in (0, 1):
        count = int(alone[1][head, 0])
        assert together[1][head, 2] == count
        assert torch.equal(together[0][head, 2, :count], alone[0][head, 0, :count])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_queries_are_spread_and_then_the_farthest(backend: str, shape: tuple[int, ...]) -> None:
    q, _, _ = inputs(*shape)
    n, _, query_heads, _, _ = shape
    sampled = sample(backend, q)
    assert sampled.shape == (query_heads, -(-n // BLOCK), SAMPLED)
    for head, tile in torch.cartesian_prod(*map(torch.arange, sampled.shape[:2])).tolist():
        start, stop = tile * BLOCK, min(n, (tile + 1) * BLOCK)
        rows = sampled[head, tile].long()
        spread = [min(start + step * BLOCK // SPREAD, stop) - 1 for step in range(1, SPREAD + 1)]
        assert rows[:SPREAD].tolist() == spread and spread[-1] == stop - 1
        assert rows.min() >= start and rows.max() < stop
        apart = torch.cdist(q[start:stop, head].double(), q[rows, head].double())
        for number in range(SPREAD, SAMPLED):
            nearest = apart[:, :number].amin(1)
            assert nearest[rows[number] - start] >= nearest.max() * (1 - 1e-3) - 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_the_listed_blocks(
    backend: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowkv.ops.select_blocks.reference.MIN_BLOCKS", 1)
    q, k, v = inputs(*shape)
    n, m, query_heads, heads, dim = shape
    indices, counts, weights = select("reference", q.float(), k.float(), 0.3)
    first = m - n + torch.arange(0, n, BLOCK, device=DEVICE)
    weights = torch.where(indices < first[:, None] // BLOCK, 1 + 60 * torch.rand(indices.shape, device=DEVICE), 1.0)
    # Indices past the count must not be read.
    behind = torch.arange(indices.shape[2], device=DEVICE) >= counts.unsqueeze(2)
    indices, weights = indices.masked_fill(behind, 2**30), weights.masked_fill(behind, math.nan)
    out, lse = attend(backend, q, k, v, indices, counts, weights)
    chosen = mask_of(indices, counts).to(DEVICE)
    tile = torch.arange(n, device=DEVICE) // BLOCK
    seen = chosen[:, tile].repeat_interleave(BLOCK, 2)[:, :, :m]
    position = m - n + torch.arange(n, device=DEVICE)
    seen &= torch.arange(m, device=DEVICE) <= position[:, None]
    keys, values = (x.double().repeat_interleave(query_heads // heads, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) / math.sqrt(dim)
    stands_for = torch.ones(chosen.shape, device=DEVICE, dtype=torch.float64)
    stands_for.masked_scatter_(chosen, weights[~behind].double())
    scores += stands_for[:, tile].log().repeat_interleave(BLOCK, 2)[:, :, :m]
    scores = scores.masked_fill(~seen, -math.inf)
    exact = torch.einsum("hnm,mhd->nhd", scores.softmax(2), values)
    assert out.dtype == DTYPE and lse.dtype == torch.float32
    tolerance = 2e-5 if torch.float32 == DTYPE else 0.02
    torch.testing.assert_close(lse.double(), scores.logsumexp(2).T, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


def test_everything_listed_is_causal_attention(backend: str) -> None:
    q, k, v = inputs(300, 1000, 4, 2, 64)
    blocks = select(backend, q, k, 0.5, 300)
    (got, _), exact = attend(backend, q, k, v, *blocks), dense_attention(q.float(), k.float(), v.float())
    tolerance = 2e-5 if torch.float32 == DTYPE else 0.02
    torch.testing.assert_close(got.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "memory", "fits"),
    [
        (torch.bfloat16, 128, (9, 0), 232448, True),
        (torch.bfloat16, 96, (8, 9), 101376, True),
        (torch.float32, 64, (9, 0), 232448, True),
        (torch.float32, 128, (9, 0), 232448, False),
        (torch.bfloat16, 256, (9, 0), 232448, False),
        (torch.bfloat16, 128, (7, 5), 65536, False),
    ],
)
def test_kernels_say_what_does_not_fit(
    dtype: torch.dtype, dim: int, capability: tuple[int, int], memory: int, fits: bool
) -> None:
    case = Case(frozenset(), dtype, dim, 8, 2, dim, capability=capability, block_memory=memory)
    for op in ("select_blocks", "attend_blocks"):
        reasons = importlib.import_module(f"shadowkv.ops.{op}.triton").supports(case)
        assert (reasons == []) == fits
        assert fits or f"has {memory} bytes of shared memory, not" in reasons[0]
