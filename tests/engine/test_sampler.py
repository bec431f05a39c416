"""The sampler against its formulas: candidate sets, shares, penalties, log-probabilities, repeatability."""

import math
import random

import pytest
import torch

from shadowkv.engine.execution.sampler import NO_TOKEN, Sampler, _random
from shadowkv.engine.execution.thinking_budget import ThinkingBudget
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import RepetitionDetectionParams, SamplingParams, choice_seed
from shadowkv.engine.scheduling.repetition import Repetition
from shadowkv.ops.registry import Ops

sample = Sampler(Ops("cpu")).sample


def request(seed: int = 0, prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), **params: object) -> Request:
    return Request("r", list(prompt), SamplingParams(**params), 100, seed, output_token_ids=list(output))


def samples(logits: torch.Tensor, count: int, first_seed: int = 0, **params: object) -> list[int]:
    """Tokens that ``count`` requests, alike but for their seeds, sample from the same logits [V]."""
    requests = [request(first_seed + i, **params) for i in range(count)]
    return sample(logits.expand(count, -1).clone(), requests)[0]


def assert_sampled_from(tokens: list[int], shares: torch.Tensor) -> None:
    """Pearson's chi-square test at less than one false alarm in 10^6: a chi-square of f degrees of freedom is above
    f + 2 sqrt(f x) + 2 x with a chance of at most exp(-x) (Laurent and Massart, 2000, lemma 1)."""
    expected = shares.double() * len(tokens)
    seen = torch.bincount(torch.tensor(tokens), minlength=len(shares)).double()
    possible = expected > 0
    assert seen[~possible].sum() == 0
    statistic = float(((seen - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    most = freedom + 2 * math.sqrt(freedom * 14) + 2 * 14
    assert statistic < most, f"{statistic:.1f} at {freedom} degrees of freedom"


def test_temperature_zero_takes_the_likeliest_token_whatever_the_seed(seed):
    logits = torch.randn(20, 500)
    requests = [request(i, temperature=0, top_p=0.3, top_k=7) for i in range(20)]
    assert sample(logits.clone(), requests)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=str)
def test_a_single_candidate_is_the_greedy_one(seed, params):
    logits = torch.randn(30, 500)
    requests = [request(i + seed, **params) for i in range(30)]
    assert sample(logits.clone(), requests)[0] == logits.argmax(-1).tolist()


def test_a_seeded_sample_does_not_depend_on_the_batch(seed):
    pick = random.Random(seed)
    choices = [
        {"temperature": pick.choice([0, 0.5, 1, 2]), "top_k": pick.choice([0, -1, 5, 50]), "top_p": pick.random() or 1}
        for _ in range(16)
    ]
    logits = 3 * torch.randn(16, 300)
    requests = [request(pick.randrange(2**63), output=(1,) * pick.randrange(5), **params) for params in choices]
    together = sample(logits.clone(), requests)[0]
    alone = [sample(logits[i : i + 1].clone(), requests[i : i + 1])[0][0] for i in range(16)]
    assert together == alone
    order = list(range(16))
    pick.shuffle(order)
    assert sample(logits[order], [requests[i] for i in order])[0] == [together[i] for i in order]


def test_the_same_seed_and_step_repeat_and_other_steps_and_seeds_do_not():
    logits = torch.zeros(1, 1000)

    def text(seed: int) -> list[int]:
        return [sample(logits.clone(), [request(seed, output=(5,) * step)])[0][0] for step in range(20)]

    assert text(7) == text(7)
    assert len(set(text(7))) > 15
    assert sum(a == b for a, b in zip(text(7), text(8))) < 5
    assert sum(a == b for a, b in zip(text(7)[1:], text(8))) < 5  # nor is one seed the next one, a step on


def test_numbers_of_a_seed_are_those_of_splitmix64():
    """Vigna's splitmix64.c: the first outputs of state 1234567."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [output >> 32 for output in outputs]
    assert _random([1234567] * 3, [1, 2, 3]).tolist() == expected
    assert _random([1234567 + 2**64, 1234567 - 2**64], [1, 2]).tolist() == expected[:2]


def test_a_sampler_keeps_nothing_of_other_requests(seed):
    logits, pick, sampler = 2 * torch.randn(6, 50), random.Random(seed), Sampler(Ops("cpu"))
    kinds = [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4, "temperature": 3.0}, {}]
    for _ in range(20):
        requests = [request(pick.randrange(99), **pick.choice(kinds)) for _ in range(pick.randrange(1, 7))]
        for step in range(2):
            steps = [step + pick.randrange(5) for _ in requests]
            tokens = [sampler.choose(logits[: len(requests)], requests, steps)[0]]
            tokens += [Sampler(Ops("cpu")).choose(logits[: len(requests)], requests, steps)[0]]
            assert torch.equal(*tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax_at_the_temperature(seed, temperature):
    logits = torch.randn(12).clamp(-1.5, 1.5)  # chi-square is not for what is expected a hundredth of a time
    tokens = samples(logits, 4000, seed, temperature=temperature)
    assert_sampled_from(tokens, torch.softmax(logits.double() / temperature, -1))


def test_successive_steps_of_one_request_follow_the_softmax_too(seed):
    logits = torch.randn(8)
    requests = [request(seed, output=(0,) * step) for step in range(2000)]
    tokens = sample(logits.expand(2000, -1).clone(), requests)[0]
    assert_sampled_from(tokens, torch.softmax(logits.double(), -1))


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Shares of the candidates, by the definitions; logits are distinct."""
    order = logits.double().argsort(descending=True)
    order = order[:top_k] if top_k > 0 else order
    shares = torch.softmax(logits.double()[order], -1)
    mass, smallest = 0.0, []
    for token, share in zip(order.tolist(), shares.tolist()):
        if mass >= top_p:
            break
        mass += share
        if share >= min_p * float(shares[0]):
            smallest.append(token)
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[smallest] = torch.softmax(logits.double()[smallest], -1)
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"top_k": 1000},
        {"top_k": -1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 1.0},
        {"min_p": 0.2},
        {"min_p": 0.01},
        {"top_k": 10, "top_p": 0.6, "min_p": 0.1},
    ],
    ids=str,
)
def test_samples_come_from_the_candidates_alone_and_by_their_shares(seed, params):
    logits = 2 * torch.randn(40)
    shares = kept(logits, **params)
    tokens = samples(logits, 3000, seed, **params)
    assert set(tokens) <= set(shares.nonzero().flatten().tolist())
    likely = shares * 3000 > 20
    assert set(likely.nonzero().flatten().tolist()) <= set(tokens)
    rare = len(shares)  # one class of all the others, for the test's sake
    pooled = [token if likely[token] else rare for token in tokens]
    assert_sampled_from(pooled, torch.cat((shares * likely, shares[~likely].sum()[None])))


