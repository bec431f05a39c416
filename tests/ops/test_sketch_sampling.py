"""Sampling by a key sketch: the samples and their weights, and that weighted sums estimate the sums over all tokens."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shadowkv.ops.sampling import CAUTION, Sampling, mix, row_seeds, systematic_sample
from shadowkv.ops.select_by_sketch.reference import kept_runs, sampled_runs
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, pack_sketch, sign_scores
from shadowkv.ops.sketch_queries.reference import sketch_queries

TIMES = 400
"""Rows with equal tokens and queries, and different seeds."""


def uniform(*shape: int) -> Tensor:
    return torch.randint(0, 2**32, shape)


def select(values: Tensor, sure: int, wanted: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Samples rows [n, m] of values, each with its own random number."""
    rows = len(values)
    numbers = (torch.full((rows,), sure), torch.full((rows,), wanted), torch.full((rows,), factor), uniform(rows))
    return systematic_sample(values.half(), *numbers)


def fewest(values: Tensor, sure: int, wanted: int, factor: float) -> int:
    """The least number that any sample of float16 [n] selects, by definition. Whole bins of the largest values have
    probability 1. The other probabilities sum up to ``CAUTION`` of the rest, minus what would be above 1."""
    some = values[values.isfinite()]
    magnitude = some.view(torch.int16).int() & 0x7FFF
    bins = torch.where(some < 0, -1 - magnitude, magnitude) >> 5
    certain = (bins >= bins[:, None]).sum(-1) <= sure
    weights, number = (factor * some[~certain].double()).exp2(), int(certain.sum())
    chances = (CAUTION * (wanted - number) * weights / weights.sum()).clamp(max=1)
    return int(number + chances.sum() - 0.01)


def nearly(wanted: int) -> int:
    """The least number that is selected of ``wanted`` if no probability is limited to 1, as for the logits here."""
    return int(CAUTION * wanted)


@pytest.mark.parametrize(("sure", "wanted"), [(0, 1), (0, 7), (30, 100), (100, 3000)])
def test_every_number_is_selected_as_often_as_its_chance_says(seed, sure, wanted):
    values = 2 * torch.randn(5000)
    values[[0, 17, 4999]] = torch.tensor([-math.inf, 30.0, -math.inf])
    chosen, chance = select(values.expand(TIMES, -1), sure, wanted, 0.7)
    certain = chance[0] == 1
    assert not chosen[:, [0, 4999]].any() and chosen[:, certain].all()
    assert (chosen.sum(-1) - chance.sum(-1)).abs().max() < 1.01 and (chosen.sum(-1) <= wanted).all()
    assert (chosen.sum(-1) >= fewest(values.half(), sure, wanted, 0.7)).all()
    deviation = chosen.float().mean(0) - chance[0]
    assert deviation.abs().max() < 7 * (0.25 / TIMES) ** 0.5  # the largest of thousands that are not independent


def test_chances_are_in_proportion_to_weights(seed):
    values = 2 * torch.randn(3, 700)
    _, chance = select(values, 0, 20, 0.5)
    log = chance.log2() - 0.5 * values.half().float()
    for row in range(3):
        some = (chance[row] < 1) & (chance[row] > 1e-3)
        assert log[row, some].max() - log[row, some].min() < 0.01
    assert (chance.sum(-1) <= 20 * CAUTION + 1e-3).all()
    assert all(chance[row].sum() >= fewest(values[row].half(), 0, 20, 0.5) for row in range(3))


def test_the_sure_ones_are_whole_bins(seed):
    values = torch.tensor([[-math.inf, 3.0, 1.0, 1.01, 1.0, -2.0, -0.0, 5.0, -math.inf]])

    def sure(most: int) -> list[int]:
        _, chance = select(values, most, most + 1, 0.0)  # all others alike
        return (chance[0] == 1).nonzero().flatten().tolist()

    assert [sure(most) for most in (1, 2, 3, 4)] == [[7], [1, 7], [1, 7], [1, 7]]  # 1 and 1.01 share a bin
    assert sure(5) == [1, 2, 3, 4, 7] and sure(9) == [1, 2, 3, 4, 5, 6, 7]
    many = torch.randn(1, 3000)
    chosen, chance = select(many, 700, 701, 0.0)
    certain = chance[0] == 1
    assert 500 < certain.sum() <= 700
    assert many[0, certain].min() > many[0, ~certain].max() - 0.01
    assert chosen[0, certain].all()


def test_nothing_is_selected_where_nothing_may_be_or_none_is_wanted(seed):
    chosen, chance = select(torch.full((2, 9), -math.inf), 3, 4)
    assert not chosen.any() and not chance.any()
    assert not select(torch.ones(2, 9), 0, 0)[0].any()
    assert (select(torch.ones(2, 9), 0, 9)[0].sum(-1) >= 8).all()


