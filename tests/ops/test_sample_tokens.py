"""Sampling of tokens against their definition; the Triton kernel, in its interpreter or on a GPU, token for token."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU, TRITON_RUNS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.ops.sample_tokens import reference
from shadowkv.ops.sample_tokens.weights import (
    PARAMETERS,
    SCRATCH_BYTES,
    UNIT,
    arrivals,
    octaves_of,
    race_numbers,
    token_weights,
)
from shadowkv.ops.sampling import mix

Sample = Callable[[Tensor, Tensor], Tensor]
BACKENDS: dict[str, Sample] = {"reference": reference.sample_tokens}

if TRITON_RUNS:
    from shadowkv.ops.sample_tokens import triton as kernel

    BACKENDS = {**({} if INTERPRETED else BACKENDS), "triton": kernel.sample_tokens}


def parameters(*rows: dict[str, float]) -> Tensor:
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "random": 0}
    return torch.tensor([[{**off, **row}[name] for name in PARAMETERS] for row in rows], dtype=torch.float64)


def one(sample: Sample, logits: Tensor, **row: float) -> int:
    return int(sample(logits[None].to(DEVICE), parameters(row).to(DEVICE)))


def often(sample: Sample, logits: Tensor, **row: float) -> set[int]:
    """The tokens that are sampled with 64 random numbers."""
    draw = random.Random(5)
    rows = parameters(*({**row, "random": draw.randrange(2**32)} for _ in range(64)))
    return set(sample(logits.expand(64, -1).contiguous().to(DEVICE), rows.to(DEVICE)).tolist())


@pytest.fixture(params=BACKENDS)
def sample(request: pytest.FixtureRequest) -> Sample:
    return BACKENDS[request.param]


# -- the definition, in float64 and with a sort ------------------------------------------------------------------------

SLACK = 1e-5
"""Weights are within 5e-7 of the softmax. If a share is as close to a limit as this, either side is right."""


def time_of(random_number: int, token: int, weight: float) -> float:
    """When a token arrives: an exponentially distributed number, divided by the token's weight."""
    share = (int(race_numbers(random_number, mix(torch.tensor(token)))) + 0.5) / 2**32
    return -math.log1p(-share) / weight


