"""Ablations: which policies become which variants, and what a table and a plot make of their scores."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shadowkv.eval.records.policies import Variation, local_policies, without_field
from shadowkv.eval.records.predictions import Prediction
from shadowkv.eval.reports.ablation import write_score_ablation
from shadowkv.kvcache.policy.shape import ModelShape

SHAPE = ModelShape(2, 6, 2, 16)


def test_a_field_is_varied_where_it_means_something() -> None:
    names, notes = Variation.parse("chunk=1,8,16").expand(["full", "turbo", "quest:chunk=32", "shadowkv"], SHAPE)
    assert names == [
        *("full", "turbo:chunk=1", "turbo:chunk=8", "quest:chunk=32"),
        *("shadowkv:chunk=1", "shadowkv:chunk=8", "shadowkv:chunk=16"),
    ]
    assert notes == ["turbo:chunk=16 is left out: a key sketch finds chunks of up to 8 tokens, not chunk=16"]
    names, notes = Variation.parse("values=dense,rotated-4bit").expand(["full:keys=low-rank"], SHAPE)
    assert names == ["full:keys=low-rank,values=dense", "full:keys=low-rank,values=rotated-4bit"]
    assert notes == []
    with pytest.raises(ValueError, match="chunk=7 does not divide a page of 64 tokens"):
        Variation.parse("chunk=1,7")


@pytest.mark.parametrize(
    ("label", "field", "parts"),
    [
        ("turbo:rank=64,chunk=8@0.5", "rank", ("turbo:chunk=8@0.5", "64")),
        ("turbo:rank=64@0.5", "rank", ("turbo@0.5", "64")),
        ("turbo:rank=64@0.5", "budget", ("turbo:rank=64", "0.5")),
        ("turbo:rank=64,budget=9", "budget", ("turbo:rank=64", "9")),
        ("turbo@0.5", "rank", ("turbo@0.5", None)),
        ("full", "budget", ("full", None)),
    ],
)
def test_a_label_without_a_field(label: str, field: str, parts: tuple[str, str | None]) -> None:
    assert without_field(label, field) == parts


def test_budgets_are_varied_beside_those_of_the_flag() -> None:
    names, _ = Variation.parse("budget=80,0.5").expand(["full", "turbo"], SHAPE)
    assert [policy.label for policy in local_policies(names, [0.25], SHAPE)] == ["full", "turbo@80", "turbo@0.5"]


def test_minimum_budgets_are_varied_where_no_budget_is_given() -> None:
    varied = Variation.parse("min_budget=80,1280")
    names, notes = varied.expand(["full", "fp8", "turbo", "turbo:budget=9"], SHAPE)
    assert names == ["full", "fp8", "turbo:min_budget=80", "turbo:min_budget=1280", "turbo:budget=9"]
    assert ["fp8 stays as it is" in notes[0], "turbo:budget=9 stays as it is" in notes[1]] == [True, True]
    assert [policy.budget(12_800) for policy in local_policies(names[2:4], [], SHAPE)] == [0.010469, 0.1]  # 134 tokens
    with pytest.raises(ValueError, match="leave out one of min_budget and budget=50"):
        local_policies(names, [50], SHAPE)


def test_scores_by_value(tmp_path: Path) -> None:
    def answers(policy: str, *scores: float) -> list[Prediction]:
        return [Prediction("t", str(n), 4096, policy, policy, 0.1, [], score, 0.0) for n, score in enumerate(scores)]

    predictions = answers("full", 1, 1) + answers("turbo:rank=160", 1, 0) + answers("turbo:rank=64", 0.5, 0)
    write_score_ablation("rank", predictions, "m", tmp_path)
    with (tmp_path / "vary_rank.csv").open() as file:
        assert [tuple(row.values())[1:] for row in csv.DictReader(file)] == [
            ("4096", "full", "", "1", "0", "2"),
            ("4096", "turbo", "160", "0.5", "0.5", "2"),
            ("4096", "turbo", "64", "0.25", "0.25", "2"),
        ]
    assert (tmp_path / "vary_rank.png").stat().st_size > 1000
