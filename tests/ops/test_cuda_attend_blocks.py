"""Attention over listed blocks on Hopper against the reference in float32, with NaN in all that must not be read."""

import math
from dataclasses import replace

import pytest
import torch
from precision import assert_close_like_lowp
from torch import Tensor

from shadowkv.ops.attend_blocks import cuda_sm90, reference, triton
from shadowkv.ops.case import Case
from shadowkv.ops.select_blocks.reference import BLOCK

if cuda_sm90.missing():
    pytest.skip("needs a Hopper and the attend_blocks_sm90 library", allow_module_level=True)

Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

LENGTHS = [  # queries, keys
    (1, 1),
    (1, 128),
    (1, 1000),
    (5, 131),
    (100, 100),
    (128, 128),
    (128, 1024),
    (300, 300),
    (300, 1537),
    (385, 2049),
    (1000, 5000),
    (1024, 4096),
]


def listed(n: int, m: int, heads: int, group: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending blocks of every tile, its own ones last, and the weights of the others. Indices past the count are far
    out of bounds."""
    tiles, blocks = -(-n // BLOCK), -(-m // BLOCK)
    indices = torch.full((heads * group, tiles, blocks), 2**23, dtype=torch.int32)
    counts = torch.zeros(heads * group, tiles, dtype=torch.int32)
    known = torch.rand(heads, blocks) < 0.7  # other blocks of a kv head are nobody's
    for head in range(heads * group):
        for tile in range(tiles):
            first = m - n + tile * BLOCK
            chosen = (torch.rand(blocks) < share) & known[head // group]
            chosen[first // BLOCK :] = False
            chosen[first // BLOCK : (min(first + BLOCK, m) - 1) // BLOCK + 1] = True
            found = chosen.nonzero().flatten()
            indices[head, tile, : len(found)], counts[head, tile] = found, len(found)
    first = torch.arange(m - n, m, BLOCK)[:, None] // BLOCK
    weights = torch.where(indices < first, torch.exp2(8 * torch.rand(indices.shape)), 1.0)
    weights.masked_fill_(torch.arange(blocks) >= counts[..., None], math.nan)
    return indices.cuda(), counts.cuda(), weights.cuda()


def problem(
    n: int, m: int, heads: int, group: int, dim: int, dtype: torch.dtype = torch.bfloat16, share: float = 0.5
) -> Args:
    """Slices of larger tensors that hold NaN around them and in every block that no query of a kv head attends to."""
    indices, counts, weights = listed(n, m, heads, group, share)
    q, k, v = (
        torch.full((1 + rows + 200, 1 + number + 1, dim), math.nan, dtype=dtype, device="cuda")[1 : rows + 1, 1:-1]
        for rows, number in ((n, heads * group), (m, heads), (m, heads))
    )
    q.copy_(2 * torch.randn(q.shape, device="cuda"))
    for head in range(heads):
        wanted = torch.zeros(-(-m // BLOCK), dtype=torch.bool, device="cuda")
        for query_head in range(head * group, (head + 1) * group):
            for row, count in zip(indices[query_head], counts[query_head].tolist()):
                wanted[row[:count].long()] = True
        rows = wanted.repeat_interleave(BLOCK)[:m].nonzero().flatten()
        for x in (k, v):
            x[rows, head] = torch.randn(len(rows), dim, device="cuda").to(dtype)
    return q, k, v, indices, counts, weights


def check(args: Args) -> Tensor:
    """Compares with the reference in float32. The Triton kernel's error is the measure of rounding."""
    out, lse = cuda_sm90.attend_blocks(*args)
    exact, exact_lse = reference.attend_blocks(*(x.float() for x in args[:3]), *args[3:])
    low, low_lse = triton.attend_blocks(*args)
    assert out.dtype == args[0].dtype
    assert_close_like_lowp(out, exact.double(), low)
    assert_close_like_lowp(lse, exact_lse.double(), low_lse)
    return out


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that the backend takes is NaN until it is written."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(math.nan))


@pytest.mark.parametrize(("n", "m"), LENGTHS)
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
@pytest.mark.parametrize("dtype", cuda_sm90.DTYPES)
def test_any_length(seed, n, m, dim, dtype):
    check(problem(n, m, 2, 2, dim, dtype))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_any_group(seed, group, heads, dim):
    check(problem(400, 2100, heads, group, dim))


@pytest.mark.parametrize("share", [0, 0.1, 1])
@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_any_density(seed, share, dim):
    check(problem(640, 10_000, 1, 2, dim, share=share))


@pytest.mark.parametrize("dim", cuda_sm90.DIMS)
def test_more_tiles_than_multiprocessors(seed, dim):
    """Blocks take several tiles each: rings, parities and turns go on from one to the next."""
    args = problem(4000, 6000, 4, 4, dim, share=0.2)
    first = check(args)
    for _ in range(10):
        assert torch.equal(cuda_sm90.attend_blocks(*args)[0], first)


@pytest.mark.parametrize("dtype", cuda_sm90.DTYPES)
def test_peaks_that_keep_rising(seed, dtype):
    """Later keys score far above earlier ones, again and again: sums are made smaller."""
    q, k, v, indices, counts, weights = problem(256, 4096, 1, 2, 128, dtype)
    q.copy_(q.abs())
    k.mul_((torch.arange(1, 4097, device="cuda") / 400)[:, None, None])
    k.copy_(k.abs())
    check((q, k, v, indices, counts, weights))


def test_falling_peaks(seed):
    """The first block scores so far above the others that their weights vanish."""
    q, k, v, indices, counts, weights = problem(256, 4096, 1, 2, 128)
    q.copy_(q.abs())
    k.copy_(k.abs())
    k[BLOCK:].mul_(-1)
    indices[:, :, 1:] = indices[:, :, :-1].clone()
    indices[:, :, 0], counts[:] = 0, counts + 1
    keep = indices[:, :, 1] == 0  # those whose first one it was
    indices[keep] = indices[keep].roll(-1, -1)
    counts[keep] -= 1
    k[:BLOCK], v[:BLOCK] = 1, 1
    check((q, k, v, indices, counts, torch.ones_like(weights)))


def test_other_layouts(seed):
    """Heads outside of tokens, and lists and queries of a dense tensor."""
    q, k, v, indices, counts, weights = problem(300, 1537, 2, 4, 128)
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    check((q.contiguous(), k, v, indices, counts, weights))


def test_what_is_not_a_number_shows(seed):
    args = problem(200, 1000, 2, 2, 128)
    args[0][150, 3, 7] = math.nan
    rows = cuda_sm90.attend_blocks(*args)[0].isnan().any(-1).nonzero().tolist()
    assert rows == [[150, 3]]


def test_captured_in_a_graph_it_gives_the_same_bits(seed):
    args = problem(700, 3000, 2, 4, 128)
    eager, _ = cuda_sm90.attend_blocks(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = cuda_sm90.attend_blocks(*args)
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, eager)


def test_no_queries(seed):
    q, k, v, indices, counts, weights = problem(128, 256, 1, 2, 64)
    assert cuda_sm90.attend_blocks(q[:0], k, v, indices[:, :0], counts[:, :0], weights[:, :0])[0].shape == (0, 2, 64)


@pytest.mark.parametrize(("dim", "dtype"), [(32, torch.bfloat16), (96, torch.float16), (128, torch.float32)])
def test_other_dtypes_and_dims_are_refused(seed, dim, dtype):
    case = Case(frozenset({"attend_blocks"}), torch.bfloat16, 128, 4, 2, 128)
    assert cuda_sm90.supports(case) == []
    assert len(cuda_sm90.supports(replace(case, head_dim=dim, dtype=dtype))) == 1
    with pytest.raises(RuntimeError, match="dtype" if dim == 128 else f"head dim {dim}"):
        cuda_sm90.attend_blocks(*problem(200, 400, 1, 2, dim, dtype))


def test_wrong_arguments_are_refused(seed):
    q, k, v, indices, counts, weights = problem(200, 1000, 2, 2, 128)
    odd = torch.zeros(1000, 2, 132, dtype=k.dtype, device="cuda")[:, :, :128]
    for wrong, said in (
        ((q, k[:, :, :64], v, indices, counts, weights), "k has size"),
        ((q, k, v[:999], indices, counts, weights), "v has size"),
        ((q, k.half(), v, indices, counts, weights), "k has dtype"),
        ((q[:, :3], k, v, indices[:3], counts[:3], weights[:3]), "no multiple"),
        ((q, k[:100], v[:100], indices, counts, weights), "more than"),
        ((q, k, v, indices.long(), counts, weights), "indices has dtype"),
        ((q, k, v, indices[:, :1], counts, weights), "indices has size"),
        ((q, k, v, indices[:, :, ::2], counts, weights), "indices has stride"),
        ((q, k, v, indices, counts[:, :1], weights), "counts has size"),
        ((q, k, v, indices, counts, weights[:, :1]), "weights has size"),
        ((q, k, v, indices, counts, weights.half()), "weights has dtype"),
        ((q, odd, odd, indices, counts, weights), "multiple of 8"),
        ((q, k.cpu(), v, indices, counts, weights), "CUDA"),
    ):
        # PyTorch raises the latter for tensors of a device that has no kernel of the op.
        with pytest.raises((RuntimeError, NotImplementedError), match=said):
            cuda_sm90.attend_blocks(*wrong)
