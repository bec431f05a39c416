"""Forked and batched answers are those that each policy gives to each sample alone, later turns included."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from session import Session
from tqdm import tqdm

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.records.policies import Policy, local_policies
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.running.caches import open_cache, prefill_all
from shadowkv.eval.running.local import Forks
from shadowkv.eval.suites.ruler.data import RULER, WONDERWORDS
from shadowkv.kvcache.parts import prefill as sparse_prefill
from shadowkv.kvcache.presets import preset
from shadowkv.models.loader import LoadedModel

TEXT = "".join(chr(97 + i * i % 23) for i in range(1200))
SAMPLE = Sample("t", "0", (TEXT, "and then?", "and last?"), (("x",), ("y",), ("z",)), 6, "string_match_all", 1240)


def test_a_fork_answers_as_a_run_of_its_own(loaded: LoadedModel) -> None:
    policies = local_policies(["full", "shadowkv", "quest", "turbo"], [80, 0.25], loaded.config.shape)
    together = list(Forks(loaded).answers([(SAMPLE, policies)]))
    assert [p.policy for p in together] == [policy.label for policy in policies]
    forks = Forks(loaded)
    for policy, forked in zip(policies, together):
        (alone,) = forks.answers([(SAMPLE, [policy])])
        assert alone.predictions == forked.predictions
        assert len(alone.predictions) == 3
    attended = {p.policy: p.attended_tokens for p in together}
    assert attended["quest@80"] < attended["quest@0.25"] < attended["full"]
    assert [p.budget for p in together[:3]] == [1, round(80 / 1240, 6), 0.25]


def test_a_long_prompt_shows_how_much_of_it_is_read(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar(tqdm):
        def __init__(self, **options: object) -> None:
            # As on a terminal, and without the second that must have passed.
            super().__init__(**{**options, "disable": False, "delay": 0, "file": io.StringIO()})
            bars.append((options, parts := []))
            self.parts = parts

        def update(self, n: float = 1) -> bool | None:
            self.parts.append(n)
            return super().update(n)

    monkeypatch.setattr("shadowkv.eval.running.caches.tqdm", Bar)
    tokens = loaded.tokenizer.encode(TEXT * 4)
    assert len(tokens) > 2 * 2048, "several blocks"
    cache = open_cache(loaded, preset("full"), len(tokens) + 1)
    prefill_all(loaded.model, [cache], tokens, len(tokens) + 1)
    ((options, parts),) = bars
    assert options["total"] == len(tokens) and options["disable"] is None
    assert len(parts) == 6 and sum(parts) == pytest.approx(len(tokens))  # 3 blocks of 2 layers


def test_one_extra_brings_what_every_suite_needs() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^eval = (\[.*\])$", text, re.MULTILINE)
    assert {RULER.name, WONDERWORDS.name, "matplotlib", "openai", "jieba"} == set(json.loads(extra))


def test_a_batch_answers_as_its_samples_alone(loaded: LoadedModel) -> None:
    """Lengths differ, answers end at different steps, and each later turn comes after all have ended the one before."""
    samples = [replace(SAMPLE, id=str(i), turns=(TEXT[: 1200 - 90 * i], *SAMPLE.turns[1:])) for i in range(5)]
    policies = local_policies(["full", "shadowkv", "turbo:budget=80", "turbo:budget=0.25"], [], loaded.config.shape)
    alone, together = Forks(loaded, batch=1), Forks(loaded, batch=3)
    work = [(sample, policies) for sample in samples]
    common = Counter(token for one in samples for token in _greedy(loaded, policies[0], one.turns[0])).most_common(3)
    alone.ends = together.ends = {common[-1][0]}
    wanted = {(p.sample, p.policy): p for p in alone.answers(work)}
    found = list(together.answers(work))
    # Two batches of about the same size; policy after policy in each.
    assert [p.policy for p in found[:6]] == ["full"] * 3 + ["shadowkv"] * 3
    assert len(found) == len(wanted)
    for p in found:
        other = wanted[p.sample, p.policy]
        assert (p.predictions, p.attended_tokens) == (other.predictions, other.attended_tokens)
        assert p.least_kept_energy == other.least_kept_energy
    assert len({len(answer) for p in found for answer in p.predictions}) > 1


def test_a_copy_holds_what_a_fork_stores(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = loaded.tokenizer.encode(TEXT)
    for kv in ("shadowkv", "turbo"):
        caches = [open_cache(loaded, preset(kv, budget=budget), 1300) for budget in (80, 0.5, 0.5)]
        assert caches[1].snapshots.stored_alike(caches[0].snapshots, len(tokens))
        assert not caches[1].snapshots.stored_alike(caches[0].snapshots, caches[1].spec.dense_limit)
        # What is stored alike is loaded, as the second is; the third is stored for itself.
        monkeypatch.setattr(caches[2].snapshots, "stored_alike", lambda *_: False)
        sequences, _ = prefill_all(loaded.model, caches, tokens, 1300)
        runners = [Runner(loaded.model, cache) for cache in caches]
        with torch.inference_mode():
            steps = [[runners[i].decode([sequences[i]], [5 + step]) for step in range(100)] for i in (1, 2)]
        assert torch.equal(torch.stack(steps[0]), torch.stack(steps[1]))
    assert not open_cache(loaded, preset("quest"), 1300).snapshots.stored_alike(caches[0].snapshots, len(tokens))


def test_policies_whose_prefill_attends_otherwise_have_one_of_their_own(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SPARSE_FROM": 500, "MIN_QUERIES": 100, "DENSE_LAST": 0}.items():
        monkeypatch.setattr(sparse_prefill, name, value)
    monkeypatch.setattr("shadowkv.ops.select_blocks.reference.MIN_BLOCKS", 1)
    tokens = loaded.tokenizer.encode(TEXT)[:1200]
    sparse = "prefill=sparse,prefill_error=0.5"
    names = ["full", f"full:{sparse}", "full:prefill=dense", f"quest:{sparse}", "full:prefill=sparse"]
    caches = [open_cache(loaded, preset(name), 1300) for name in names]
    sequences, logits = prefill_all(loaded.model, caches, tokens, 1300)
    assert [sequence.length for sequence in sequences] == [len(tokens)] * 5
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    for other in (0, 4):  # dense, and sparse with more mass
        assert (logits[other] - logits[1]).abs().max() > 1e-3, "nothing was left out: the test would show nothing"
    assert caches[0].take_attention_density() is None


def _greedy(loaded: LoadedModel, policy: Policy, text: str) -> list[int]:
    assert policy.spec is not None
    return [token for token, _ in Session(loaded, policy.spec, 1300).greedy(loaded.tokenizer.encode(text), 6)]


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
    assert found.output_tokens == 6 * len(SAMPLE.turns)


def test_an_end_token_ends_the_answer(loaded: LoadedModel) -> None:
    forks = Forks(loaded)
    (policy,) = local_policies(["full"], [], loaded.config.shape)
    tokens = _greedy(loaded, policy, TEXT)
    forks.ends = {tokens[2]}
    (found,) = forks.answers([(SAMPLE, [policy])])
    answer = tokens[: tokens.index(tokens[2])]
    assert found.predictions[0] == loaded.tokenizer.decode(answer)
    (alone,) = forks.answers([(replace(SAMPLE, turns=(TEXT,), references=(("x",),)), [policy])])
    assert alone.output_tokens == len(answer)


def test_too_long_a_sample_is_named(loaded: LoadedModel) -> None:
    (policy,) = local_policies(["full"], [], loaded.config.shape)
    sample = Sample("t", "7", ("a" * 8190,), (("x",),), 6, "string_match_all", 8192)
    with pytest.raises(ValueError, match="sample 7 of t needs 8196 tokens, more than the 8192"):
        list(Forks(loaded).answers([(sample, [policy])]))


def test_a_policy_may_name_its_budget(loaded: LoadedModel) -> None:
    names = ["full", "turbo", "turbo:budget=0.03125", "turbo:chunk=8,budget=80", "turbo"]
    policies = local_policies(names, [0.5], loaded.config.shape)
    assert [policy.label for policy in policies] == ["full", "turbo@0.5", "turbo@0.03125", "turbo:chunk=8@80"]
    assert [policy.kv for policy in policies] == ["full", "turbo", "turbo", "turbo:chunk=8"]
    assert [policy.spec and policy.spec.budget for policy in policies] == [None, 0.5, 0.03125, 80]
    with pytest.raises(ValueError, match="attends to every token"):
        local_policies(["full:budget=0.5"], [], loaded.config.shape)
