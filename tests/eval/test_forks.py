"""Forked answers are those that each policy gives alone, later turns included."""

from __future__ import annotations

import pytest

from shadowkv.eval.forks import Forks
from shadowkv.eval.policies import local_policies
from shadowkv.eval.sample import Sample
from shadowkv.eval.session import Session
from shadowkv.models.loader import LoadedModel

TEXT = "".join(chr(97 + i * i % 23) for i in range(1200))
SAMPLE = Sample("t", "0", (TEXT, "and then?", "and last?"), (("x",), ("y",), ("z",)), 6, "string_match_all", 1240)


def test_a_fork_answers_as_a_run_of_its_own(loaded: LoadedModel) -> None:
    policies = local_policies(["full", "shadowkv", "quest", "turbo"], [64, 0.25], loaded.config.shape)
    together = list(Forks(loaded).answers([(SAMPLE, policies)]))
    assert [p.policy for p in together] == [policy.label for policy in policies]
    forks = Forks(loaded)
    for policy, forked in zip(policies, together):
        (alone,) = forks.answers([(SAMPLE, [policy])])
        assert alone.predictions == forked.predictions
        assert len(alone.predictions) == 3
    attended = {p.policy: p.attended_tokens for p in together}
    assert attended["quest@64"] < attended["quest@0.25"] < attended["full"]
    assert [p.budget for p in together[:3]] == [1, round(64 / 1240, 6), 0.25]


def test_the_answers_of_full_attention_are_those_of_one_long_prompt(loaded: LoadedModel) -> None:
    """Turns extend the sequence: each answer follows from the whole text before it, prefilled afresh."""
    forks, encode = Forks(loaded), loaded.tokenizer.encode
    forks.ends = set()
    (policy,) = local_policies(["full"], [], loaded.config.shape)
    (found,) = forks.answers([(SAMPLE, [policy])])
    tokens: list[int] = []
    for turn, answer in zip(SAMPLE.turns, found.predictions):
        tokens += encode(turn)
        chosen = [token for token, _ in Session(loaded, policy.spec, 1300).greedy(tokens, 6)]
        assert loaded.tokenizer.decode(chosen) == answer
        tokens += chosen


def test_an_end_token_ends_the_answer(loaded: LoadedModel) -> None:
    forks = Forks(loaded)
    (policy,) = local_policies(["full"], [], loaded.config.shape)
    tokens = [t for t, _ in Session(loaded, policy.spec, 1300).greedy(loaded.tokenizer.encode(TEXT), 6)]
    forks.ends = {tokens[2]}
    (found,) = forks.answers([(SAMPLE, [policy])])
    assert found.predictions[0] == loaded.tokenizer.decode(tokens[: tokens.index(tokens[2])])


def test_too_long_a_sample_is_named(loaded: LoadedModel) -> None:
    (policy,) = local_policies(["full"], [], loaded.config.shape)
    sample = Sample("t", "7", ("a" * 8190,), (("x",),), 6, "string_match_all", 8192)
    with pytest.raises(ValueError, match="sample 7 of t needs 8196 tokens, more than the 8192"):
        list(Forks(loaded).answers([(sample, [policy])]))