def test_many_samples_do_not_overflow(seed):
    chosen, _ = select(torch.ones(1, 1 << 18), 0, 1 << 17)
    assert abs(int(chosen.sum()) - CAUTION * (1 << 17)) < 20


def problem(pages: int, chunk: int, times: int, dim: int = 64) -> tuple[dict, Tensor, Tensor]:
    """Arguments with ``times`` equal rows, attention logits of all tokens [H, G, tokens], and the excluded tokens."""
    keys = torch.randn(pages, 2, 64, dim) + torch.randn(2, 1, dim)
    excluded = (torch.rand(pages, 2, 64 // chunk) < 0.1).repeat_interleave(chunk, -1)
    signs, rest, scale = pack_sketch(keys)
    scale = scale.masked_fill(excluded, EXCLUDED_SCALE)
    q = torch.randn(1, 6, dim)  # longer ones have logits whose estimates have heavy tails
    logits = torch.einsum("hgd,phtd->hgpt", q.view(2, 3, dim), keys).flatten(2) * dim**-0.5
    eye, states = torch.eye(dim).bfloat16().expand(1, 2, -1, -1), torch.zeros(times, dtype=torch.int64)
    queries = sketch_queries(q.expand(times, -1, -1), eye, states)
    page_ids = torch.randperm(pages)
    logits = logits.unflatten(-1, (pages, 64))[:, :, page_ids].flatten(2)
    excluded = excluded.transpose(0, 1)[:, page_ids].flatten(1)
    places = page_ids.expand(times, -1), torch.full((times,), pages)
    coarse = sign_scores(queries, signs, scale, *places)
    args = {"queries": queries, "coarse": coarse, "signs": signs, "rest": rest, "scale": scale, "chunk": chunk}
    return args | {"pages": places[0], "num_pages": places[1]}, logits, excluded


@pytest.mark.parametrize("chunk", [1, 4])
def test_weighted_sums_over_a_selection_are_those_over_all_that_may_be_selected(ops, seed, chunk):
    args, logits, excluded = problem(120, chunk, TIMES)
    top_k, sampled = 64 // chunk, 48 // chunk
    budget, sampling = torch.full((TIMES,), top_k), Sampling(torch.full((TIMES,), sampled), torch.arange(TIMES) + 30000)
    chunks, log_weight = ops.select_by_sketch(budget=budget, k=top_k + sampled, sampling=sampling, layer=3, **args)
    assert ((chunks >= 0).sum(-1) >= nearly(top_k + sampled)).all()
    weights = logits.softmax(-1).mean(1).masked_fill(excluded, 0).unflatten(-1, (-1, chunk)).sum(-1)
    sums = weights.expand(TIMES, -1, -1).gather(-1, chunks.clamp(min=0)) * log_weight.exp().masked_fill(chunks < 0, 0)
    estimate, total = sums.sum(-1), weights.sum(-1)  # [TIMES, H], [H]
    assert ((estimate.mean(0) - total).abs() < 5 * estimate.std(0) / TIMES**0.5).all()
    assert (estimate.std(0) < total).all()
    alone, _ = ops.select_by_sketch(budget=budget[:1], k=top_k, **one(args))
    assert (weights.gather(-1, alone[0]).sum(-1) < 0.9 * total).all()  # there was something to estimate


def one(args: dict) -> dict:
    """The arguments of the first row."""
    queries = args["queries"]
    first = type(queries)(**{name: value[:1] for name, value in vars(queries).items()})
    return args | {"queries": first} | {name: args[name][:1] for name in ("coarse", "pages", "num_pages")}


@pytest.mark.parametrize("chunk", [1, 8])
def test_what_is_sampled_may_be_selected_was_not_found_and_counts_as_its_chance_says(ops, seed, chunk):
    args, _, excluded = problem(150, chunk, 4)
    budget, counts = torch.tensor([40, 40, 7, 0]), torch.tensor([30, 0, 50, 5])
    chunks, log_weight = ops.select_by_sketch(budget=budget, k=72, sampling=Sampling(counts, torch.arange(4)), **args)
    keep = kept_runs(args["num_pages"], budget + counts, chunk)
    assert sampled_runs(args["num_pages"], keep, Sampling(counts, counts)).tolist() == [
        int(keep[0]) // 4, 0, int(keep[2]) // 4, int(keep[3]) // 4,
    ]  # fmt: skip
    barred = excluded.unflatten(-1, (-1, chunk)).any(-1)
    for row in range(4):
        for head in range(2):
            some = [at for at in chunks[row, head].tolist() if at >= 0]
            assert chunks[row, head].tolist() == some + [-1] * (72 - len(some))
            assert len(set(some)) == len(some) <= budget[row] + counts[row]
            assert len(some) >= nearly(int(budget[row] + counts[row])) or row == 3  # which finds none
            assert not barred[head, some].any()
            assert (log_weight[row, head, : len(some)] >= 0).all()
    assert (chunks[3] == -1).all()
    alone, _ = ops.select_by_sketch(budget=torch.tensor([40]), k=40, **one(args))
    assert torch.equal(chunks[1, :, :40], alone[0])  # a row that samples nothing is one where nothing is sampled
    assert not log_weight[1, :, :40].any()


def test_all_of_a_short_context_is_looked_at(ops, seed):
    args, _, excluded = problem(3, 1, TIMES)
    budget, counts = torch.full((TIMES,), 32), torch.full((TIMES,), 32)
    chunks, log_weight = ops.select_by_sketch(
        budget=budget, k=64, sampling=Sampling(counts, torch.arange(TIMES)), **args
    )
    assert ((chunks >= 0).sum(-1) >= nearly(64)).all()
    top_k = (log_weight == 0).sum(-1)
    assert (top_k > 16).all() and (top_k < 40).all()
    ones = log_weight.exp().masked_fill(chunks < 0, 0).sum(-1).mean(0)
    torch.testing.assert_close(ones, (~excluded).sum(-1).float(), rtol=0.1, atol=0)


def test_samples_depend_on_the_seed_the_layer_and_the_head_alone(ops, seed):
    args, _, _ = problem(150, 1, 3)

    def select(seeds: list[int], layer: int) -> Tensor:
        sampling = Sampling(torch.full((3,), 40), torch.tensor(seeds))
        return ops.select_by_sketch(budget=torch.full((3,), 40), k=80, sampling=sampling, layer=layer, **args)[0]

    once = select([5, 5, 6], 0)
    assert ((once >= 0).sum(-1) >= nearly(80)).all()
    assert torch.equal(once[0], once[1]) and not torch.equal(once[0], once[2])
    assert torch.equal(select([6, 7, 5], 0)[2], once[0])
    assert not torch.equal(select([5, 5, 6], 1)[0], once[0])
    numbers = Sampling(torch.zeros(1, dtype=torch.int64), torch.tensor([5])).uniform(0, 1000)
    assert len({int(x) for x in torch.cat(numbers).flatten()}) > 1990


def test_a_row_selects_the_same_alone_and_in_any_batch(ops, seed):
    """Of a page table as wide as its own and of one as wide as the longest row's."""
    pages, rows, chunk = 300, 48, 1
    signs, rest, scale = pack_sketch(torch.randn(pages, 2, 64, 64))
    queries = sketch_queries(
        torch.randn(rows, 6, 64), torch.eye(64).bfloat16().expand(1, 2, -1, -1), torch.zeros(rows, dtype=torch.int64)
    )
    page_ids, num_pages = torch.randint(pages, (rows, pages)), torch.randint(80, 180, (rows,))
    num_pages[1], num_pages[-1] = pages, 1
    budget, counts, seeds = torch.randint(1, 200, (3, rows))

    def select(first: int, last: int) -> tuple[Tensor, Tensor]:
        own = slice(first, last)
        some = type(queries)(**{name: x[own].contiguous() for name, x in vars(queries).items()})
        places = page_ids[own, : int(num_pages[own].max())].contiguous(), num_pages[own]
        coarse, sampling = ops.sign_scores(some, signs, scale, *places), Sampling(counts[own], seeds[own])
        k = int((budget + counts)[own].max())
        return ops.select_by_sketch(some, coarse, signs, rest, scale, *places, budget[own], chunk, k, sampling, 3)

    for size in (2, 7, rows):
        chunks, log_weight = select(0, size)
        for row in range(size):
            (alone,), (own_weight,) = select(row, row + 1)
            width = alone.shape[-1]
            assert torch.equal(chunks[row, :, :width], alone) and (chunks[row, :, width:] == -1).all()
            there = alone >= 0
            # Logarithms of several numbers at once may differ from those of one in their last bits.
            torch.testing.assert_close(log_weight[row, :, :width][there], own_weight[there], rtol=1e-5, atol=1e-5)


def test_seeds_of_rows_are_hashes_of_request_position_and_segment():
    requests = np.repeat(np.array([0, 1, 2**64 - 1], np.uint64), 2000)
    positions, first = np.tile(np.arange(1000), 6), np.tile(np.repeat([0, 64], 1000), 3)
    made = row_seeds(requests, positions, first)
    assert made.dtype == np.int64 and made.min() >= 0 and made.max() < 2**32
    assert len(set(made.tolist())) == len(made)
    assert abs(made.mean() / 2**31 - 1) < 0.05
    assert np.array_equal(row_seeds(requests[7:8], positions[7:8], first[7:8]), made[7:8])
    # Pinned: answers of a seed are not to change unnoticed.
    assert row_seeds(np.array([11], np.uint64), np.array([1234]), np.array([64])).tolist() == [3751012753]


def test_the_hash_is_lowbias32():
    assert mix(torch.tensor([0, 1, 2**32 + 1])).tolist() == [0, *([int(mix(torch.tensor(1)))] * 2)]
    assert math.isclose(float(mix(torch.arange(4096)).double().mean()), 2**31, rel_tol=0.05)