def test_top_p_keeps_the_token_that_reaches_the_mass_and_none_after_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert set(samples(logits, 500, top_p=0.5)) == {0}
    assert set(samples(logits, 500, top_p=0.51)) == {0, 1}
    assert set(samples(logits, 500, top_p=0.76)) >= {0, 1}
    assert len(set(samples(logits, 500, top_p=0.76))) == 3  # one of the two that tie


def test_candidates_follow_the_temperature():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(samples(logits, 500, top_p=0.6)) == {0, 1}
    assert set(samples(logits, 500, top_p=0.6, temperature=0.3)) == {0}
    assert set(samples(logits, 500, min_p=0.5, temperature=100.0)) == {0, 1, 2}


def test_requests_of_one_batch_keep_their_own_candidates(seed):
    logits = 2 * torch.randn(40)
    choices = [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.3}, {"temperature": 0}, {"top_k": 5, "temperature": 3.0}]
    requests = [request(seed + i, **choices[i % 5]) for i in range(1000)]
    tokens = sample(logits.expand(1000, -1).clone(), requests)[0]
    for i, params in enumerate(choices):
        shares = kept(logits, **{key: value for key, value in params.items() if key != "temperature"})
        allowed = {int(logits.argmax())} if params.get("temperature") == 0 else set(shares.nonzero().flatten().tolist())
        assert set(tokens[i::5]) == allowed or set(tokens[i::5]) < allowed


