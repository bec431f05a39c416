"""Open-ended samples and the tables of their answers."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_data import smollm2_tokenizer
from predicted import predicted

from shadowkv.eval import __main__ as command
from shadowkv.eval import command as execution
from shadowkv.eval.metrics.scoring import ends_in_loop
from shadowkv.eval.prompts import texts
from shadowkv.eval.prompts.texts import Haystack
from shadowkv.eval.records.predictions import Prediction, PredictionFile, Sample
from shadowkv.eval.reports.open_ended import markdown, summarise
from shadowkv.eval.reports.outputs import write_outputs
from shadowkv.eval.suites import open_ended
from shadowkv.models.loader import LoadedModel


@pytest.fixture(autouse=True)
def essays(monkeypatch: pytest.MonkeyPatch) -> None:
    hay = Haystack("essays", tuple(f"This is sentence {number} of an essay." for number in range(500)))
    monkeypatch.setattr(texts, "haystack", lambda file: hay)


def made(task: str, seed: int, count: int = 2, chat: bool = True) -> list[Sample]:
    return open_ended.samples(task, smollm2_tokenizer(), 4096, count, seed, chat)


@pytest.mark.parametrize("task", open_ended.TASKS)
def test_a_prompt_is_a_chat_that_fills_the_length(task: str, seed: int) -> None:
    for sample in made(task, seed):
        (prompt,) = sample.turns
        limit = sample.length - sample.max_new_tokens
        assert 0.9 * limit <= len(smollm2_tokenizer().encode(prompt)) <= limit
        assert prompt.rstrip().endswith("assistant")
        assert ("# File " in prompt) == task.endswith("code")
        assert ("==> " in prompt) == task.endswith("logs")
        assert ("Table 1: " in prompt) == task.endswith("tables")
        assert ("of an essay." in prompt) == task.endswith("essays")
        assert (sample.max_new_tokens, sample.metric) == (1024, "no_loop")
    (plain,) = made(task, seed, 1, chat=False)
    assert plain.turns[0].startswith("Here ")


def test_samples_depend_on_the_seed_alone() -> None:
    for task in ("summarise_code", "summarise_essays"):
        many = made(task, 1, 3)
        assert made(task, 1, 1) == many[:1]
        assert len({sample.turns for sample in many}) == 3
        assert made(task, 2, 1)[0].turns != many[0].turns


def test_too_short_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a length of 1024 leaves no prompt beside 1024 new tokens"):
        open_ended.samples("explain_code", smollm2_tokenizer(), 1024, 1, 0, True)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("Once. " + "and so on " * 26, True),  # 260 characters
        ("Once. " + "and so on " * 24, False),  # 240
        ("x" * 256, True),
        ("x" * 256 + "y", False),
        ("".join(f"{number}, " for number in range(300)), False),
        ("Start. " + "".join(f"{number} " for number in range(100)) * 3, True),  # a cycle longer than the least loop
        ("Start. " + "".join(f"{number} " for number in range(100)) * 2, False),
        ("Start. " + "A sentence of forty-one characters here. " * 7 + "A sent", True),  # cut off within the cycle
        ("", False),
    ],
)
def test_loops(text: str, loops: bool) -> None:
    assert ends_in_loop(text) == loops


def answer(policy: str, number: int, tokens: int | None, text: str, task: str = "explain_code") -> Prediction:
    made = predicted(float(not ends_in_loop(text)), number, policy, task, 16384, tokens)
    return replace(made, predictions=[text])


ANSWERS = [
    *(answer("full", 0, 100, "alpha beta"), answer("full", 1, 1023, "gamma"), answer("full", 2, 1024, "delta")),
    # The first half agrees: F1 = 2 * 1 / (2 + 2). The second loops up to the limit. The third is full attention's own.
    *(answer("turbo", 0, 130, "alpha zeta"), answer("turbo", 1, 1024, "no " * 90), answer("turbo", 2, 1024, "delta")),
]


def test_figures_are_paired_with_full_attention() -> None:
    full, turbo = summarise(ANSWERS)
    assert full.figures["ended"][0] == pytest.approx(2 / 3)
    assert (full.figures["looping"], full.differences, "agreement" in full.figures) == ((0, 0), {}, False)
    assert turbo.figures["ended"][0] == turbo.figures["looping"][0] == pytest.approx(1 / 3)
    assert turbo.figures["agreement"][0] == pytest.approx((1 / 2 + 0 + 1) / 3)
    # 30, 1 and 0 tokens more: variance (19.67^2 + 9.33^2 + 10.33^2) / 2.
    mean, error = turbo.differences["output_tokens"]
    assert (mean, error) == (pytest.approx(31 / 3), pytest.approx(math.sqrt(290.333 / 3), rel=1e-3))
    assert turbo.differences["ended"][0] == pytest.approx(-1 / 3)
    assert turbo.differences["looping"][0] == pytest.approx(1 / 3)


def test_tables(tmp_path: Path) -> None:
    write_outputs(ANSWERS, "m", tmp_path)
    with (tmp_path / "open_ended.csv").open() as file:
        full, turbo = csv.DictReader(file)
    assert (full["policy"], full["agreement"], full["ended_difference"]) == ("full", "", "")
    assert (turbo["policy"], turbo["samples"], turbo["agreement"]) == ("turbo", "3", "0.5")
    assert (float(turbo["output_tokens_difference"]), turbo["looping"]) == (pytest.approx(31 / 3, abs=1e-5), "0.333333")
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert "| 16384 | explain_code | turbo | 3 | 726.0 ± 298.0 (+10.3 ± 9.8) |" in lines[-1]
    assert lines[-1].endswith("| 33.3 ± 33.3 (-33.3 ± 33.3) | 33.3 ± 33.3 (+33.3 ± 33.3) | 50.0 ± 28.9 |")
    other = tmp_path / "other"
    other.mkdir()
    write_outputs([predicted(1)], "m", other)
    assert not (other / "open_ended.csv").exists()
    assert "Open-ended" not in (other / "summary.md").read_text()


def test_a_server_that_does_not_count_tokens() -> None:
    (row,) = summarise([answer("theirs", 0, None, "alpha")])
    assert set(row.figures) == {"looping"}
    assert markdown([row]).splitlines()[-1] == "| 16384 | explain_code | theirs | 1 | – | – | 0.0 | – |"


def test_the_command(tiny: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "load_from_config", lambda config: loaded)
    monkeypatch.setattr(open_ended, "NEW_TOKENS", 8)
    out = tmp_path / "out"
    model = ["--model", str(tiny), "--load-format", "dummy", "--out", str(out), "--no-chat"]
    what = ["--tasks", "summarise_code", "explain_essays", "--length", "1500", "--samples", "2"]
    assert command.main(["open-ended", *model, *what, "--kv", "full", "quest", "--budget", "80"]) == 0
    assert [p.output_tokens for p in PredictionFile(out / "predictions.jsonl").predictions] == [8] * 8
    with (out / "open_ended.csv").open() as file:
        rows = list(csv.DictReader(file))
    tasks = ("explain_essays", "summarise_code", "all")
    assert [(row["task"], row["policy"]) for row in rows] == [(t, p) for t in tasks for p in ("full", "quest@80")]
    assert all(float(row["ended"]) == 0 for row in rows)
