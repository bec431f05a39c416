"""The 2-bit key sketch and the ops that search it, in PyTorch, against brute force."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.select_by_sketch.reference import KEPT_LEAST, KEPT_OVER_BUDGET, KEPT_SHARE, kept_runs
from shadowkv.ops.select_top_chunks.reference import select_top_chunks
from shadowkv.ops.sign_scores import reference
from shadowkv.ops.sign_scores.reference import (
    EXCLUDED_SCALE,
    LARGEST_SCALE,
    decode_scale,
    encode_scale,
    pack_sketch,
    plane_bits,
)
from shadowkv.ops.sketch_keys import reference as sketching
from shadowkv.ops.sketch_queries.reference import SketchQueries
from shadowkv.ops.sketch_queries.reference import sketch_queries as sketch

NAN_SCALE = 255
"""A code that decodes to NaN. No scale has it."""

dims = pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])


def sketch_queries(q: Tensor, matrix: Tensor) -> SketchQueries:
    """Queries for a sketch, of rows that share one map, [d, d] for one kv head or [H, d, d]."""
    return sketch(q, matrix.view(1, -1, *matrix.shape[-2:]), torch.zeros(len(q), dtype=torch.int64))


def unpacked(signs: Tensor, rest: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Keys multiplied by the rotation, as a sketch represents them, float64 [..., d]."""
    levels = 2.0 * plane_bits(signs, dim) + plane_bits(rest, dim) - 1.5
    return levels.double() * decode_scale(scale).double().unsqueeze(-1)


def test_every_code_of_a_scale_is_a_number_of_its_own_and_made_of_that_again():
    codes = torch.arange(248, dtype=torch.uint8)
    scales = decode_scale(codes)
    assert scales.dtype == torch.float32 and scales.isfinite().all()
    assert (scales.diff() > 0).all()
    assert (scales[EXCLUDED_SCALE], scales[1], scales[8], scales[-1]) == (0, 2**-17, 2**-14, LARGEST_SCALE)
    assert torch.equal(encode_scale(scales[1:]), codes[1:])
    assert decode_scale(torch.tensor([NAN_SCALE], dtype=torch.uint8)).isnan()


def test_scales_are_the_nearest_that_there_are():
    scales = torch.logspace(math.log10(6.2e-5), math.log10(57344), 100_000, dtype=torch.float64).float()
    found = decode_scale(encode_scale(scales))
    error = (found / scales - 1).abs()
    assert error.max() <= 1 / 16 + 2**-11
    assert 0.02 < error.square().mean().sqrt() < 0.027
    every = decode_scale(torch.arange(1, 248, dtype=torch.uint8))
    nearest = (every - scales[::100, None]).abs().amin(1)
    assert ((found - scales)[::100].abs() <= nearest + 2**-10 * scales[::100]).all()  # both sides of a tie are near


def test_scales_that_are_no_such_numbers_have_the_least_code_or_the_largest():
    scales = torch.tensor([0.0, -0.0, -3.0, math.nan, -math.nan, -math.inf, 1e-30, 63000.0, 65504.0, 1e30, math.inf])
    assert encode_scale(scales).tolist() == [1] * 7 + [247] * 4
    assert encode_scale(torch.empty(2, 0)).shape == (2, 0)


@dims
def test_the_rotation_is_orthogonal_and_always_the_same(dim):
    matrix = random_rotation(dim, "sketch")
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=2e-6, rtol=0)
    torch.manual_seed(dim + 1)
    assert torch.equal(matrix, random_rotation(dim, "sketch"))


@dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_quantized_coordinates_at_their_places(seed, dim, dtype):
    keys, matrix = (3 * torch.randn(2, 5, dim)).to(dtype), random_rotation(dim, "sketch")
    signs, rest, scale = pack_sketch(keys.float() @ matrix)
    assert (signs.dtype, rest.dtype, scale.dtype) == (torch.uint8, torch.uint8, torch.uint8)
    assert signs.shape == rest.shape == (2, 5, math.ceil(dim / 64) * 8)
    assert not signs[..., dim // 8 :].any()
    assert not rest[..., dim // 8 :].any()
    x = keys.float() @ matrix
    for place in [(0, 0), (1, 4)]:
        sigma = x.norm(dim=-1)[place] / math.sqrt(dim)
        levels = (x[place] / (0.9957 * sigma)).floor().add(2).clamp(0, 3)

        def bit(plane: Tensor, at: int, place: tuple[int, int] = place) -> int:
            return int(plane[place][at % (dim // 8)]) >> at // (dim // 8) & 1

        assert [2 * bit(signs, at) + bit(rest, at) for at in range(dim)] == levels.tolist()
        assert [bit(signs, at) for at in range(dim)] == (x[place] >= 0).tolist()
        factor = decode_scale(scale[place])
        estimate = factor * (levels - 1.5) @ x[place]
        torch.testing.assert_close(estimate, keys[place].float().square().sum(), rtol=0.064, atol=0)
        assert torch.equal(unpacked(signs, rest, scale, dim)[place], factor.double() * (levels - 1.5).double())


@pytest.mark.parametrize("states", [[4, 0, 2, 2, 1], [3]], ids=str)
def test_pages_may_be_sketched_in_any_number_of_steps(seed, monkeypatch, states):
    keys, mean, maps = torch.randn(2, 5, 64, 3, 16), torch.randn(2, 6, 3, 16), torch.randn(2, 6, 3, 16, 16).bfloat16()
    pages, results = torch.tensor([6, 1, 0, 4, 2]), []
    for at_once in (10, 4, 1):
        monkeypatch.setattr(sketching, "SKETCHED_AT_ONCE", at_once)
        fields = [torch.full((2, 7, 3, 64, *size), 99, dtype=torch.uint8) for size in ([8], [8], [])]
        sketching.sketch_keys(keys, mean, maps, torch.tensor(states), *fields, pages)
        results.append(fields)
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))
    assert all((field[:, [3, 5]] == 99).all() for field in results[0])


def test_a_sketch_of_gaussian_keys_keeps_most_of_them(seed):
    keys, matrix = torch.randn(4000, 128), random_rotation(128, "sketch")
    x = keys @ matrix
    error = (unpacked(*pack_sketch(x), 128) - x).square().sum() / x.square().sum()
    assert 0.11 < error < 0.15  # the best 4-level quantizer leaves 0.119 of a Gaussian's variance


def test_a_key_of_zero_or_not_finite_has_the_least_scale_and_a_huge_one_the_largest():
    keys = torch.zeros(5, 64)
    keys[1, 5], keys[2, 5], keys[3, 5], keys[4, 5] = 1e15, math.nan, math.inf, -math.inf
    assert pack_sketch(keys @ random_rotation(64, "sketch"))[2].tolist() == [1, 247, 1, 1, 1]


@dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_the_rounded_coordinates_at_their_places(seed, dim, dtype):
    q, matrix = (3 * torch.randn(2, 5, dim)).to(dtype), random_rotation(dim, "sketch")
    queries, size = sketch_queries(q, matrix), math.ceil(dim / 64) * 8
    assert (queries.whole.dtype, queries.whole.shape) == (torch.int8, (2, 5, 8, size))
    assert (queries.planes.dtype, queries.planes.shape) == (torch.uint8, (2, 5, 4, size))
    assert (queries.unit.dtype, queries.unit.shape) == (torch.float32, (2, 5))
    assert (queries.sum.dtype, queries.sum.shape) == (torch.int32, (2, 5))
    assert not queries.whole[..., dim // 8 :].any()
    assert torch.equal(queries.whole.abs().amax((2, 3)), torch.full((2, 5), 127, dtype=torch.int8))
    x = (q.float() @ matrix).double()
    x /= q.double().norm(dim=-1, keepdim=True)
    for b, h in [(0, 0), (1, 4)]:
        for at in range(dim):
            whole = int(queries.whole[b, h, at // (dim // 8), at % (dim // 8)])
            assert abs(float(queries.unit[b, h]) * whole - float(x[b, h, at])) <= 0.501 * float(queries.unit[b, h])
            bits = [int(plane[at % (dim // 8)]) >> at // (dim // 8) & 1 for plane in queries.planes[b, h]]
            assert sum(bit << i for i, bit in enumerate(bits)) == min((whole + 8) // 16, 7) % 16
        assert int(queries.sum[b, h]) == int(queries.whole[b, h].long().sum())
        assert int(queries.plane_sum[b, h]) == int(((queries.whole[b, h].long() + 8) // 16).clamp(max=7).sum())


def problem(heads: int, group: int, dim: int, chunk: int, pages: list[int]) -> tuple[dict[str, Any], Tensor]:
    """Arguments of both ops with shuffled random pages, whose scales are NaN past a row's end; and the queries, scaled
    to length 1, mapped and rounded to 255 levels, float64 [B, H, G, d]."""
    most, matrix = max(pages), random_rotation(dim, "sketch")
    maps = matrix + 0.2 * torch.randn(heads, dim, dim) / dim**0.5
    page_ids = torch.randperm(len(pages) * most + 1)[: len(pages) * most].view(len(pages), most)
    signs, rest, scale = pack_sketch(torch.randn(len(pages) * most + 1, heads, 64, dim) @ matrix)
    for row, count in enumerate(pages):
        scale[page_ids[row, count:]] = NAN_SCALE
    q = 2 * torch.randn(len(pages), heads * group, dim)
    mapped = (q.unflatten(1, (heads, -1)) @ maps).flatten(1, 2).double()
    step = mapped.abs().amax(-1, keepdim=True) / 127
    rounded = (mapped / step).round() * step / q.double().norm(dim=-1, keepdim=True)
    args = {
        "queries": sketch_queries(q, maps),
        "signs": signs,
        "rest": rest,
        "scale": scale,
        "pages": page_ids,
        "num_pages": torch.tensor(pages),
    }
    excluded = (torch.rand(*scale.shape[:2], 64 // chunk) < 0.2).repeat_interleave(chunk, -1)
    args["scale"] = scale.masked_fill(excluded & (scale != NAN_SCALE), EXCLUDED_SCALE)
    return args, rounded.unflatten(1, (heads, -1))


sizes = pytest.mark.parametrize(
    ("heads", "group", "dim", "chunk"), [(2, 3, 64, 1), (1, 7, 96, 2), (3, 4, 32, 4), (2, 1, 128, 8), (1, 11, 256, 2)]
)


@sizes
def test_sign_scores_are_the_best_of_a_runs_tokens_and_a_groups_queries(
    ops, seed, monkeypatch, heads, group, dim, chunk
):
    monkeypatch.setattr(reference, "UNPACKED_AT_ONCE", 5)
    args, _ = problem(heads, group, dim, chunk, [5, 1, 0])
    del args["rest"]
    scores = ops.sign_scores(**args)
    assert (scores.shape, scores.dtype) == ((3, heads, 40), torch.float16)
    for b in range(3):
        count = int(args["num_pages"][b])
        assert (scores[b, :, 8 * count :] == -math.inf).all()
        own = args["pages"][b, :count]
        levels = (2.0 * plane_bits(args["signs"][own], dim) - 1) * decode_scale(args["scale"][own]).unsqueeze(-1)
        tokens = levels.transpose(0, 1).flatten(1, 2).double()  # [H, tokens, d]
        unit = args["queries"].unit[b].double().view(heads, -1, 1)
        whole = args["queries"].whole[b, ..., : dim // 8].flatten(-2).unflatten(0, (heads, -1)).double()
        rounder = 16 * unit * ((whole + 8) / 16).floor().clamp(max=7)
        expected = (tokens @ rounder.transpose(1, 2)).amax(-1).unflatten(-1, (-1, 8)).amax(-1)
        torch.testing.assert_close(scores[b, :, : 8 * count].double(), expected, atol=2e-3, rtol=1e-3)


def test_sign_scores_of_a_query_of_zero_are_zero_and_huge_ones_finite(ops, seed):
    args, _ = problem(1, 2, 64, 8, [2])
    del args["rest"]
    zeros = sketch_queries(torch.zeros(1, 2, 64), random_rotation(64, "sketch"))
    assert not ops.sign_scores(**args | {"queries": zeros}).any()
    assert ops.sign_scores(**args | {"scale": torch.full_like(args["scale"], 247)}).isfinite().all()


@pytest.mark.parametrize("budgets", [[20, 3, 0, 7], [1, 64, 5, 0]])
@sizes
def test_selection_is_the_best_chunks_of_the_kept_runs(ops, seed, heads, group, dim, chunk, budgets):
    args, queries = problem(heads, group, dim, chunk, [100, 1, 0, 120])
    coarse = torch.rand(4, heads, 960).argsort(dim=-1).half()  # no ties, of which an op may keep either
    coarse.masked_fill_(torch.arange(960) >= 8 * args["num_pages"][:, None, None], -math.inf)
    k = max(budgets)
    selected, none = ops.select_by_sketch(coarse=coarse, budget=torch.tensor(budgets), chunk=chunk, k=k, **args)
    assert selected.shape == (4, heads, k) and none is None
    keep = kept_runs(args["num_pages"], torch.tensor(budgets), chunk)
    for b in range(4):
        runs = 8 * int(args["num_pages"][b])
        wanted = max(KEPT_LEAST, -(-runs // KEPT_SHARE), -(-budgets[b] * chunk * KEPT_OVER_BUDGET // 8))
        assert int(keep[b]) == (min(runs, wanted) if budgets[b] else 0)
        own = args["pages"][b, : runs // 8]
        tokens = unpacked(args["signs"][own], args["rest"][own], args["scale"][own], dim)
        for h in range(heads):
            lengths = args["queries"].length[b].double().view(heads, -1)[h]
            logits = lengths * (tokens[:, h].flatten(0, 1) @ queries[b, h].T)
            scores = logits.amax(-1).unflatten(0, (-1, chunk)).amax(-1)
            excluded = args["scale"][own, h].flatten() == EXCLUDED_SCALE
            scores[excluded.unflatten(0, (-1, chunk)).all(-1)] = -math.inf
            kept = coarse[b, h, :runs].sort(descending=True).values[: int(keep[b])]
            allowed = (coarse[b, h, :runs] >= kept.min()) if len(kept) else torch.zeros(runs, dtype=torch.bool)
            scores[~allowed.repeat_interleave(8 // chunk)] = -math.inf
            found = [at for at in selected[b, h].tolist() if at >= 0]
            assert found == sorted(set(found))
            assert (selected[b, h, len(found) :] == -1).all()
            best = [at for at in scores.argsort(descending=True).tolist() if scores[at] > -math.inf]
            assert len(found) == min(budgets[b], len(best))
            least = min((scores[at] for at in best[: budgets[b]]), default=math.inf)
            assert all(scores[at] >= least - 0.03 for at in found)


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
