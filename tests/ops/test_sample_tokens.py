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
from shadowkv.ops.sample_tokens.weights import PARAMETERS, SCRATCH_BYTES, UNIT, token_weights

Sample = Callable[[Tensor, Tensor], Tensor]
BACKENDS: dict[str, Sample] = {"reference": reference.sample_tokens}

if TRITON_RUNS:
    from shadowkv.ops.sample_tokens import triton as kernel

    BACKENDS = {**({} if INTERPRETED else BACKENDS), "triton": kernel.sample_tokens}


def parameters(*rows: dict[str, float]) -> Tensor:
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.0}
    return torch.tensor([[{**off, **row}[name] for name in PARAMETERS] for row in rows], dtype=torch.float64)


def one(sample: Sample, logits: Tensor, **row: float) -> int:
    return int(sample(logits[None].to(DEVICE), parameters(row).to(DEVICE)))


@pytest.fixture(params=BACKENDS)
def sample(request: pytest.FixtureRequest) -> Sample:
    return BACKENDS[request.param]


# -- the definition, in float64 and with a sort ------------------------------------------------------------------------

SLACK = 1e-5
"""Weights are within 5e-7 of the softmax. If a share is as close to a limit as this, either side is right."""


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
        sample, upto = row["uniform"] * sum(weights[token] for token in kept), 0.0
        for token in sorted(kept):
            if upto - SLACK * total <= sample <= upto + weights[token] + SLACK * total and weights[token] > 0:
                found.add(token)
            upto += weights[token]
    return found


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-5, 2e-5, 0.2, 1.0, 1.7, 100.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 60, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.999999, 1.0]) | st.floats(0.001, 1),
        "min_p": st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
        "uniform": st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
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
            row["uniform"] = rng.random()
            logits = logits_of(kind, size, rng.randrange(2**32))
            assert one(reference.sample_tokens, logits, **row) in sampled_by_definition(logits, row)


@pytest.mark.parametrize("temperature", [2e-5, 0.3, 1.0, 100.0])
def test_weights_are_the_softmax_in_whole_units(seed: int, temperature: float) -> None:
    logits = 5 * torch.randn(20000)
    weights = token_weights(logits, logits.max(), temperature)
    exact = ((logits.double() - logits.max()) / temperature).exp()
    assert int(weights.max()) == UNIT
    assert ((weights.double() / UNIT - exact).abs() <= 2e-6 * exact + 1 / UNIT).all()  # logits are of 24 bits
    order = logits.argsort()
    assert (weights[order].diff() >= -weights[order][1:] * 1e-6).all()


# -- what holds whatever the logits are --------------------------------------------------------------------------------


def test_equal_logits_are_kept_and_sampled_in_the_order_of_their_ids(sample: Sample) -> None:
    flat = torch.zeros(8)
    for uniform, token in ((0.0, 0), (0.1249, 0), (0.125, 1), (0.999, 7)):
        assert one(sample, flat, uniform=uniform) == token
    assert one(sample, flat, uniform=0.999, top_k=3) == 2
    assert one(sample, flat, uniform=0.999, top_p=0.5) == 3
    assert one(sample, flat, uniform=0.999, top_p=0.5001) == 4
    assert one(sample, flat, uniform=0.999, top_k=4, top_p=0.5) == 1  # of what top-k left
    assert one(sample, flat, uniform=0.999, min_p=1.0) == 7
    signs = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0])
    assert one(sample, signs, uniform=0.999, top_k=3) == 2


def test_a_single_candidate_is_the_first_of_the_largest(sample: Sample) -> None:
    logits = torch.tensor([0.5, 3.0, -1.0, 3.0, 2.999999])
    for row in ({"temperature": 0.0}, {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "min_p": 1.0}):
        for temperature in {row.get("temperature", 1.0), row.get("temperature", 100.0)}:
            assert one(sample, logits, **{**row, "temperature": temperature, "uniform": 0.99}) == 1


def test_filters_that_end_within_a_tie(sample: Sample) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    last = {"uniform": 1 - 2**-53}
    assert [one(sample, logits, top_k=k, **last) for k in range(1, 8)] == [1, 3, 3, 3, 4, 5, 5]
    assert one(sample, logits, top_k=4, uniform=0.0) == 0
    shares = torch.softmax(logits.double(), 0)
    through_one, through_two = float(2 * shares[1] + shares[0]), float(2 * shares[1] + 2 * shares[0])
    for top_p, tokens in ((through_one - 1e-4, {0, 1, 3}), (through_two - 1e-4, {0, 1, 2, 3})):
        assert {one(sample, logits, top_p=top_p, uniform=i / 8) for i in range(8)} == tokens


def test_logits_whose_difference_overflows(sample: Sample) -> None:
    logits = torch.randn(5000)
    logits[:50], logits[60:90], logits[95:99], logits[40] = 3e38, -3e38, float("-inf"), 3.1e38
    assert one(sample, logits, top_p=0.5, temperature=100.0, uniform=0.3) == 40
    least = torch.finfo(torch.float32).smallest_normal * 2**-23  # half of it is 0
    assert one(sample, torch.arange(5000) % 2 * least, top_k=1, uniform=0.9) == 1


def test_what_is_masked_beside_many_that_are_equal(sample: Sample) -> None:
    logits = torch.full((1800,), float("-inf"))
    logits[:1600], logits[0] = -50.0, 50.0
    row = {"temperature": 100.0, "top_k": 1500, "uniform": 0.999}
    assert one(sample, logits, **row) in sampled_by_definition(logits, row | {"top_p": 1.0, "min_p": 0.0})


def test_rows_that_are_not_finite_give_a_token_of_the_vocabulary(sample: Sample) -> None:
    rows = torch.randn(9, 70)
    rows[0], rows[1], rows[2] = float("nan"), float("inf"), float("-inf")
    rows[3, 5], rows[4, 5], rows[5, 5] = float("nan"), float("inf"), float("-inf")
    rows[6, ::2], rows[7, 1::2] = float("inf"), float("-inf")
    rows[7, ::2] = float("nan")
    for row in ({}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5, "min_p": 0.2}, {"temperature": 0.0}):
        sampled = sample(rows.to(DEVICE), parameters(*[{**row, "uniform": 0.7}] * 9).to(DEVICE))
        assert ((sampled >= 0) & (sampled < 70)).all()
        assert int(sampled[8]) == one(sample, rows[8], **row, uniform=0.7)


def test_what_is_masked_is_never_sampled(sample: Sample) -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[7, 31]] = torch.tensor([-3.0, 4.0])
    rows = [{"uniform": i / 4, "temperature": 100.0, "top_k": k} for i in range(4) for k in (0, 1, 2, 30)]
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
            "uniform": pick.random(),
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
        logits, row = torch.randn(1, 9001), parameters({"top_p": 0.95, "uniform": 0.6})
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
