"""Draws of chunks: where they are allowed, what they stand for, and that they estimate what was not found."""

import pytest
import torch

from shadowkv.ops.draw_chunks.reference import draw_chunks, mix

HEADS, PAGES = 2, 20


def problem(chunks: int, counts: list[int], found: list[int], drawn: list[int], k: int) -> tuple[torch.Tensor, ...]:
    """Rows with so many chunks, of which ``found`` are found at random; the columns behind hold what was there."""
    batch = len(counts)
    names = torch.randperm(batch * PAGES).view(batch, PAGES)
    excluded = torch.rand(batch * PAGES, HEADS, chunks) < 0.1
    selected = torch.full((batch, HEADS, k), -1)
    for row, (count, some) in enumerate(zip(counts, found)):
        for head in range(HEADS):
            selected[row, head, :some] = torch.randperm(count)[:some].sort().values
    return selected, 0, excluded, names, torch.tensor(counts), torch.tensor(found), torch.tensor(drawn)


@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_drawn_chunks_are_allowed_ones_of_their_run_and_the_found_ones_stay(chunks: int) -> None:
    counts, found, drawn = [20 * chunks, 7 * chunks, chunks, 0], [8, 3, 1, 0], [12, 5, 0, 0]
    args = problem(chunks, counts, [min(f, c) for f, c in zip(found, counts)], drawn, 24)
    selected, excluded, pages = args[0].clone(), args[2], args[3]
    draw_chunks(selected, *args[1:], torch.tensor([5, 6, 7, 8]), 3)
    for row, (count, runs) in enumerate(zip(counts, drawn)):
        for head in range(HEADS):
            first = int(args[5][row])
            before, after = selected[row, head, :first].tolist(), selected[row, head, first:].tolist()
            assert before == args[0][row, head, :first].tolist()
            got = [chunk for chunk in after if chunk >= 0]
            assert after == got + [-1] * (len(after) - len(got))
            assert len(got) <= runs and got == sorted(set(got)) and not set(got) & set(before)
            owners = [next(i for i in range(runs) if i * count // runs <= x < (i + 1) * count // runs) for x in got]
            assert len(set(owners)) == len(got)
            assert not any(excluded[pages[row, x // chunks], head, x % chunks] for x in got)


def test_nothing_is_drawn_where_fewer_were_found() -> None:
    args = problem(64, [1000, 1000], [10, 10], [20, 20], 40)
    args[0][1, 0, 9] = -1
    selected = args[0].clone()
    draw_chunks(selected, *args[1:], torch.tensor([3, 4]), 0)
    assert selected[1, 0].equal(args[0][1, 0])
    assert (selected[0, :, 10] >= 0).all() and selected[1, 1, 10] >= 0


def test_weighted_draws_estimate_the_sum_over_all_that_may_be_drawn_and_were_not_found() -> None:
    count, runs, times = 1000, 40, 4000
    selected, _, excluded, pages, *rest = problem(64, [count], [60], [runs], 100)
    values = torch.rand(count, dtype=torch.float64) ** 8
    left = torch.ones(HEADS, count, dtype=torch.bool)
    for head in range(HEADS):
        left[head, selected[0, head, :60]] = False
        left[head] &= ~excluded[pages[0].repeat_interleave(64)[:count], head, torch.arange(count) % 64]
    big = [selected.repeat(times, 1, 1), 0, excluded, pages.repeat(times, 1), *(x.repeat(times) for x in rest)]
    draw_chunks(*big, torch.arange(times) + 30000, 0)
    tail = big[0][:, :, 60:]
    sums = (values[tail.clamp(min=0)] * (tail >= 0)).sum(-1) * count / runs  # [times, H]
    error = sums.std(0) / times**0.5
    assert ((sums.mean(0) - (values * left).sum(-1)).abs() < 4 * error).all()


def test_chunks_before_the_first_are_never_drawn_and_the_others_all_are() -> None:
    selected = torch.full((500, HEADS, 30), -1)
    rows = [torch.full((500,), n) for n in (40, 0, 30)]
    draw_chunks(selected, 10, None, torch.zeros(500, 1, dtype=torch.int64), *rows, torch.arange(500), 0)
    assert selected.unique().tolist() == list(range(10, 40))
    few = torch.full((1, HEADS, 4), -1)
    draw_chunks(few, 10, None, torch.zeros(1, 1, dtype=torch.int64), *torch.tensor([[10], [0], [4], [1]]), 0)
    assert (few == -1).all()


def test_other_seeds_layers_and_heads_draw_elsewhere_and_equal_ones_the_same() -> None:
    def draw(seed: int, layer: int) -> torch.Tensor:
        selected = torch.full((1, HEADS, 50), -1)
        pages, none = torch.arange(PAGES).view(1, -1), torch.zeros(PAGES, HEADS, 64, dtype=torch.bool)
        numbers = (torch.tensor([n]) for n in (64 * PAGES, 0, 50, seed))
        draw_chunks(selected, 0, none, pages, *numbers, layer)
        return selected

    once = draw(1, 0)
    assert draw(1, 0).equal(once) and not once[:, 0].equal(once[:, 1])
    assert not draw(2, 0).equal(once) and not draw(1, 1).equal(once)


def test_the_hash_spreads_neighbours_evenly() -> None:
    counts = torch.bincount(mix(torch.arange(1 << 16)) >> 26, minlength=64).double()
    assert mix(torch.arange(1 << 16)).unique().numel() == 1 << 16
    assert ((counts - 1024).square().sum() / 1024) < 120  # chi squared, 63 degrees of freedom