def sampled_by_definition(logits: Tensor, row: dict[str, float]) -> set[int]:
    """All tokens that may be sampled, with ``SLACK``. Logits [V] are finite or -inf, and at least one is finite."""
    if row["temperature"] <= 1e-5:
        return {int(logits.argmax())}
    values = logits.double().tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if 0 < row["top_k"] < len(order):
        order = order[: int(row["top_k"])]
    weights = [math.exp((value - values[order[0]]) / row["temperature"]) for value in values]
    total, found = sum(weights[token] for token in order), set()
    for tilt in (1 - SLACK, 1, 1 + SLACK):
        top_p = row["top_p"] * tilt if row["top_p"] < 1 else 2
        min_p = min(1, row["min_p"] * tilt)
        before = itertools.accumulate((weights[token] for token in order), initial=0.0)
        kept = {token for token, mass in zip(order, before) if mass < top_p * total and weights[token] >= min_p}
        times = {token: time_of(int(row["random"]), token, weights[token]) for token in kept if weights[token] > 0}
        first = min(times.values())
        found |= {token for token, time in times.items() if time <= first * (1 + SLACK)}
    return found


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-5, 2e-5, 0.2, 1.0, 1.7, 100.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 60, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.999999, 1.0]) | st.floats(0.001, 1),
        "min_p": st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
        "random": st.integers(0, 2**32 - 1),
    }
)
KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda size: 3 * torch.randn(size),
    "ties": lambda size: torch.randn(size).mul(2).round(),
    "bfloat16": lambda size: torch.randn(size).bfloat16().float(),
    "flat": lambda size: torch.full((size,), -7.25),
    "one hot": lambda size: torch.full((size,), -50.0).index_fill(0, torch.tensor([size // 2]), 50.0),
    "nearly flat": lambda size: 1000 + torch.randint(0, 3, (size,)) * 2.0**-14,
    "two groups": lambda size: torch.randn(size) * 1e-3 - 9 * (torch.arange(size) > 3),
    "masked": lambda size: torch.randn(size).masked_fill(torch.arange(size) % 3 != 2 * (size > 2), float("-inf")),
    "wide": lambda size: torch.randn(size) * 1e30,
    "tiny": lambda size: torch.randn(size) * 1e-42,
    "zeros of both signs": lambda size: torch.where(torch.rand(size) < 0.5, 0.0, -0.0),
}


def logits_of(kind: str, size: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return KINDS[kind](size)


if not INTERPRETED:

    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(sorted(KINDS)), st.integers(1, 90), st.integers(0, 2**32 - 1), ROWS)
    def test_the_token_is_one_of_the_definition(kind: str, size: int, seed: int, row: dict[str, float]) -> None:
        logits = logits_of(kind, size, seed)
        assert one(reference.sample_tokens, logits, **row) in sampled_by_definition(logits, row)

    @pytest.mark.parametrize("kind", KINDS)
    def test_large_vocabularies_are_narrowed_down_to_the_same_tokens(seed: int, kind: str) -> None:
        size, rng = 2000, random.Random(seed)  # beyond what is sorted at once
        for top_k, top_p in ((0, 0.9), (700, 1.0), (1500, 0.8)):
            row = {"temperature": rng.choice([0.5, 1.0, 3.0]), "top_k": top_k, "top_p": top_p, "min_p": 0.0}
            row["random"] = rng.randrange(2**32)
            logits = logits_of(kind, size, rng.randrange(2**32))
            assert one(reference.sample_tokens, logits, **row) in sampled_by_definition(logits, row)


@pytest.mark.parametrize("temperature", [2e-5, 0.3, 1.0, 100.0])
def test_weights_are_the_softmax_in_whole_units(seed: int, temperature: float) -> None:
    logits = 5 * torch.randn(20000)
    weights = token_weights(octaves_of(logits, logits.max(), temperature))
    exact = ((logits.double() - logits.max()) / temperature).exp()
    assert int(weights.max()) == UNIT
    assert ((weights.double() / UNIT - exact).abs() <= 2e-6 * exact + 1 / UNIT).all()  # logits are of 24 bits
    order = logits.argsort()
    assert (weights[order].diff() >= -weights[order][1:] * 1e-6).all()


def test_arrivals_are_exponential() -> None:
    numbers = torch.cat((torch.arange(2**12), 2**32 - 1 - torch.arange(2**12), torch.randint(2**32, (2**16,))))
    numbers = torch.cat((numbers, 2**30 + torch.arange(-9, 9), 2**31 + torch.arange(-9, 9)))
    exact = (-torch.log1p(-(numbers.double() + 0.5) / 2**32)).log2() - math.log2(math.log(2))
    found = arrivals(numbers, torch.zeros(len(numbers)))
    assert (found.double() - exact).abs().max() < 5e-6  # of logarithms from -32 to 5


@pytest.mark.parametrize("kind", ["normal", "two groups"])
def test_tokens_are_sampled_in_proportion_to_their_weights(seed: int, sample: Sample, kind: str) -> None:
    # The reference samples one row after another, and each takes 2 ms on a GPU.
    draws = 2000 if INTERPRETED or (DEVICE != "cpu" and sample is reference.sample_tokens) else 20_000
    size = 6 if INTERPRETED else 12
    logits = logits_of(kind, size, seed)
    rows = parameters({"temperature": 1.3}).expand(draws, -1).clone()
    rows[:, -1] = torch.randint(2**32, (draws,))
    counts = sample(logits.expand(draws, -1).contiguous().to(DEVICE), rows.to(DEVICE)).cpu().bincount(minlength=size)
    expected = draws * (logits.double() / 1.3).softmax(0)
    chi_square = float(((counts - expected) ** 2 / expected)[expected > 5].sum())
    assert chi_square < 4.5 * size + 20  # exceeded less than once in a million


def test_nearly_the_same_logits_sample_the_same_tokens(seed: int) -> None:
    """As drafts and the steps that verify them do."""
    size, draws = 4000, 400
    logits = 3 * torch.randn(size)
    others = logits + 0.02 * torch.randn(size)
    numbers = [{"random": number} for number in torch.randint(2**32, (draws,)).tolist()]
    pair = [reference.sample_tokens(x.expand(draws, -1).contiguous(), parameters(*numbers)) for x in (logits, others)]
    apart = float((logits.double().softmax(0) - others.double().softmax(0)).abs().sum() / 2)
    agree = float((pair[0] == pair[1]).double().mean())
    assert agree > 1 - 2 * apart - 4 * math.sqrt(2 * apart / draws) and apart < 0.02


# -- what holds whatever the logits are --------------------------------------------------------------------------------


def test_equal_logits_are_kept_in_the_order_of_their_ids(sample: Sample) -> None:
    flat = torch.zeros(8)
    assert often(sample, flat) == set(range(8))
    assert often(sample, flat, top_k=3) == {0, 1, 2}
    assert often(sample, flat, top_p=0.5) == {0, 1, 2, 3}
    assert often(sample, flat, top_p=0.5001) == {0, 1, 2, 3, 4}
    assert often(sample, flat, top_k=4, top_p=0.5) == {0, 1}  # of what top-k left
    assert often(sample, flat, min_p=1.0) == set(range(8))
    assert often(sample, torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0]), top_k=3) == {0, 1, 2}


