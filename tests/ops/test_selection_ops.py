"""Chunk scores, top-k and outliers against brute force."""

import math

import pytest
import torch
from plain_formulas import SHAPES, assert_close, group_shares, poison

from shadowkv.ops.select_top_chunks.reference import select_top_chunks

shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)


def scoring_case(heads: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """4 ragged sequences in 20 pages: page ids, chunks of each sequence, excluded chunks of all pages, and the chunks
    of each sequence that may not be selected."""
    pages = torch.randperm(20)[:12].view(4, 3)
    ends = torch.tensor([3 * chunks, 2 * chunks + 1, 1, 0])  # the last sequence has nothing to select
    field = torch.rand(20, heads, chunks) < 0.3
    field[pages[2, 0], :, 0] = False
    excluded = field[pages].transpose(1, 2).flatten(2)
    return pages, ends, field, excluded | (torch.arange(3 * chunks) >= ends[:, None, None])


def shares(scores: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Softmax shares, the largest of each group, -inf where a chunk may not be selected."""
    logits, lse = scores
    assert logits.dtype == lse.dtype == torch.float32
    found = (logits - lse.logsumexp(-1, keepdim=True)).exp().amax(2)
    return found.masked_fill((logits == -math.inf).all(2), -math.inf)


def by_page(excluded: torch.Tensor, pages: torch.Tensor, chunks: int) -> torch.Tensor:
    """bool [20, H, C]: the chunks of pages that some sequence may select."""
    allowed = torch.zeros(20, excluded.shape[1], chunks, dtype=torch.bool)
    for row, page_ids in enumerate(pages.tolist()):
        for column, page_id in enumerate(page_ids):
            allowed[page_id] = ~excluded[row, :, column * chunks : (column + 1) * chunks]
    return allowed


@shapes
@pytest.mark.parametrize("chunks", [8, 1, 4])
def test_chunk_mean_scores_are_products_with_the_landmarks(ops, seed, heads, group, dim, chunks):
    pages, ends, field, excluded = scoring_case(heads, chunks)
    q, landmarks = 3 * torch.randn(4, heads * group, dim), torch.randn(20, 2, heads, chunks, dim)[:, 1]
    landmarks = poison(landmarks, by_page(excluded, pages, chunks))
    found = shares(ops.chunk_mean_scores(q, landmarks, field, pages, ends))
    for b in range(4):
        for h in range(heads):
            keys = torch.cat([landmarks[page_id, h] for page_id in pages[b]]).double()
            logits = q[b, h * group : (h + 1) * group].double() @ keys.T / math.sqrt(dim)
            assert_close(found[b, h], group_shares(logits, ~excluded[b, h]))


@shapes
@pytest.mark.parametrize("chunks", [4, 1])
def test_min_max_scores_are_the_largest_products_within_the_bounds(ops, seed, heads, group, dim, chunks):
    pages, ends, field, excluded = scoring_case(heads, chunks)
    q = torch.randn(4, heads * group, dim)
    q[0, :, 3] = 0
    bounds = torch.randn(20, heads, 2, chunks, dim).sort(dim=2).values
    allowed = by_page(excluded, pages, chunks)
    bounds = poison(bounds.transpose(2, 3), allowed).transpose(2, 3)
    found = shares(ops.min_max_scores(q, bounds, field, pages, ends))
    for b in range(4):
        for h in range(heads):
            low, high = (torch.cat([bounds[page_id, h, end] for page_id in pages[b]]).double() for end in (0, 1))
            queries = q[b, h * group : (h + 1) * group].double().unsqueeze(1)
            logits = torch.maximum(queries * low, queries * high).sum(-1) / math.sqrt(dim)
            assert_close(found[b, h], group_shares(logits, ~excluded[b, h]))


@pytest.mark.parametrize("op", ["chunk_mean_scores", "min_max_scores"])
def test_scores_in_bfloat16_are_float32_and_near_the_exact_ones(ops, seed, op):
    q, keys = torch.randn(2, 6, 64).bfloat16(), torch.randn(3, 2, 2, 8, 64).bfloat16().sort(dim=2).values
    rest = torch.rand(3, 2, 8) < 0.2, torch.tensor([[2, 0], [1, 1]]), torch.tensor([16, 13])
    index = keys if op == "min_max_scores" else keys[:, :, 0]
    found = shares(getattr(ops, op)(q, index, *rest))
    exact = shares(getattr(ops, op)(q.float(), index.float(), *rest))
    torch.testing.assert_close(found, exact, atol=0.01, rtol=0.03)


def test_bounds_of_one_key_score_like_that_key_as_landmark(ops, seed):
    q, keys = torch.randn(2, 6, 64), torch.randn(5, 2, 8, 64)
    rest = torch.rand(5, 2, 8) < 0.2, torch.tensor([[4, 0], [1, 3]]), torch.tensor([16, 16])
    bounds = keys.unsqueeze(2).expand(5, 2, 2, 8, 64)
    torch.testing.assert_close(ops.min_max_scores(q, bounds, *rest), ops.chunk_mean_scores(q, keys, *rest))


def select(ops, scores: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Selects by scores [B, H, n] of one of three query heads. The other two have lower scores."""
    logits = torch.stack((scores - 1, scores, scores - 5), dim=2)
    none = torch.zeros(*logits.shape[:3], 2) - math.log(2)  # two runs whose exponentials add up to 1
    return ops.select_top_chunks(logits, none, budget, min(int(budget.max()), scores.shape[-1]))


def check_selection(scores: torch.Tensor, budget: torch.Tensor, selected: torch.Tensor) -> None:
    """Checks that each row has ``budget`` distinct chunks that may be selected, none of them worse than one left
    out."""
    batch, heads, chunks = scores.shape
    assert selected.shape == (batch, heads, min(int(budget.max()), chunks))
    assert selected.dtype == torch.int64
    for b in range(batch):
        for h in range(heads):
            row = scores[b, h]
            chosen = [place for place in selected[b, h].tolist() if place != -1]
            assert selected[b, h].tolist() == chosen + [-1] * (selected.shape[-1] - len(chosen))
            candidates = set((row > -math.inf).nonzero().flatten().tolist())
            assert len(chosen) == len(set(chosen)) == min(int(budget[b]), len(candidates))
            assert set(chosen) <= candidates
            left = candidates - set(chosen)
            if chosen and left:
                assert row[chosen].min() >= max(row[place] for place in left)


@pytest.mark.parametrize("budgets", [[5, 1, 9, 3], [2, 2, 2, 2], [40, 7, 24, 1], [0, 3, 1, 2], [1, 1, 1, 1]])
def test_select_top_chunks_takes_the_best_of_each_sequence(ops, seed, budgets):
    scores = torch.rand(4, 3, 24).masked_fill(torch.rand(4, 3, 24) < 0.4, -math.inf)
    budget = torch.tensor(budgets)
    check_selection(scores, budget, select(ops, scores, budget))


def test_select_top_chunks_may_break_ties_either_way(ops, seed):
    scores = torch.randint(0, 3, (4, 3, 24)).float().masked_fill(torch.rand(4, 3, 24) < 0.3, -math.inf)
    budget = torch.tensor([4, 11, 24, 1])
    check_selection(scores, budget, select(ops, scores, budget))
    check_selection(torch.zeros(4, 3, 24), budget, select(ops, torch.zeros(4, 3, 24), budget))


@pytest.mark.parametrize("candidates", [0, 1, 3])
def test_select_top_chunks_fills_up_with_minus_one_where_candidates_are_too_few(ops, seed, candidates):
    scores = torch.full((2, 2, 16), -math.inf)
    places = torch.stack([torch.randperm(16)[:candidates] for _ in range(4)]).view(2, 2, candidates)
    scores.scatter_(2, places, torch.rand(2, 2, candidates))
    check_selection(scores, torch.tensor([5, 8]), select(ops, scores, torch.tensor([5, 8])))


def test_every_query_head_of_a_group_counts_by_its_own_share(ops):
    logits = torch.tensor([[5.0, 0, 0, 0], [90, 90, 95, 90]]).view(1, 1, 2, 4)
    selected = ops.select_top_chunks(logits, logits.logsumexp(-1, keepdim=True), torch.tensor([2]), 2)
    assert set(selected.flatten().tolist()) == {0, 2}


def test_of_equal_shares_the_reference_takes_the_first_whatever_the_padding():
    for columns in (40, 41, 700, 5000):
        logits = torch.full((1, 1, 1, columns), -math.inf)
        logits[..., :40] = 1.0
        selected = select_top_chunks(logits, logits.logsumexp(-1, keepdim=True), torch.tensor([13]), 13)
        assert selected.flatten().tolist() == list(range(13))


@pytest.mark.parametrize("mass", [0.2, 0.7, 0.95])
def test_mass_takes_the_fewest_best_chunks_that_reach_it_in_every_query_head(ops, seed, mass):
    logits = (3 * torch.randn(3, 2, 4, 40)).masked_fill((torch.rand(3, 2, 1, 40) < 0.2), -math.inf)
    logits[2, 1] = -math.inf
    shares = torch.nan_to_num(logits.double().softmax(-1))
    lse = torch.stack([run.logsumexp(-1) for run in logits.split(16, dim=-1)], dim=-1)
    budget = torch.tensor([40, 12, 40])
    selected = ops.select_top_chunks(logits, lse, budget, 40, mass)
    assert selected.shape == (3, 2, 40)
    for b in range(3):
        for h in range(2):
            row = selected[b, h].tolist()
            chosen = [place for place in row if place != -1]
            assert row == chosen + [-1] * (40 - len(chosen))
            order = shares[b, h].amax(0).argsort(descending=True).tolist()
            sums = torch.cat((torch.zeros(4, 1), shares[b, h][:, order].cumsum(1)), dim=1).amin(0)
            if (sums - mass).abs().min() < 1e-5:
                continue  # in float32 it may take one more or less
            reached = [n for n in range(41) if (shares[b, h][:, order[:n]].sum(1) >= mass).all()]
            wanted = min(reached[0], int(budget[b])) if reached else 0
            assert set(chosen) == set(order[:wanted])
            assert len(chosen) == wanted


def worst_similarity(rotated: torch.Tensor, chunk: int) -> torch.Tensor:
    """[chunks, H]: smallest cosine between a chunk's mean and one of its members, float64."""
    tokens, heads, _ = rotated.shape
    worst = torch.empty(tokens // chunk, heads, dtype=torch.float64)
    for c in range(tokens // chunk):
        for h in range(heads):
            members = rotated[c * chunk : (c + 1) * chunk, h].double()
            mean = members.mean(0)
            worst[c, h] = min((m @ mean / (m.norm() * mean.norm())).item() for m in members)
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "chunks", "count"), [(8, 20, 5), (8, 2, 1), (4, 9, 8), (16, 5, 0), (2, 30, 7)])
def test_find_outliers_finds_the_least_similar_chunks(ops, seed, dtype, chunk, chunks, count):
    rotated = (torch.randn(chunk * chunks, 3, 64) + 0.5 * torch.randn(64)).to(dtype)
    found = ops.find_outliers(rotated, chunk, count)
    assert found.shape == (3, count)
    assert found.dtype == torch.int64
    worst = worst_similarity(rotated, chunk)
    for h in range(3):
        chosen = set(found[h].tolist())
        assert len(chosen) == count
        assert chosen <= set(range(1, chunks))
        left = set(range(1, chunks)) - chosen
        if chosen and left:
            assert worst[list(chosen), h].max() <= worst[list(left), h].min() + 1e-6


def test_find_outliers_names_a_planted_chunk_per_head_but_never_the_first(ops, seed):
    rotated = torch.randn(64) + 0.01 * torch.randn(80, 2, 64)
    rotated[3] *= -1  # the sink is no candidate, however odd
    rotated[24, 0] *= -1
    rotated[79, 1] *= -1
    assert ops.find_outliers(rotated, 8, 1).tolist() == [[3], [9]]


def test_find_outliers_ignores_the_length_of_the_keys(ops, seed):
    rotated = torch.randn(64) + torch.randn(80, 2, 64)
    longer = rotated * (1 + 9 * torch.rand(10, 2, 1)).repeat_interleave(8, 0)  # one length per chunk
    expected = ops.find_outliers(rotated, 8, 3).sort().values
    assert torch.equal(ops.find_outliers(longer, 8, 3).sort().values, expected)
