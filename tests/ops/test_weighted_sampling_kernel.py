"""The sampling code of the CUDA kernels on a CPU whose threads take turns, against sums in float64."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from compiled_source import kernel_on_cpu
from torch import Tensor

from shadowkv.ops.sampling import CAUTION, systematic_sample

ROUGHEST = 0.8
"""Least share of a sum of weights that is taken for it before the values themselves are summed up
(``kLeastOfMiddle``)."""
STARTS = 64
"""Random numbers, in equal steps: a value is selected by as many of them as its chance says, up to one."""


@dataclass
class Sample:
    """The selected numbers in ascending order, and the logarithms to base 2 of what each stands for."""

    numbers: Tensor
    log_weight: Tensor


Run = Callable[[Tensor, int, int, float, int], Sample]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu("weighted_sampling", tmp_path_factory.mktemp("source"))


@pytest.fixture
def run(library: ctypes.CDLL) -> Run:
    """Samples values float16 [n] with blocks of both sizes, which have to select the same."""
    library.weighted_sampling.restype = ctypes.c_bool

    def with_threads(values: Tensor, top_k: int, wanted: int, factor: float, uniform: int, threads: int) -> Sample:
        groups = -(-len(values) // 8)
        padded = torch.full((8 * groups,), -math.inf, dtype=torch.float16)
        padded[: len(values)] = values
        sums, count = torch.zeros(groups, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        room = 8 * groups  # what is more than wanted shows
        numbers, log_weight = torch.full((room,), -1, dtype=torch.int32), torch.full((room,), math.nan)
        before = [ctypes.c_void_p(padded.data_ptr()), ctypes.c_uint32(groups), ctypes.c_uint32(top_k)]
        numbers_of = [ctypes.c_uint32(wanted), ctypes.c_float(factor), ctypes.c_uint32(uniform)]
        after = [ctypes.c_void_p(x.data_ptr()) for x in (sums, numbers, log_weight, count)]
        assert library.weighted_sampling(*before, *numbers_of, *after, threads), "threads wait for others"
        assert (numbers[int(count) :] == -1).all()
        return Sample(numbers[: int(count)].long(), log_weight[: int(count)])

    def run(*args: object) -> Sample:
        small, large = (with_threads(*args, threads) for threads in (256, 512))
        assert torch.equal(small.numbers, large.numbers) and torch.equal(small.log_weight, large.log_weight)
        return small

    return run


def exact_chances(values: Tensor, top_k: int, wanted: int, factor: float) -> tuple[Tensor, Tensor]:
    """Which of float16 [n] are certain, by whole bins, and the chances of all in float64 before they are limited
    to 1."""
    magnitude = values.view(torch.int16).int() & 0x7FFF
    bins = torch.where(values < 0, -1 - magnitude, magnitude) >> 5
    order = bins.sort(descending=True).values
    certain = bins > order[top_k] if top_k < len(bins) else torch.ones_like(bins, dtype=torch.bool)
    left = math.log(2) * factor * values.double().masked_fill(certain, -math.inf)
    return certain, CAUTION * (wanted - certain.sum()) * left.softmax(-1)


def logits_up_to(spread: float, number: int) -> Tensor:
    """Logits of a head: in equal steps over ±``spread`` in random order."""
    return torch.linspace(-spread, spread, number)[torch.randperm(number)].half()


@pytest.mark.parametrize("sharpness", [0.5, 0.7])
@pytest.mark.parametrize("spread", [1, 10, 30, 100, 1000])
@pytest.mark.parametrize(("number", "top_k", "wanted"), [(4000, 200, 320), (4001, 0, 100)])
def test_chances_are_those_of_sums_in_float64(seed, run, number, top_k, wanted, spread, sharpness):
    values, factor = logits_up_to(spread, number), sharpness * math.log2(math.e)
    certain, expected = exact_chances(values, top_k, wanted, factor)
    sample = run(values, top_k, wanted, factor, int(torch.randint(2**32, ())))
    assert certain[sample.numbers].sum() == certain.sum(), "all certain ones are selected"
    least = certain.sum() + (ROUGHEST * expected).clamp(max=1)[~certain].sum()
    assert int(least - 0.01) <= len(sample.numbers) <= wanted

    chance = sample.log_weight.neg().double().exp2()
    assert (chance[certain[sample.numbers]] == 1).all()
    unsure = (chance < 1) & (chance > 1e-3)  # others are few whole numbers
    ratio = chance[unsure] / expected[sample.numbers][unsure]
    if len(ratio):
        assert ratio.min() / ratio.max() > 1 - 2e-3, "in proportion to weights"
        assert ratio.min() > ROUGHEST and ratio.max() < 1 / ROUGHEST


@pytest.mark.parametrize(
    ("low", "high", "sharpness"),
    [
        (7.98, 7.995, 20.0),  # at the upper end of a bin: they weigh more than its middle
        (7.98, 7.995, 3.0),  # and not so much more that the kernel expects it
        (7.98, 7.995, 300.0),  # so much more that all chances would be 1
        (99.7, 99.95, 0.7),
        (-100.5, -100.1, 0.7),
        (-0.001, 0.001, 1.0),
        (65000.0, 65400.0, 1.0),  # the weight of the bin's edge or of its middle is 0
    ],
)
def test_the_last_values_are_sampled_like_the_first(seed, run, low, high, sharpness):
    """More than 4096 values whose chances were all 1 would add up to 2**32, which is 0 in 32 bits."""
    values = (low + (high - low) * torch.rand(4200)).half()
    factor, wanted = sharpness * math.log2(math.e), 50
    _, expected = exact_chances(values, 0, wanted, factor)
    times = torch.zeros(len(values))
    for start in range(STARTS):
        sample = run(values, 0, wanted, factor, start * 2**32 // STARTS)
        assert len(sample.numbers) <= wanted
        times[sample.numbers] += 1
    first, last = (part.sum() / STARTS for part in (times[:2100], times[2100:]))
    scale = (first + last) / expected.clamp(max=1).sum()
    assert ROUGHEST - 0.05 < scale < 1.05
    for part, own in ((first, expected[:2100]), (last, expected[2100:])):
        assert abs(part - scale * own.clamp(max=1).sum()) < 0.5, "as many as their chances say"


@pytest.mark.parametrize("spread", [1, 100])
def test_the_reference_samples_nearly_the_same_number(seed, run, spread):
    values, factor, top_k, wanted = logits_up_to(spread, 3000), 0.7 * math.log2(math.e), 150, 300
    uniform = int(torch.randint(2**32, ()))
    numbers = (torch.tensor([x]) for x in (top_k, wanted, factor, uniform))
    chosen, chance = systematic_sample(values[None], *numbers)
    certain, expected = exact_chances(values, top_k, wanted, factor)
    torch.testing.assert_close(chance[0].double(), expected.clamp(max=1).masked_fill(certain, 1), rtol=1e-4, atol=2e-6)
    own = len(run(values, top_k, wanted, factor, uniform).numbers)
    assert ROUGHEST * chosen.sum() - 1 <= own <= wanted and chosen.sum() <= wanted


def test_equal_values_whose_chances_are_few_units_do_not_exceed_what_is_wanted(seed, run):
    """Chances round down. Of 2.6 units each, rounded to 3, a sample of one would sometimes have two."""
    number, last = int(CAUTION * 2**20 / 2.6), 2**32 - 1
    values = torch.ones(number).half()
    sample = run(values, 0, 1, 1.0, last)
    numbers = (torch.tensor([x]) for x in (0, 1, 1.0, last))
    chosen, chance = systematic_sample(values[None], *numbers)
    assert len(sample.numbers) == chosen.sum() == 1
    assert chance[0, 0] == 2 * 2.0**-20 and sample.log_weight[0] == 19


def test_a_factor_that_is_not_finite_selects_only_the_certain(seed, run):
    values = torch.randn(1000).half()
    for factor in (math.nan, math.inf):
        certain, _ = exact_chances(values, 100, 200, 1.0)
        assert torch.equal(run(values, 100, 200, factor, 5).numbers, certain.nonzero().flatten())
