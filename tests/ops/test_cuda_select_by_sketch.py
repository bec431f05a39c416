"""Two-level selection on a GPU against scores from parts of the reference: ties and rounding may fall either way."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.sampling import CAUTION, Sampling, systematic_sample
from shadowkv.ops.select_by_sketch import cuda, reference
from shadowkv.ops.sign_scores import cuda as scoring
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, decode_scale, pack_sketch, plane_bits
from shadowkv.ops.sketch_queries import cuda as making
from shadowkv.ops.sketch_queries.reference import SketchQueries, plane_bytes, sketch_queries

if any(op.missing() for op in (cuda, making, scoring)):
    pytest.skip("needs a GPU and the CUDA ops (csrc/build_cuda.py)", allow_module_level=True)


def queries_of(q: Tensor) -> SketchQueries:
    states = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return sketch_queries(q, torch.eye(q.shape[-1], device=q.device)[None, None], states)


def problem(
    counts: list[int],
    budgets: list[int],
    k: int,
    heads: int = 2,
    group: int = 4,
    dim: int = 128,
    chunk: int = 1,
    columns: int | None = None,
) -> tuple:
    """Arguments with shuffled pages of an arena whose other bytes are all 255. ``counts`` are the rows' valid pages."""
    device = torch.device("cuda")
    columns = columns or max(1, *counts)
    fields = [
        Field("other", (100,), torch.uint8),
        Field("signs", (heads, 64, plane_bytes(dim)), torch.uint8),
        Field("rest", (heads, 64, plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, 64), torch.uint8),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256 + 512
    tier = Tier("device", 1, size, sum(counts) + 2, device)
    tier.arena.fill_(255)
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    page_ids = torch.tensor(tier.allocate(sum(counts)), dtype=torch.int64)[torch.randperm(sum(counts))].cuda()
    pages = torch.full((len(counts), columns), tier.spare, dtype=torch.int64, device=device)
    for own in page_ids.split(1024):
        signs, rest, scale = pack_sketch(torch.randn(len(own), heads, 64, dim, device=device))
        excluded = torch.rand(len(own), heads, 64 // chunk, device=device) < 0.2
        views["signs"][own], views["rest"][own] = signs, rest
        views["scale"][own] = scale.masked_fill(excluded.repeat_interleave(chunk, -1), EXCLUDED_SCALE)
    coarse = torch.full((len(counts), heads, 8 * columns), -math.inf, dtype=torch.float16, device=device)
    for row, count in enumerate(counts):
        pages[row, :count], page_ids = page_ids[:count], page_ids[count:]
        coarse[row, :, : 8 * count] = torch.randn(heads, 8 * count, device=device)
    queries = queries_of(torch.randn(len(counts), heads * group, dim, device=device))
    planes = (views["signs"], views["rest"], views["scale"])
    return queries, coarse, *planes, pages, torch.tensor(counts).cuda(), torch.tensor(budgets).cuda(), chunk, k


def chunk_logits(args: tuple, row: int) -> Tensor:
    """The largest of any query, float32 [H, chunks] of a row's valid pages, -inf where excluded."""
    queries, _, signs, rest, scale, pages, num_pages, _, chunk, _ = args
    page_ids, bits = pages[row, : num_pages[row]], 8 * signs.shape[-1]
    whole, unit = (x[row] for x in queries.of_heads(signs.shape[1]))
    to_logit = (unit * queries.length[row].view_as(unit))[..., None, None]
    parts = []
    for some in page_ids.split(512):
        levels = 2 * plane_bits(signs[some], bits).float() + plane_bits(rest[some], bits) - 1.5
        scores = torch.einsum("hgd,nhtd->hgnt", whole, levels).mul_(to_logit).amax(1)
        own = scale[some].transpose(0, 1)
        scores = (scores * decode_scale(own)).masked_fill(own == EXCLUDED_SCALE, -math.inf)
        parts.append(scores.unflatten(-1, (-1, chunk)).amax(-1))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def check(args: tuple) -> None:
    selected, none = cuda.select_by_sketch(*args)
    assert none is None
    coarse, num_pages, budget, chunk, k = args[1], args[6], args[7], args[8], args[9]
    per_run = 8 // chunk
    assert selected.shape == (*coarse.shape[:2], k)
    keep = reference.kept_runs(num_pages, budget, chunk)
    for row, (count, runs) in enumerate(zip(budget.tolist(), (8 * num_pages).tolist())):
        if count == 0 or runs == 0:
            assert (selected[row] == -1).all()
            continue
        scores = chunk_logits(args, row)
        first = coarse[row, :, :runs].float()
        edge = first.topk(int(keep[row]), dim=-1).values[:, -1:]
        for head in range(selected.shape[1]):
            top_k = selected[row, head]
            some = top_k[top_k >= 0]
            assert (top_k[len(some) :] == -1).all()
            assert (some.diff() > 0).all()
            maybe = (first[head] >= edge[head]).repeat_interleave(per_run)
            certain = (first[head] > edge[head]).repeat_interleave(per_run)
            own = scores[head]
            assert maybe[some].all()
            assert own[some].isfinite().all()
            tied = some[~certain[some]].div(per_run, rounding_mode="floor").unique()
            assert len(tied) + certain.sum() // per_run <= keep[row]
            if maybe.sum() == keep[row] * per_run:
                certain = maybe
            assert len(some) <= count
            assert len(some) >= min(count, int((certain & own.isfinite()).sum()))
            if len(some) == count:
                missing = certain.clone()
                missing[some] = False
                tolerance = own[own.isfinite()].abs().max() / 512
                assert own.masked_fill(~missing, -math.inf).max() <= own[some].min() + tolerance


def check_sampling(args: tuple, sampling: Sampling, layer: int = 0) -> None:
    """Compares with probabilities from parts of the reference, because the last bits of sums decide which chunks are
    sampled."""
    queries, coarse, num_pages, budget, chunk = args[0], args[1], args[6], args[7], args[8]
    made, log_weight = cuda.select_by_sketch(*args, sampling, layer)
    # A kernel may add up weights by the middles of bins, which are off by a fifth at the most (kLeastOfMiddle): first
    # of runs, then of their tokens. So it may miss a third of the half that is sampled.
    fewest = 0.8 * (reference.select_by_sketch(*args, sampling, layer)[0] >= 0).sum(-1) - 2
    counts = sampling.counts.where(budget > 0, 0)
    keep = reference.kept_runs(num_pages, budget + counts, chunk)
    by_sample = reference.sampled_runs(num_pages, keep, Sampling(counts, sampling.seeds))
    per_run, heads = 8 // chunk, made.shape[1]
    length = reference.mean_length(queries, heads)
    for row, (top_k, sampled, runs) in enumerate(zip(budget.tolist(), counts.tolist(), (8 * num_pages).tolist())):
        if top_k == 0 or runs == 0:
            assert (made[row] == -1).all()
            continue
        scores = chunk_logits(args, row)
        for head in range(heads):
            chunks = made[row, head][made[row, head] >= 0]
            weights = log_weight[row, head, : len(chunks)]
            assert (made[row, head, len(chunks) :] == -1).all()
            assert len(chunks.unique()) == len(chunks) <= top_k + sampled
            assert (weights >= 0).all() and scores[head, chunks].isfinite().all()
            assert len(chunks) >= fewest[row, head]

            # What runs stand for: logarithms that differ from their weights' by one number, but where they are sure.
            of_run = torch.zeros_like(weights)
            if by_sample[row]:
                values = coarse[row, head, :runs]
                factor = reference.RUN_SHARPNESS * length[row, head] / math.log(2)
                numbers = (keep - by_sample)[row], keep[row], factor, keep[row]
                _, chance = systematic_sample(values[None], *(x.view(1) for x in numbers))
                edge = values[chance[0] < 1].amax()
                sure = values > edge
                log = reference.RUN_SHARPNESS * length[row, head] * values.float()
                left = keep[row] - sure.sum()
                level = (log.exp() * ~sure).sum().log() - (CAUTION * left).log()  # a kernel knows it roughly
                own, chance = sure.repeat_interleave(per_run)[chunks], log.repeat_interleave(per_run)[chunks]
                least = (weights + chance)[~own].min() if (~own).any() else level
                assert least > level - 0.15
                level = least if least < level + 0.15 else level
                of_run = (level - chance).clamp(min=0).masked_fill(own, 0)
            more = weights - of_run
            assert (more > -0.15).all()
            value = reference.CHUNK_SHARPNESS * scores[head, chunks] + of_run
            unsure = more > 0.2  # than what a run may be taken to stand for by mistake
            line = (more + value)[unsure]  # one number
            if len(line):
                assert line.max() - line.min() < 0.25
                assert (value[~unsure] > value[unsure].max() - 0.25).all()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory for the kernel's results holds values that tests would notice."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, 119, **options))


@pytest.mark.parametrize("group", [1, 3, 4, 5, 6, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("chunk", [8, 1])
def test_ragged_rows_select_like_the_reference(seed, group, dim, chunk):
    counts = [150, 1, 0, 104, int(torch.randint(1, 150, ()))]
    k = 128 // chunk
    check(problem(counts, [k, k, k, 0, int(torch.randint(1, k, ()))], k, 2, group, dim, chunk, columns=153))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", [1, 13, 200])
def test_every_chunk_size_and_budget(seed, chunk, budget):
    check(problem([150, 110, 3], [budget, budget // 2 + 1, budget], 200, 3, chunk=chunk))


@pytest.mark.parametrize("heads", [1, 3, 8, 10])
@pytest.mark.parametrize("columns", [1, 2, 130])
def test_any_number_of_heads_and_pages(seed, heads, columns):
    check(problem([columns], [9 * columns], 10 * columns, heads, 3, chunk=2))


@pytest.mark.parametrize("dim", [8, 16, 72, 80, 112, 208])
def test_head_dims_with_padded_planes(seed, dim):
    check(problem([130, 104], [64, 50], 64, dim=dim))


@pytest.mark.parametrize(("group", "dim"), [(17, 64), (2, 192)])
def test_other_shapes_are_refused(seed, group, dim):
    with pytest.raises(RuntimeError, match=r"34 query heads for 2 kv heads|rows of 24 bytes"):
        cuda.select_by_sketch(*problem([70, 52], [64, 50], 64, 2, group, dim))


@pytest.mark.parametrize(("rows", "heads"), [(20, 8), (40, 8)])
def test_many_rows(seed, rows, heads):
    counts = torch.randint(0, 241, (rows,)).tolist()
    check(problem(counts, torch.randint(0, 161, (rows,)).tolist(), 160, heads, columns=240))


def test_rows_that_are_looked_at_in_global_memory(seed):
    check(problem([11000, 900], [3000, 3000], 3000, 1, 2, 64))
    check(problem([4000, 900], [130000, 3000], 130000, 1, 2, 64))


def test_equal_coarse_scores(seed):
    args = problem([150, 150, 130], [40, 5, 300], 400)
    args[1].copy_(args[1].mul(2).round())
    check(args)
    args[1][:, :, : 8 * 130] = 0.0
    args[1][:, :, 5::7] = -0.0
    args[1][2, :, 8 * 130 :] = -math.inf
    check(args)


def test_queries_and_keys_of_zero(seed):
    args = problem([90, 70], [40, 5], 50)
    check((queries_of(torch.zeros(2, 8, 128, device="cuda")), *args[1:]))


def larger(scale: Tensor, steps: int) -> None:
    """Multiplies scales by 2**(steps / 8), up to the largest scale."""
    scale.copy_((scale.int() + steps).clamp(max=247).where(scale != EXCLUDED_SCALE, scale))


def test_scores_beyond_float16(seed):
    args = problem([90, 70], [40, 5], 50)
    larger(args[4], 126)
    selected, _ = cuda.select_by_sketch(*args)
    assert (selected >= 0).sum(-1).tolist() == [[40, 40], [5, 5]]


def test_samples_of_scores_beyond_float16(seed):
    """All of them are the largest number, and as likely as each other."""
    args = problem([40, 20], [40, 5], 60)
    args[0].unit.mul_(20)
    larger(args[4], 106)
    selected, log_weight = cuda.select_by_sketch(*args, Sampling(torch.tensor([20, 30]).cuda(), torch.arange(2).cuda()))
    for row, wanted in enumerate((60, 35)):
        values = reference.CHUNK_SHARPNESS / math.log(2) * chunk_logits(args, row)
        largest = values > 65400  # nearly: which ones round to it, the last bits say
        for head in range(2):
            chosen = selected[row, head][selected[row, head] >= 0]
            assert 0.9 * wanted - 1 < len(chosen) <= wanted
            assert largest[head, chosen].all()
            stands_for = math.log(largest[head].sum().item() / (CAUTION * wanted))
            assert (log_weight[row, head, : len(chosen)] - stands_for).abs().max() < 0.1


def test_all_chunks_excluded(seed):
    args = problem([90, 70], [40, 5], 50)
    args[4][args[5][0]] = EXCLUDED_SCALE
    check(args)
    assert (cuda.select_by_sketch(*args)[0][0] == -1).all()


def test_a_captured_call_follows_its_inputs(seed):
    args = problem([150, 64, 9], [30, 64, 64], 64, 8)
    cuda.select_by_sketch(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = cuda.select_by_sketch(*args)
    args[0].unit.uniform_()
    args[6].copy_(torch.tensor([59, 64, 0]))
    args[7].copy_(torch.tensor([64, 1, 3]))
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured, cuda.select_by_sketch(*args)[0])
    check(args)


def some_sampling(rows: int, most: int) -> Sampling:
    return Sampling(torch.randint(1, most + 1, (rows,)).cuda(), torch.randint(0, 2**20, (rows,)).cuda())


@pytest.mark.parametrize("group", [1, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("chunk", [8, 1])
def test_ragged_rows_sample_by_their_chances(seed, group, dim, chunk):
    k = 512 // chunk
    args = problem([170, 1, 0, 90, 300], [k // 2, k // 2, k // 2, 0, k // 3], k, 2, group, dim, chunk, columns=301)
    check_sampling(args, some_sampling(5, k // 2), 7)


@pytest.mark.parametrize(("rows", "heads"), [(20, 8), (60, 8)])
def test_many_rows_sample(seed, rows, heads):
    counts = torch.randint(0, 241, (rows,)).tolist()
    args = problem(counts, torch.randint(0, 100, (rows,)).tolist(), 200, heads, columns=240)
    check_sampling(args, some_sampling(rows, 100))


def test_a_long_row_samples(seed):
    check_sampling(problem([9000, 900], [4000, 200], 8000, 2, 4, 128), some_sampling(2, 4000))


@pytest.mark.parametrize("rows", [4, 60])
def test_runs_with_logits_around_100_are_sampled_by_their_chances(seed, rows):
    """In bins so wide that their counts do not tell the sum of weights; rows of small thread blocks and of large
    ones."""
    args = list(problem([600] * rows, [64] * rows, 192, 8))
    logits = (85 + 15 * torch.rand(args[1].shape, device="cuda")) * torch.randn_like(args[1].float()).sign()
    args[0] = replace(args[0], unit=args[0].unit * args[0].length, length=torch.ones_like(args[0].length))
    args[1] = logits.half()
    check_sampling(tuple(args), some_sampling(rows, 128))


@pytest.mark.parametrize("rows", [4, 60])
def test_tokens_with_logits_up_to_100_are_sampled_by_their_chances(seed, rows):
    args = list(problem([300] * rows, [64] * rows, 192, 8))
    most = max(chunk_logits(tuple(args), row).nan_to_num(neginf=0).abs().max() for row in range(rows))
    args[0].unit.mul_(100 / most)
    check_sampling(tuple(args), some_sampling(rows, 128))


@pytest.mark.parametrize(("group", "dim", "chunk"), [(4, 128, 1), (8, 64, 8), (3, 96, 2), (16, 128, 1)])
def test_a_row_selects_the_same_alone_and_in_any_batch(seed, group, dim, chunk):
    """Bit by bit, from queries on: in batches that larger thread blocks select for and in those of smaller ones."""
    rows, heads = 100, 8  # blocks are smaller from 50 such rows on, where a GPU has 132 multiprocessors
    counts = torch.randint(90, 130, (rows,)).tolist()
    counts[1], counts[5], counts[40] = 170, 1, 0
    _, _, *planes, pages, num_pages, budget, _, _ = problem(counts, [1] * rows, 1, heads, group, dim, chunk)
    q, maps = torch.randn(rows, heads * group, dim).cuda(), torch.randn(3, heads, dim, dim).cuda().bfloat16()
    states = torch.arange(rows).cuda() % 3
    budget, sampled, seeds = torch.randint(1, 400 // chunk, (3, rows)).cuda()
    sampled[3] = 0

    def select(first: int, last: int) -> tuple[Tensor, Tensor]:
        own = slice(first, last)
        queries = making.sketch_queries(q[own], maps, states[own])
        page_ids = pages[own, : max(1, *counts[first:last])].contiguous()
        coarse = scoring.sign_scores(queries, *planes[::2], page_ids, num_pages[own])
        k = int((budget + sampled)[own].max())
        args = queries, coarse, *planes, page_ids, num_pages[own], budget[own], chunk, k
        return cuda.select_by_sketch(*args, Sampling(sampled[own], seeds[own]), 5)

    alone = [select(row, row + 1) for row in range(rows)]
    for size in (2, 7, 48, 51, rows):
        chunks, log_weight = select(0, size)
        for row in range(size):
            (own,), (own_weight,) = alone[row]
            width = own.shape[-1]
            assert torch.equal(chunks[row, :, :width], own) and (chunks[row, :, width:] == -1).all()
            assert torch.equal(log_weight[row, :, :width][own >= 0], own_weight[own >= 0])


def test_rows_that_sample_nothing_are_as_without_samples(seed):
    args = problem([50, 40, 2], [40, 5, 30], 64)
    none = Sampling(torch.zeros(3, dtype=torch.int64).cuda(), torch.arange(3).cuda())
    selected, log_weight = cuda.select_by_sketch(*args, none)
    plain, _ = cuda.select_by_sketch(*args)
    assert torch.equal((selected >= 0).sum(-1), (plain >= 0).sum(-1))
    for some, others in zip(selected.flatten(0, 1).tolist(), plain.flatten(0, 1).tolist()):
        assert len({*some} - {*others}) <= 1, "more than a tie"
    assert not log_weight[selected >= 0].any()


def test_weighted_sums_of_many_samples_are_those_over_everything(seed):
    """Of scores of one row under many seeds; what is estimated is how many chunks there are, and a sum over them."""
    one = problem([120], [100], 200, 2)
    times = 300
    queries = SketchQueries(**{name: x.expand(times, *x.shape[1:]).contiguous() for name, x in vars(one[0]).items()})
    rows = [x.expand(times, *x.shape[1:]).contiguous() for x in (one[1], one[5])]
    numbers = [x.expand(times).contiguous() for x in (one[6], one[7])]
    args = (queries, rows[0], *one[2:5], rows[1], *numbers, *one[8:])
    sampling = Sampling(torch.full((times,), 100).cuda(), torch.arange(times).cuda())
    chunks, log_weight = cuda.select_by_sketch(*args, sampling)
    scores = chunk_logits(one, 0)
    summand = scores.exp().masked_fill(scores.isinf(), 0)
    ones = log_weight.exp().masked_fill(chunks < 0, 0)
    for x, total in (
        (ones, scores.isfinite().sum(-1)),
        (ones * summand.expand(times, -1, -1).gather(-1, chunks.clamp(min=0)), summand.sum(-1)),
    ):
        estimate = x.sum(-1)
        assert ((estimate.mean(0) - total).abs() < 5 * estimate.std(0) / times**0.5 + 0.01 * total).all()


def test_a_captured_call_samples_by_its_inputs(seed):
    args, sampling = problem([190, 24, 9], [30, 64, 64], 128, 8), some_sampling(3, 60)
    cuda.select_by_sketch(*args, sampling, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda.select_by_sketch(*args, sampling, 2)
    for _ in range(3):
        sampling.seeds.random_(0, 2**20)
        sampling.counts.random_(0, 60)
        graph.replay()
        expected = cuda.select_by_sketch(*args, sampling, 2)
        assert torch.equal(captured[0], expected[0])
        assert torch.equal(captured[1][captured[0] >= 0], expected[1][captured[0] >= 0])


def test_wrong_arguments_are_named(seed):
    args = list(problem([8], [4], 4))
    args[6] = args[6].int()
    with pytest.raises(RuntimeError, match="num_pages has dtype"):
        cuda.select_by_sketch(*args)


def test_arguments_that_vector_loads_cannot_read_are_named(seed):
    args = list(problem([8], [4], 4))
    odd = torch.zeros(args[1].numel() + 1, dtype=torch.float16, device="cuda")[1:].view_as(args[1])
    with pytest.raises(RuntimeError, match="coarse is aligned to 2 bytes, not to 16"):
        cuda.select_by_sketch(args[0], odd, *args[2:])


@pytest.mark.parametrize("length", [math.nan, math.inf])
def test_a_query_that_is_not_finite_ends_and_leaves_other_rows_alone(seed, length):
    args = list(problem([300] * 2, [64] * 2, 192))
    sampling = Sampling(torch.full((2,), 128).cuda(), torch.arange(2).cuda())
    expected = cuda.select_by_sketch(*args, sampling)[0][1]
    lengths = args[0].length.clone()
    lengths[0] = length
    args[0] = replace(args[0], length=lengths)
    selected = cuda.select_by_sketch(*args, sampling)[0]
    assert torch.equal(selected[1], expected)
    assert selected[0].max() < 300 * 64


def test_the_newest_tokens_are_sampled_where_values_weigh_more_than_their_bins(seed):
    """Values at the upper end of a bin, by whose middles a kernel estimates sums: at this sharpness they weigh twice as
    much as those."""
    args = list(problem([300] * 8, [64] * 8, 192))
    unit, length = args[0].unit * args[0].length / 40, torch.full_like(args[0].length, 40.0)  # tokens' logits as before
    args[0] = replace(args[0], unit=unit, length=length)
    args[1] = (7.98 + 0.01 * torch.rand(args[1].shape, device="cuda")).half()
    sampling = Sampling(torch.full((8,), 128).cuda(), torch.arange(8).cuda())
    selected = cuda.select_by_sketch(*args, sampling)[0]
    there = selected >= 0
    newest = (selected >= 300 * 32) & there
    assert there.sum(-1).min() > 16
    share = newest.sum() / there.sum()
    assert 0.4 < share < 0.6, "half of the tokens are the newest half"