def penalise(logits: torch.Tensor, seen: set[int], penalty: float) -> torch.Tensor:
    result = logits.clone()
    for token in seen:
        value = float(logits[token])
        result[token] = value / penalty if value > 0 else value * penalty
    return result


@pytest.mark.parametrize("penalty", [1.3, 5.0, 0.5])
def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_tokens_seen(seed, penalty):
    logits = torch.randn(3, 200)
    prompt, output = (3, 3, 17, 100, int(logits[0].argmax())), (5, 17, 6, 6)
    requests = [
        request(prompt=prompt, output=output, temperature=0, repetition_penalty=penalty),
        request(prompt=prompt, output=output, temperature=0),
        request(seed, prompt=prompt, output=output, top_k=1, repetition_penalty=penalty),
    ]
    changed = logits.clone()
    tokens = sample(changed, requests)[0]
    expected = [penalise(row, {*prompt, *output}, penalty) for row in logits]
    torch.testing.assert_close(changed, torch.stack([expected[0], logits[1], expected[2]]))
    assert tokens == [int(expected[0].argmax()), int(logits[1].argmax()), int(expected[2].argmax())]


def test_repetition_penalty_changes_what_is_chosen():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    assert sample(logits.clone(), [request(prompt=(0,), temperature=0, repetition_penalty=1.5)])[0] == [1]
    assert sample(logits.clone(), [request(prompt=(1,), temperature=0, repetition_penalty=1.5)])[0] == [0]
    both = torch.tensor([[-1.0, -1.2]])
    assert sample(both.clone(), [request(prompt=(0,), temperature=0, repetition_penalty=1.5)])[0] == [1]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.3, "top_k": 4}, {"repetition_penalty": 2.0}])
def test_logprobs_are_those_of_the_models_own_logits_likeliest_first(seed, params):
    logits = torch.randn(3, 100)
    requests = [
        request(seed, logprobs=5, **params),
        request(seed + 1, **params),
        request(seed + 2, logprobs=0, **params),
    ]
    tokens, logprobs, _ = sample(logits.clone(), requests)
    expected = torch.log_softmax(logits.double(), -1)
    assert logprobs[1] is None
    for row, count in ((0, 5), (2, 0)):
        got = logprobs[row]
        assert got.token_id == tokens[row]
        assert got.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        best = expected[row].argsort(descending=True)[:count].tolist()
        assert list(got.top) == best
        assert list(got.top.values()) == pytest.approx([float(expected[row, token]) for token in best], abs=1e-5)


def test_each_request_gets_as_many_alternatives_as_it_asked_for():
    requests = [request(logprobs=count) for count in (0, 20, 1, 7)]
    logprobs = sample(torch.randn(4, 64), requests)[1]
    assert [len(entry.top) for entry in logprobs] == [0, 20, 1, 7]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_row_that_is_not_finite_is_flagged_and_leaves_the_others_alone(seed, broken, everywhere):
    logits = torch.randn(5, 100)
    params = [
        {"temperature": 0, "logprobs": 3},
        {"logprobs": 2},
        {"top_p": 0.5},
        {"temperature": 0.7, "repetition_penalty": 1.4, "min_p": 0.1, "logprobs": 1},
        {"top_k": 3},
    ]
    requests = [request(seed + i, prompt=(i, 50), **each) for i, each in enumerate(params)]
    good = sample(logits.clone(), requests)
    assert good[2] == [True] * 5
    for row in range(5):
        bad = logits.clone()
        bad[row, slice(None) if everywhere else 50] = broken
        tokens, logprobs, finite = sample(bad, requests)
        assert finite == [i != row for i in range(5)]
        assert 0 <= tokens[row] < 100
        for i in set(range(5)) - {row}:
            assert tokens[i] == good[0][i]
            assert logprobs[i] == good[1][i]