def test_a_single_candidate_is_the_first_of_the_largest(sample: Sample) -> None:
    logits = torch.tensor([0.5, 3.0, -1.0, 3.0, 2.999999])
    for row in ({"temperature": 0.0}, {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "min_p": 1.0}):
        for temperature in {row.get("temperature", 1.0), row.get("temperature", 100.0)}:
            assert one(sample, logits, **{**row, "temperature": temperature, "random": 99}) == 1


def test_filters_that_end_within_a_tie(sample: Sample) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    kept = [{1}, {1, 3}, {0, 1, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, set(range(6)), set(range(6))]
    assert [often(sample, logits, top_k=k) for k in range(1, 8)] == kept
    shares = torch.softmax(logits.double(), 0)
    through_one, through_two = float(2 * shares[1] + shares[0]), float(2 * shares[1] + 2 * shares[0])
    for top_p, tokens in ((through_one - 1e-4, {0, 1, 3}), (through_two - 1e-4, {0, 1, 2, 3})):
        assert often(sample, logits, top_p=top_p) == tokens


def test_logits_whose_difference_overflows(sample: Sample) -> None:
    logits = torch.randn(5000)
    logits[:50], logits[60:90], logits[95:99], logits[40] = 3e38, -3e38, float("-inf"), 3.1e38
    assert one(sample, logits, top_p=0.5, temperature=100.0, random=3) == 40
    least = torch.finfo(torch.float32).smallest_normal * 2**-23  # half of it is 0
    assert one(sample, torch.arange(5000) % 2 * least, top_k=1, random=9) == 1


def test_what_is_masked_beside_many_that_are_equal(sample: Sample) -> None:
    logits = torch.full((1800,), float("-inf"))
    logits[:1600], logits[0] = -50.0, 50.0
    row = {"temperature": 100.0, "top_k": 1500, "random": 999}
    assert one(sample, logits, **row) in sampled_by_definition(logits, row | {"top_p": 1.0, "min_p": 0.0})


def test_rows_that_are_not_finite_give_a_token_of_the_vocabulary(sample: Sample) -> None:
    rows = torch.randn(9, 70)
    rows[0], rows[1], rows[2] = float("nan"), float("inf"), float("-inf")
    rows[3, 5], rows[4, 5], rows[5, 5] = float("nan"), float("inf"), float("-inf")
    rows[6, ::2], rows[7, 1::2] = float("inf"), float("-inf")
    rows[7, ::2] = float("nan")
    for row in ({}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5, "min_p": 0.2}, {"temperature": 0.0}):
        sampled = sample(rows.to(DEVICE), parameters(*[{**row, "random": 7}] * 9).to(DEVICE))
        assert ((sampled >= 0) & (sampled < 70)).all()
        assert int(sampled[8]) == one(sample, rows[8], **row, random=7)


