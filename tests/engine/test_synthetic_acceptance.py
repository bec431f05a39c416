"""Synthetic acceptance: drafted tokens are accepted at the given rates, whatever the model says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drafting import PLAIN, SEEDED, counts
from test_engine import assert_empty, drain, prompt, tokens
from tiny_llama import write_config

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.request import Request
from shadowkv.engine.speculation.acceptance import accepted_at_random
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.speculation.gate import Account


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, which every policy takes."""
    return write_config(tmp_path_factory.mktemp("wide"), hidden_size=96, max_position_embeddings=2048)


@pytest.fixture
def make(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines that draft whatever it costs."""
    monkeypatch.setattr(Account, "length", lambda self, drafts, *others: max(most for _, most in drafts))
    return partial(make, dtype="float32")


def drafts(rate: float, method: str = "suffix") -> dict[str, Any]:
    """Drafts of 4 tokens, each accepted with probability ``rate`` if all before it are."""
    rates = [rate**place for place in range(1, 5)]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"method": method, "num_speculative_tokens": 4, **synthetic}


def said(engine: Engine, params: SamplingParams = PLAIN, requests: int = 6) -> dict[str, list[int]]:
    for number in range(requests):
        engine.add_request(str(number), prompt(number, 40 + number), params)
    answers = {name: tokens(outputs) for name, outputs in drain(engine).items()}
    assert_empty(engine)
    return answers


def within(found: int, drawn: int, rate: float) -> bool:
    """Whether so many of ``drawn`` numbers are plausible: at most four standard deviations from the mean."""
    return abs(found - drawn * rate) <= 4 * math.sqrt(drawn * rate * (1 - rate))


@pytest.mark.parametrize("rates", [[0.8, 0.64, 0.512], [0.9, 0.3, 0.3], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
def test_rates_are_met_at_each_place_of_a_draft(rates: list[float]) -> None:
    conditional = SpeculativeConfig(
        "mtp", 3, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
    ).conditional_rates
    assert conditional is not None
    lengths = []
    for seed in range(10):
        request = Request("a", [1, 2], PLAIN, 400, seed * 7919)
        for place in range(400):
            request.output_token_ids[:] = [5] * place
            lengths.append(accepted_at_random(request, [place % 11, 7, 7], conditional))
            again = accepted_at_random(request, [place % 11, 7, 7], conditional)
            assert again == lengths[-1]
    for place, rate in enumerate(rates):
        assert within(sum(length > place for length in lengths), len(lengths), rate)


def test_greedy_requests_have_random_numbers_of_their_own() -> None:
    """Although they have one seed: their drafts differ."""
    request = Request("a", [1, 2], PLAIN, 400, 0)
    accepted = [accepted_at_random(request, [token], [0.5]) for token in range(1000)]
    assert within(sum(accepted), 1000, 0.5)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("method", ["suffix", "ngram"])
@pytest.mark.parametrize("params", [PLAIN, SEEDED], ids=["greedy", "seeded"])
def test_answers_repeat_and_meet_the_rate(
    make: Any, monkeypatch: pytest.MonkeyPatch, method: str, params: SamplingParams
) -> None:
    engine = make(kv="full", speculative_config=drafts(0.7, method))
    judged = list[int]()  # for each draft, the number of tokens up to the first that was rejected
    judge = engine.decode_steps.speculation.judge

    def spy(request: Request, drafted: int, accepted: int) -> None:
        judged.append(min(drafted, accepted + 1))
        judge(request, drafted, accepted)

    monkeypatch.setattr(engine.decode_steps.speculation, "judge", spy)
    answers = said(engine, params)
    accepted, _ = counts(engine)
    assert accepted > 300 and within(accepted, sum(judged), 0.7)
    assert {len(answer) for answer in answers.values()} == {params.max_tokens}
    assert said(make(kv="full", speculative_config=drafts(0.7, method)), params) == answers
    assert said(make(kv="full"), params) != answers


@pytest.mark.parametrize("kv", ["full", "turbo:budget=0.5"])
def test_all_drafted_tokens_or_none_are_in_the_answer(make: Any, kv: str) -> None:
    plain = said(make(kv=kv))
    none = make(kv=kv, speculative_config=drafts(0.0))
    assert said(none) == plain and counts(none)[0] == 0 and counts(none)[1] > 500
    every = make(kv=kv, speculative_config=drafts(1.0))
    every.add_request("a", text := prompt(1, 40), replace(PLAIN, max_tokens=11))
    answer, steps = list[int](), 0
    while every.has_work:
        answer += tokens(every.step())
        steps += 1
    assert answer[1:5] == [*text[-3:], answer[0]], "nothing matches a random prompt, so its newest tokens are drafted"
    assert answer[6:10] == answer[2:6] and steps == 2 and counts(every)[1] == 0


@pytest.mark.parametrize(
    "params", [replace(PLAIN, repetition_penalty=1.3), replace(SEEDED, logprobs=2), replace(PLAIN, min_tokens=9)]
)
def test_what_must_fit_the_models_tokens_has_them(make: Any, params: SamplingParams) -> None:
    short = replace(params, max_tokens=40)
    assert said(make(kv="full", speculative_config=drafts(1.0)), short) == said(make(kv="full"), short)


def test_a_warning_says_that_answers_are_not_the_models(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    make(kv="full", speculative_config={"method": "suffix"})
    assert "synthetic" not in caplog.text
    make(kv="full", speculative_config=drafts(0.5))
    assert "so answers are not the model's; use it only to measure speed" in caplog.text