def test_a_large_vocabulary_with_extreme_logits_stays_within_its_candidates(seed):
    logits = torch.full((50_000,), -60.0)
    logits[[7, 49_999]] = 80.0
    assert set(samples(logits, 50, seed)) == {7, 49_999}


def test_sampling_params_list_every_value_out_of_range():
    with pytest.raises(ValueError) as error:
        SamplingParams(
            max_tokens=0, temperature=-1, top_p=0, top_k=-2, min_p=2, repetition_penalty=0, logprobs=-2, stop=("",)
        )
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs", "stop")
    for name in names:
        assert name in str(error.value), name


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_nan_is_out_of_range(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: math.nan})


@pytest.mark.parametrize(
    "params",
    [{"top_k": -1}, {"top_p": 1.0}, {"min_p": 1.0}, {"logprobs": 0}, {"logprobs": 20}, {"temperature": 0}],
    ids=str,
)
def test_values_at_the_ends_of_their_ranges_are_allowed(params):
    SamplingParams(**params)


def test_a_request_counts_all_tokens_but_the_last_sampled_as_cached():
    one = request(prompt=(1, 2, 3), output=(4,))
    assert one.token_ids == [1, 2, 3, 4]
    assert one.capacity == 3 + 100 - 1


@pytest.mark.parametrize("temperature", [1e-46, 1e-38, 1e-6])
def test_coldest_temperatures_are_greedy(temperature):
    request = Request("r", [0], SamplingParams(temperature=temperature), 9, 3)
    assert sample(torch.tensor([[1.0, 9.0, 3.0, 0.0]]), [request])[0] == [1]


def test_more_logprobs_than_tokens_give_every_token():
    request = Request("r", [0], SamplingParams(temperature=0, logprobs=20), 9, 3)
    _, (found,), _ = sample(torch.tensor([[1.0, 9.0, 3.0, 0.0]]), [request])
    assert sorted(found.top) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("penalties", "chosen"),
    [
        ({"presence_penalty": 0.9}, 1),
        ({"presence_penalty": 1.1}, 2),
        ({"frequency_penalty": 0.2}, 1),
        ({"frequency_penalty": 0.3}, 2),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.1}, 1),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.2}, 2),
        ({"logit_bias": {3: 2.9}}, 1),
        ({"logit_bias": {3: 3.1}}, 3),
    ],
)
def test_penalties_count_generated_tokens_and_biases_are_added(penalties, chosen):
    request = Request("r", [2, 2, 2], SamplingParams(temperature=0, **penalties), 9, 3)
    request.output_token_ids = [1, 1, 1, 1]
    assert sample(torch.tensor([[0.0, 3.0, 2.0, 0.0]]), [request])[0] == [chosen]


def test_seeds_of_choices_repeat_and_are_nobody_elses() -> None:
    found = [choice_seed(seed, choice) for seed in (*range(-50, 50), -(2**63), 2**63 - 1) for choice in range(16)]
    assert len(set(found)) == len(found) and all(-(2**63) <= one < 2**63 for one in found)
    assert [choice_seed(seed, 0) for seed in (5, -5)] == [5, -5]
    # The same in every version: an answer repeats after an update too.
    assert choice_seed(5, 1) == 110550812080009723


def test_only_allowed_tokens_are_chosen(seed):
    logits = torch.randn(40, 500)
    allowed = [3, 77, 400]
    found, logprobs, _ = sample(logits.clone(), [request(i, allowed_token_ids=allowed, logprobs=0) for i in range(40)])
    assert {*found} <= {*allowed} and len({*found}) > 1
    expected = logits.log_softmax(-1)  # reported as the model has them
    assert [step.logprob for step in logprobs] == pytest.approx([expected[row, found[row]].item() for row in range(40)])
    assert sample(logits.clone(), [request(i) for i in range(40)])[0] != found


