"""Scores of blocks on Hopper against float64, and the blocks chosen by them, with NaN in all that must not be read."""

import math
from dataclasses import replace

import pytest
import torch
from drawn_blocks import check_draws
from torch import Tensor

from shadowkv.ops.case import Case
from shadowkv.ops.select_blocks import cuda_sm90, triton
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, MIN_BLOCKS, SAMPLED, SINK_BLOCKS

if cuda_sm90.missing():
    pytest.skip("needs a Hopper and the score_blocks_sm90 library", allow_module_level=True)

LENGTHS = [  # queries, keys
    (1, 1),
    (1, 895),
    (1, 897),
    (1, 5000),
    (5, 1200),
    (100, 2000),
    (128, 1024),
    (300, 300),
    (300, 2537),
    (385, 2049),
    (1000, 5000),
    (2048, 4096),
]
CLOSE = 5e-4
"""Bound on errors of log2 of sums, 0.04 % of the sums."""


def problem(
    n: int, m: int, heads: int, group: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, slices of larger tensors that hold NaN around them, and sampled queries. Keys of blocks that no
    tile may leave out are NaN too."""
    q, k = (
        torch.full((1 + rows + 200, 1 + number + 1, dim), math.nan, dtype=dtype, device="cuda")[1 : rows + 1, 1:-1]
        for rows, number in ((n, heads * group), (m, heads))
    )
    q.copy_(2 * torch.randn(q.shape, device="cuda"))
    free = slice(SINK_BLOCKS * BLOCK, max(SINK_BLOCKS, free_end(n, m, -(-n // BLOCK) - 1)) * BLOCK)
    k[free] = torch.randn(k[free].shape, device="cuda").to(dtype)
    first = torch.arange(0, n, BLOCK)[None, :, None]
    within = (torch.rand(heads * group, first.shape[1], SAMPLED) * (n - first).clamp(max=BLOCK)).int()
    return q, k, (first + within).int().cuda()


def free_end(n: int, m: int, tile: int) -> int:
    """End of the blocks that a tile may leave out."""
    return (m - n + tile * BLOCK) // BLOCK - LOCAL_BLOCKS + 1


def exact(q: Tensor, k: Tensor, sampled: Tensor, head: int, tile: int) -> Tensor:
    """log2 of the sums of a tile's sampled queries over the blocks that it may leave out, float64."""
    keys = k[SINK_BLOCKS * BLOCK : free_end(len(q), len(k), tile) * BLOCK, head * k.shape[1] // q.shape[1]]
    products = q[sampled[head, tile].long(), head].double() @ keys.double().T / math.sqrt(q.shape[2])
    return products.unflatten(1, (-1, BLOCK)).logsumexp(2) / math.log(2)


def score(q: Tensor, k: Tensor, sampled: Tensor) -> Tensor:
    """The kernel's scores [tiles of whole parts, query heads, sampled, blocks], NaN where it did not write."""
    group = q.shape[1] // k.shape[1]
    scores = triton.score_buffer(q, k).fill_(math.nan)
    cuda_sm90.score_blocks(q, k, sampled, scores)
    used = triton.tiles_together(group) * group * SAMPLED
    assert scores[..., used:].isnan().all()
    by_tile = scores[..., :used].unflatten(3, (-1, group, SAMPLED)).permute(2, 3, 1, 4, 5, 0)
    return by_tile.flatten(0, 1).flatten(1, 2)


def check(q: Tensor, k: Tensor, sampled: Tensor, close: float = CLOSE) -> Tensor:
    """Compares scores with float64, and checks that no others are written."""
    n, m = len(q), len(k)
    got, tiles = score(q, k, sampled), -(-n // BLOCK)
    assert got[tiles:].isnan().all()
    assert got[..., :SINK_BLOCKS].isnan().all()
    assert got[..., max(SINK_BLOCKS, free_end(n, m, tiles - 1)) :].isnan().all()
    for tile in range(tiles):
        end = free_end(n, m, tile)
        if end <= SINK_BLOCKS:
            continue
        for head in range(q.shape[1]):
            found, expected = got[tile, head, :, SINK_BLOCKS:end].double(), exact(q, k, sampled, head, tile)
            torch.testing.assert_close(found, expected, atol=close, rtol=1e-6)
    return got


@pytest.mark.parametrize(("n", "m"), LENGTHS)
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
@pytest.mark.parametrize("dtype", cuda_sm90.DTYPES)
def test_any_length(seed, n, m, dim, dtype):
    check(*problem(n, m, 2, 2, dim, dtype))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_any_group(seed, group, heads, dim):
    check(*problem(700, 3100, heads, group, dim))


@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_more_spans_than_multiprocessors(seed, dim):
    """Blocks take several spans each: rings, parities and turns go on from one to the next."""
    args = problem(2000, 30_000, 8, 4, dim)
    first = check(*args)
    for _ in range(10):
        assert torch.equal(score(*args).nan_to_num(), first.nan_to_num())


@pytest.mark.parametrize("dtype", cuda_sm90.DTYPES)
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_sums_far_from_one(seed, dim, dtype):
    """Peaks rise and fall by hundreds of powers of two from block to block, for some rows."""
    q, k, sampled = problem(300, 6000, 2, 4, dim, dtype)
    block = torch.arange(6000, device="cuda") // BLOCK
    q[:, ::2] = q[:, ::2].abs()
    k.mul_((1 + 40 * (block % 3))[:, None, None])
    k[:, 0] = k[:, 0].abs() * (block % 2 * 2 - 1)[:, None]
    check(q, k, sampled, 0.01)  # sums of 1e4 in float32, as tensor cores round them


def test_sums_where_all_scores_are_far_below_zero(seed):
    q, k, sampled = problem(300, 6000, 1, 4, 128)
    check(q.abs(), -4 * k.abs(), sampled)


def test_other_layouts(seed):
    """Heads outside of tokens, and dense queries."""
    q, k, sampled = problem(300, 2537, 2, 4, 128)
    check(q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), sampled)


def test_what_is_not_a_number_stays_in_its_row(seed):
    q, k, sampled = problem(400, 3000, 2, 4, 128)
    expected = check(q, k, sampled)
    q[sampled[5, 1, 3], 5, 7] = math.nan
    got = score(q, k, sampled)
    hit = (sampled == sampled[5, 1, 3]) & (torch.arange(8, device="cuda") == 5)[:, None, None]
    bad = got[: sampled.shape[1]].isnan() & ~expected[: sampled.shape[1]].isnan()
    assert torch.equal(bad.any(-1), hit.transpose(0, 1))
    torch.testing.assert_close(got[~got.isnan()], expected[~got.isnan()], atol=CLOSE, rtol=0)


@pytest.fixture
def poisoned_scores(monkeypatch):
    """Scores are NaN until they are written."""
    monkeypatch.setattr(cuda_sm90, "score_buffer", lambda q, k: triton.score_buffer(q, k).fill_(math.nan))


@pytest.mark.parametrize(("n", "m", "heads", "group"), [(300, 5037, 2, 4), (1000, 9000, 1, 7), (1, 3000, 2, 1)])
@pytest.mark.parametrize(("error", "whole"), [(0.1, 0), (0.03, 0), (0.0, 0), (0.1, 140)])
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_drawn_blocks(seed, poisoned_scores, n, m, heads, group, error, whole, dim):
    q, k = torch.randn(n, heads * group, dim).cuda().bfloat16(), torch.randn(m, heads, dim).cuda().bfloat16()
    blocks = cuda_sm90.select_blocks(2 * q, k, error, whole)
    unlisted = check_draws(2 * q, k, blocks, triton.sample_queries(2 * q), error, whole, MIN_BLOCKS, 0.02)
    if error == 0 or n < BLOCK:
        assert not unlisted
    elif error >= 0.1:
        assert unlisted, "nothing was left out: the test would show nothing"


def test_captured_in_a_graph_it_gives_the_same_blocks(seed):
    q = torch.randn(700, 8, 128, device="cuda").bfloat16()
    k = torch.randn(5000, 2, 128, device="cuda").bfloat16()
    indices, counts, weights = cuda_sm90.select_blocks(q, k, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda_sm90.select_blocks(q, k, 0.1)
    for _ in range(3):
        for x in captured:
            x.fill_(-1)
        graph.replay()
        assert torch.equal(captured[1], counts)
        listed = torch.arange(indices.shape[2], device="cuda") < counts[..., None]
        assert torch.equal(captured[0][listed], indices[listed])
        assert torch.equal(captured[2][listed], weights[listed])


@pytest.mark.parametrize(
    ("dim", "dtype", "group"), [(96, torch.bfloat16, 2), (128, torch.float32, 2), (128, torch.bfloat16, 17)]
)
def test_what_other_kernels_are_for_is_refused(seed, dim, dtype, group):
    case = Case(frozenset({"select_blocks"}), torch.bfloat16, 128, 32, 2, 128)
    assert cuda_sm90.supports(case) == []
    assert len(cuda_sm90.supports(replace(case, head_dim=dim, dtype=dtype, num_query_heads=2 * group))) == 1
    said = "dtype" if dtype == torch.float32 else "head dim 96" if dim == 96 else "17 query heads"
    q, k, sampled = problem(200, 400, 1, group, dim, dtype)
    with pytest.raises(RuntimeError, match=said):
        cuda_sm90.score_blocks(q, k, sampled, triton.score_buffer(q, k))


def test_wrong_arguments_are_refused(seed):
    q, k, sampled = problem(200, 1000, 2, 2, 128)
    scores = triton.score_buffer(q, k)
    odd = torch.zeros(1000, 2, 132, dtype=k.dtype, device="cuda")[:, :, :128]
    for wrong, said in (
        ((q, k[:, :, :64], sampled, scores), "k has size"),
        ((q, k.half(), sampled, scores), "k has dtype"),
        ((q[:, :3], k, sampled[:3], scores), "no multiple"),
        ((q, k[:100], sampled, scores), "queries are not 1 to 100"),
        ((q[:0], k, sampled[:, :0], scores[:, :, :0]), "queries are not 1 to"),
        ((q, k, sampled.long(), scores), "sampled has dtype"),
        ((q, k, sampled[:, :1], scores), "sampled has size"),
        ((q, k, sampled, scores[1:]), "scores has size"),
        ((q, k, sampled, scores[..., ::2]), "scores has size"),
        ((q, k, sampled, scores.transpose(0, 1).contiguous().transpose(0, 1)), "scores has stride"),
        ((q, odd, sampled, scores), "multiple of 8"),
        ((q, k.cpu(), sampled, scores), "CUDA"),
    ):
        # PyTorch raises the latter for tensors of a device that has no kernel of the op.
        with pytest.raises((RuntimeError, NotImplementedError), match=said):
            cuda_sm90.score_blocks(*wrong)
