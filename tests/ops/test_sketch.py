"""The 2-bit key sketch and its PyTorch ops against brute force."""

import math

import pytest
import torch
from plain_formulas import assert_close

from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.select_top_chunks.reference import select_top_chunks
from shadowkv.ops.sketch_scores import reference
from shadowkv.ops.sketch_scores.reference import pack_sketch, sketch_scores, unpack_sketch

dims = pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])


@dims
def test_the_rotation_is_orthogonal_and_always_the_same(dim):
    matrix = random_rotation(dim, "sketch")
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=2e-6, rtol=0)
    torch.manual_seed(dim + 1)
    assert torch.equal(matrix, random_rotation(dim, "sketch"))


@dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_quantised_coordinates_at_their_places(seed, dim, dtype):
    keys, matrix = (3 * torch.randn(2, 5, dim)).to(dtype), random_rotation(dim, "sketch")
    codes, scale = pack_sketch(keys, matrix)
    assert (codes.dtype, scale.dtype) == (torch.uint8, torch.float16)
    assert codes.shape == (2, 5, math.ceil(dim / 64) * 16)
    assert not codes[..., dim // 4 :].any()
    x = keys.float() @ matrix
    for place in [(0, 0), (1, 4)]:
        sigma = keys[place].float().norm() / math.sqrt(dim)
        levels = (x[place] / (0.9957 * sigma)).floor().add(2).clamp(0, 3)
        found = [int(codes[place][at % (dim // 4)]) >> 2 * (at // (dim // 4)) & 3 for at in range(dim)]
        assert found == levels.tolist()
        estimate = (scale[place].float() * (levels - 1.5)) @ x[place]
        torch.testing.assert_close(estimate, keys[place].float().square().sum(), rtol=1e-3, atol=0)
        assert_close(unpack_sketch(codes, scale, dim)[place], scale[place].double() * (levels - 1.5).double())


def test_a_sketch_of_gaussian_keys_keeps_most_of_them(seed):
    keys, matrix = torch.randn(4000, 128), random_rotation(128, "sketch")
    x = keys @ matrix
    error = (unpack_sketch(*pack_sketch(keys, matrix), 128) - x).square().sum() / x.square().sum()
    assert 0.11 < error < 0.15  # the best 4-level quantiser leaves 0.119 of a Gaussian's variance


def test_a_key_of_zero_has_scale_zero_and_a_huge_one_a_finite_scale():
    keys = torch.zeros(2, 64)
    keys[1, 5] = 1e15
    scale = pack_sketch(keys, random_rotation(64, "sketch"))[1]
    assert scale[0] == 0
    assert scale[1] == torch.finfo(torch.float16).max


@pytest.mark.parametrize(("heads", "group", "dim", "chunk"), [(2, 3, 64, 8), (1, 7, 96, 1), (3, 4, 32, 16)])
def test_scores_are_log_sums_over_a_chunks_tokens(seed, monkeypatch, heads, group, dim, chunk):
    monkeypatch.setattr(reference, "PAGES_AT_ONCE", 5)
    chunks, names, matrix = 64 // chunk, torch.randperm(20)[:15].view(3, 5), random_rotation(dim, "sketch")
    q, keys = 2 * torch.randn(3, heads * group, dim), torch.randn(20, heads, chunks, chunk, dim)
    codes, scale = pack_sketch(keys, matrix)
    excluded = torch.rand(20, heads, chunks) < 0.3
    counts = torch.tensor([5 * chunks, chunks + 1, 0])
    scale = scale.masked_fill(excluded.unsqueeze(-1), math.nan).flatten(2)
    logits, lse = sketch_scores(q, codes, scale, excluded, names, counts, matrix)
    assert logits.shape == (3, heads, group, 5 * chunks)
    assert lse.shape == (3, heads, group, 1)
    rotated = (q @ matrix).double()
    unit = rotated.abs().amax(-1, keepdim=True) / 127
    whole = (rotated / unit).round() * unit
    estimate = unpack_sketch(codes, scale.unflatten(2, (chunks, chunk)), dim).double()
    for b in range(3):
        for h in range(heads):
            own = torch.cat([estimate[name, h] for name in names[b]])
            allowed = ~torch.cat([excluded[name, h] for name in names[b]]) & (torch.arange(5 * chunks) < counts[b])
            for g in range(group):
                exact = (own @ whole[b, h * group + g] / math.sqrt(dim)).logsumexp(-1)
                exact = exact.masked_fill(~allowed, -math.inf)
                # A coordinate halfway between two whole numbers may be rounded either way.
                torch.testing.assert_close(logits[b, h, g].double(), exact, atol=0.02, rtol=0)
                assert_close(lse[b, h, g, 0], logits[b, h, g].double().logsumexp(-1))


def brute_force(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    shares = (logits.double() - lse.double().logsumexp(-1, keepdim=True)).nan_to_num(-math.inf, neginf=-math.inf)
    return shares.amax(2)


@pytest.mark.parametrize("budgets", [[5, 1, 9], [40, 0, 2], [0, 0, 0]])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_largest_shares_are_selected(seed, budgets, parts):
    logits = 3 * torch.randn(3, 2, 4, 24)
    logits = logits.masked_fill(torch.rand(3, 2, 1, 24) < 0.4, -math.inf)
    logits[1, 1] = -math.inf
    logits[0, 0, 2, 5], logits[0, 0, :, 6] = math.nan, math.nan
    lse = logits.nan_to_num(-math.inf, neginf=-math.inf).unflatten(-1, (parts, -1)).logsumexp(-1)
    selected = select_top_chunks(logits, lse, torch.tensor(budgets), 40)
    assert selected.shape == (3, 2, 40)
    scores = brute_force(logits, lse)
    for b in range(3):
        for h in range(2):
            order = [at for at in scores[b, h].argsort(descending=True).tolist() if scores[b, h, at] > -math.inf]
            expected = order[: budgets[b]]
            assert sorted(selected[b, h, : len(expected)].tolist()) == sorted(expected)
            assert (selected[b, h, len(expected) :] == -1).all()
