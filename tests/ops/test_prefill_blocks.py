"""Selection of blocks of keys for tiles of queries, and attention to them, against plain formulas: the references here,
the Triton kernels on a GPU or in Triton's interpreter."""

import importlib
import math
import os

import pytest
import torch
from torch import Tensor

from shadowkv.ops.case import Case
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS, SPREAD

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TRITON = ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

BACKENDS = ["reference", "triton"] if ON_GPU else ["triton" if TRITON else "reference"]
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


def select(backend: str, *args: object, **settings: object) -> tuple[Tensor, Tensor]:
    return importlib.import_module(f"shadowkv.ops.select_blocks.{backend}").select_blocks(*args, **settings)


def attend(backend: str, *args: object) -> Tensor:
    return importlib.import_module(f"shadowkv.ops.attend_blocks.{backend}").attend_blocks(*args)


def inputs(n: int, m: int, query_heads: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values are views of a buffer with NaN behind them and between their tokens."""
    buffer = torch.full((2, m + BLOCK, heads + 1, dim), float("nan"))
    buffer[:, :m, :heads] = torch.randn(2, m, heads, dim)
    k, v = buffer.to(DEVICE, DTYPE)[:, :m, :heads]
    return (2 * torch.randn(n, query_heads, dim)).to(DEVICE, DTYPE), k, v


def mask_of(indices: Tensor, counts: Tensor) -> Tensor:
    """bool [H_q, tiles, blocks]; lists must ascend."""
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for head, tile in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        listed = indices[head, tile, : counts[head, tile]].long().cpu()
        assert (listed.diff() > 0).all()
        chosen[head, tile, listed] = True
    return chosen


def sample(backend: str, q: Tensor) -> Tensor:
    return importlib.import_module(f"shadowkv.ops.select_blocks.{backend}").sample_queries(q)


def shares_of(q: Tensor, k: Tensor, tile: int, head: int, rows: list[int]) -> tuple[Tensor, int, int]:
    """Shares [sampled, free] that free blocks have of the softmax of sampled queries over all keys that they see, and
    the first and the end of these blocks."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    end = max(SINK_BLOCKS, (m - n + tile * BLOCK) // BLOCK - LOCAL_BLOCKS + 1)
    scores = q[rows, head].double() @ k[:, head // group].double().T / math.sqrt(q.shape[2])
    later = torch.arange(m, device=q.device) > m - n + torch.tensor(rows, device=q.device)[:, None]
    free = scores.masked_fill(later, -math.inf).softmax(1)[:, SINK_BLOCKS * BLOCK : end * BLOCK]
    return free.unflatten(1, (-1, BLOCK)).sum(2), SINK_BLOCKS, end


# In the interpreter, which is slow, every shape at one setting and every setting of two shapes: the reference has all.
@pytest.mark.parametrize(
    ("mass", "whole", "shape"),
    [
        (*setting, shape)
        for setting in [(0.7, 0), (0.97, 0), (1.0, 0), (0.7, 1), (0.7, 140)]
        for shape in SHAPES
        if ON_GPU or not TRITON or setting == (0.7, 0) or shape in (SHAPES[1], SHAPES[2])
    ],
    ids=str,
)
def test_sampled_queries_leave_out_less_than_they_may(
    backend: str, mass: float, whole: int, shape: tuple[int, ...]
) -> None:
    """And they leave out what they may: what the reference keeps, and no more than blocks of nearly the least share."""
    q, k, _ = inputs(*shape)
    q, (n, m) = 2 * q, shape[:2]  # sharper than any of the attention tests
    chosen, sampled = mask_of(*select(backend, q, k, mass, whole)), sample(backend, q)
    left_blocks = 0
    for head, tile in torch.cartesian_prod(*map(torch.arange, chosen.shape[:2])).tolist():
        seen = (min(m, m - n + (tile + 1) * BLOCK) - 1) // BLOCK + 1
        got = chosen[head, tile]
        assert not got[seen:].any()
        shares, first, end = shares_of(q, k, tile, head, sampled[head, tile].tolist())
        if n - whole < (tile + 1) * BLOCK or end == first:
            assert got[:seen].all()
            continue
        assert got[:first].all()
        assert got[end:seen].all()
        kept = got[first:end].to(shares.device)
        assert (shares * ~kept).sum(1).max() < 1 - mass + 1e-4
        left_blocks += int((~kept).sum())
        largest, order = shares.amax(0).sort()
        enough = (shares[:, order].cumsum(1) >= 1 - mass).any(0)
        least = largest[enough].min() if enough.any() else math.inf
        assert (shares.amax(0)[kept] >= 0.94 * least).all(), "a block was kept that no query needs"
        assert (shares.amax(0)[~kept] <= 1.01 * least).all(), "a block was left out that a query needs"
    assert not left_blocks or mass < 1
    if whole == 0 and mass < 0.9 and m > n > BLOCK + 1:
        assert left_blocks, "nothing was left out: the test would show nothing"


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
def test_attention_is_that_of_the_listed_blocks(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(*shape)
    n, m, query_heads, heads, dim = shape
    indices, counts = select("reference", q.float(), k.float(), 0.7)
    # What stands behind a list must not be read.
    behind = torch.arange(indices.shape[2], device=DEVICE) >= counts.unsqueeze(2)
    indices = indices.masked_fill(behind, 2**30)
    out = attend(backend, q, k, v, indices, counts)
    chosen = mask_of(indices, counts).to(DEVICE)
    tile = torch.arange(n, device=DEVICE) // BLOCK
    seen = chosen[:, tile].repeat_interleave(BLOCK, 2)[:, :, :m]
    position = m - n + torch.arange(n, device=DEVICE)
    seen &= torch.arange(m, device=DEVICE) <= position[:, None]
    keys, values = (x.double().repeat_interleave(query_heads // heads, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) / math.sqrt(dim)
    exact = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -math.inf).softmax(2), values)
    assert out.dtype == DTYPE
    tolerance = 2e-5 if torch.float32 == DTYPE else 0.02
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


def test_everything_listed_is_causal_attention(backend: str) -> None:
    q, k, v = inputs(300, 1000, 4, 2, 64)
    from shadowkv.ops.causal_attention.reference import causal_attention

    indices, counts = select(backend, q, k, 0.5, 300)
    got, exact = attend(backend, q, k, v, indices, counts), causal_attention(q.float(), k.float(), v.float())
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