def test_what_is_masked_is_never_sampled(sample: Sample) -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[7, 31]] = torch.tensor([-3.0, 4.0])
    rows = [{"random": i, "temperature": 100.0, "top_k": k} for i in range(4) for k in (0, 1, 2, 30)]
    sampled = sample(logits.expand(16, -1).contiguous().to(DEVICE), parameters(*rows).to(DEVICE))
    assert set(sampled.tolist()) == {7, 31}


# -- batches, and backends against each other --------------------------------------------------------------------------


def mixed(seed: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows of all kinds, each with its own parameters."""
    pick = random.Random(seed)
    rows = [
        {
            "temperature": pick.choice([0.0, 0.3, 1.0, 1.0, 2.5, 100.0]),
            "top_k": pick.choice([0, 0, 1, 5, size // 3, size - 1, size + 1]),
            "top_p": pick.choice([1.0, 0.95, 0.95, 0.5, 1e-6, 0.9999]),
            "min_p": pick.choice([0.0, 0.0, 1e-3, 0.3, 1.0]),
            "random": pick.randrange(2**32),
        }
        for _ in range(count)
    ]
    kinds = [name for _, name in zip(range(count), sorted(KINDS) * count)]
    logits = torch.stack([logits_of(kind, size, pick.randrange(2**32)) for kind in kinds])
    return logits.to(DEVICE), parameters(*rows).to(DEVICE)


def test_a_row_samples_the_same_alone_and_anywhere_in_a_batch(seed: int, sample: Sample) -> None:
    count, size = (4, 40) if INTERPRETED else (11, 1500)
    logits, rows = mixed(seed, count, size)
    together = sample(logits, rows)
    alone = torch.cat([sample(logits[i : i + 1], rows[i : i + 1]) for i in range(count)])
    assert torch.equal(together, alone)
    order = torch.randperm(count, device=DEVICE)
    assert torch.equal(sample(logits[order], rows[order]), together[order])
    wide = torch.full((count, size + 13), float("nan"), device=DEVICE)
    wide[:, :size] = logits
    assert torch.equal(sample(wide[:, :size], rows), together)


if INTERPRETED:

    @pytest.fixture
    def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes blocks small, so that short rows take as many blocks and passes as large vocabularies."""
        monkeypatch.setattr(kernel, "BLOCK", 64)
        monkeypatch.setattr(kernel, "LONG_BLOCK", 32)
        monkeypatch.setattr(kernel, "CANDIDATES", 8)

    @pytest.mark.parametrize(("size", "by_value"), [(1, 4), (96, 2)])
    def test_the_kernel_samples_the_references_tokens(
        seed: int, short_passes: None, monkeypatch: pytest.MonkeyPatch, size: int, by_value: int
    ) -> None:
        monkeypatch.setattr(kernel, "BY_VALUE", by_value)
        logits, rows = mixed(seed, len(KINDS), size)
        assert torch.equal(kernel.sample_tokens(logits, rows), reference.sample_tokens(logits, rows))

    def test_a_vocabulary_of_many_blocks() -> None:
        torch.manual_seed(3)
        logits, row = torch.randn(1, 9001), parameters({"top_p": 0.95, "random": 6})
        assert torch.equal(kernel.sample_tokens(logits, row), reference.sample_tokens(logits, row))


if ON_GPU:

    @pytest.mark.parametrize("size", [1, 4097, 49152, 128256])
    def test_the_kernel_samples_the_references_tokens(seed: int, size: int) -> None:
        logits, rows = mixed(seed, 2 * len(KINDS), size)
        expected = reference.sample_tokens(logits.cpu(), rows.cpu())  # hundreds of small steps a row
        assert torch.equal(kernel.sample_tokens(logits, rows).cpu(), expected)

    def test_scratch_is_what_is_counted() -> None:
        logits, rows = torch.randn(16, 128256, device="cuda"), parameters(*[{"top_p": 0.95}] * 16).cuda()
        kernel.sample_tokens(logits, rows)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernel.sample_tokens(logits, rows)
        assert torch.cuda.max_memory_allocated() - before <= 16 * SCRATCH_BYTES + 1024