def test_the_last_token_of_a_bad_word_is_not_chosen_after_the_others():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])

    def chosen(output: tuple[int, ...]) -> int:
        asking = request(output=output, temperature=0, bad_words=["a", "b c d"])
        asking.bad_words = {None: [(4,)], 2: [(1, 2, 3)]}
        return sample(logits[None].clone(), [asking])[0][0]

    assert chosen(()) == chosen((2,)) == chosen((2, 1)) == chosen((1, 2, 0)) == 3
    assert chosen((1, 2)) == chosen((0, 1, 2)) == 2


def test_where_no_token_may_follow_none_is_chosen():
    logits = torch.randn(3, 50)
    asking = request(allowed_token_ids=[7], bad_words=["x"], logprobs=0), request(allowed_token_ids=[7]), request()
    asking[0].bad_words = {None: [(7,)]}
    found, _, finite = sample(logits, [*asking])
    assert found[:2] == [NO_TOKEN, 7] and found[2] >= 0 and all(finite)


def test_thoughts_end_with_their_budget():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    begin, end = 0, 1

    def chosen(prompt: tuple[int, ...], outputs: tuple[int, ...], budget: int) -> list[int]:
        """What follows each beginning of ``outputs``."""
        asking = request(prompt=prompt, temperature=0, thinking_token_budget=budget)
        asking.thoughts = ThinkingBudget((begin, end), budget, prompt)
        found = []
        for count in range(len(outputs) + 1):
            asking.output_token_ids = list(outputs[:count])
            found += sample(logits[None].clone(), [asking])[0]
        return found

    assert chosen((2, begin), (3, 3, end, 3), 2) == [3, 3, end, 3, 3]  # which the prompt has begun
    assert chosen((2,), (begin, 3, 3, end, 3), 2) == [3, 3, 3, end, 3, 3]
    assert chosen((2,), (begin, 3, end, 3, 3, 3), 2) == [3] * 7  # they have ended by themselves
    assert chosen((2, begin), (), 0) == [end]
    assert chosen((begin, end), (3, 3, 3), 1) == [3] * 4  # there are none


def test_log_probabilities_of_all_tokens_and_of_named_ones():
    logits = torch.randn(2, 50)
    every, named = sample(logits.clone(), [request(logprobs=-1), request(temperature=0, logprob_token_ids=[7, 9])])[1]
    expected = logits.log_softmax(-1)
    assert [every.top[token] for token in range(50)] == pytest.approx(expected[0].tolist())
    likeliest = int(logits[1].argmax())
    assert {*named.top} == {likeliest, 7, 9}
    assert named.top[9] == pytest.approx(expected[1, 9].item()) and named.top[likeliest] == named.logprob


@pytest.mark.parametrize("pattern, count", [([1], 3), ([1, 2], 2), ([1, 2, 1], 4)], ids=str)
def test_an_answer_repeats_itself_with_the_last_token_of_a_repeated_pattern(pattern, count):
    params = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=len(pattern), min_count=count)
    detector = Repetition(params)
    assert not any(detector.take(token) for token in (5, 6, *(pattern * count)[:-1]))
    assert detector.take(pattern[-1])


def test_what_repeats_itself_agrees_with_the_definition(seed):
    pick = random.Random(seed)
    for _ in range(200):
        least, count = pick.randint(1, 3), pick.randint(2, 4)
        most = pick.randint(least, 6)
        detector = Repetition(RepetitionDetectionParams(most, least, count))
        tokens: list[int] = []
        for _ in range(40):
            tokens.append(pick.randint(0, 1))
            sizes = [size for size in range(least, most + 1) if size * count <= len(tokens)]
            expected = any(tokens[-size * count :] == tokens[-size:] * count for size in sizes)
            assert detector.take(tokens[-1]) == expected, (tokens, least, most, count)
