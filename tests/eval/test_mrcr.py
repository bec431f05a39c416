"""MRCR: the answer is in the prompt alone, and answers are compared with full attention's."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_data import smollm2_tokenizer
from predicted import predicted

from shadowkv.eval import __main__ as command
from shadowkv.eval import command as execution
from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.prompts.writing import KINDS, SENTENCES, TOPICS, piece
from shadowkv.eval.records.predictions import Prediction, Sample
from shadowkv.eval.reports.outputs import write_outputs
from shadowkv.eval.running.local import Forks
from shadowkv.eval.suites import mrcr
from shadowkv.models.loader import LoadedModel

QUESTION = re.compile(r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+)\. Do not include any other text")
TURNS = {
    True: re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.S),
    False: re.compile(r"User:\n(.*?)\n\nAssistant:\n(.*?)\n\n(?=User:)", re.S),
}
"""A request and its answer, in SmolLM2's chat template and in plain prompts."""


def made(task: str, seed: int, count: int = 2, chat: bool = True, length: int = 4096) -> list[Sample]:
    return mrcr.samples(task, smollm2_tokenizer(), length, count, seed, chat)


def asked(sample: Sample, chat: bool) -> tuple[str, int, list[str]]:
    """The prefix, the index of the text that is wanted, and all texts for the same request; from the prompt alone."""
    (prompt,) = sample.turns
    question = QUESTION.search(prompt)
    assert question is not None
    prefix, number, what = question.groups()
    request = f"Write a {what}."
    return prefix, int(number) - 1, [answer for turn, answer in TURNS[chat].findall(prompt) if turn == request]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("task", mrcr.TASKS)
def test_the_right_text_scores_one_and_fits(task: str, chat: bool, seed: int) -> None:
    for sample in made(task, seed, chat=chat):
        prefix, number, texts = asked(sample, chat)
        assert len(texts) == len(set(texts)) == mrcr.NEEDLES[task]
        right = prefix + texts[number]
        assert score(sample, [right]) == 1
        assert score(sample, [texts[number]]) == 0
        assert score(sample, [right[: len(right) // 2]]) == pytest.approx(2 / 3, abs=0.05)
        assert all(score(sample, [prefix + other]) < 0.5 for other in texts if other != texts[number])
        tokens = len(smollm2_tokenizer().encode(sample.turns[0]))
        limit = sample.length - sample.max_new_tokens
        assert 0.9 * limit <= tokens <= limit
        assert len(smollm2_tokenizer().encode(right)) <= sample.max_new_tokens
        end = "<|im_start|>assistant\n" if chat else "\n\nAssistant:\n"
        assert sample.turns[0].endswith(end)


def test_samples_depend_on_the_seed_alone() -> None:
    many = made("mrcr_4needle", 1, 3)
    assert made("mrcr_4needle", 1, 1) == many[:1]
    assert len({sample.turns for sample in many}) == 3
    assert made("mrcr_4needle", 2, 1)[0].turns != many[0].turns


def test_a_conversation_is_the_same_on_every_machine() -> None:
    question = mrcr.conversation(8, 40, random.Random("mrcr_8needle/0/0"))
    found = hashlib.sha256(json.dumps([question.text, question.history, question.references]).encode()).hexdigest()
    assert found == "8cb2c9d8144603701ebc2f5b8c3dc20b44e2058f3f92ea4f2237cffc28bbb6a1"


def test_pieces_differ_and_name_their_topic(seed: int) -> None:
    rng = random.Random(seed)
    for kind, separator in KINDS.items():
        topic = rng.choice(TOPICS)
        pieces = [piece(kind, topic, rng) for _ in range(20)]
        assert len(set(pieces)) == 20
        assert all(text.lower().count(topic) == SENTENCES for text in pieces)
        assert all(("\n" in text) == (separator == "\n") for text in pieces)


def test_too_short_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="mrcr_8needle at length 1024: the shortest prompt has"):
        made("mrcr_8needle", 0, length=1024)


def answer(policy: str, number: int, text: str, value: float, task: str = "mrcr_2needle") -> Prediction:
    return replace(predicted(value, number, policy, task, 16384), predictions=[text])


ANSWERS = [
    *(answer("full", 0, "abcd", 0.2), answer("full", 1, "gh", 0.1), answer("full", 2, "ij", 0)),
    # 2 * 3 matching characters of 4 + 4; the same but for the user's next turn; nothing in common.
    *(answer("turbo", 0, "abed", 0.4), answer("turbo", 1, "gh\n\nUser:\nAgain", 0.1), answer("turbo", 2, "k", 0)),
    answer("turbo", 3, "full attention has not answered this one", 0),
]


def test_answers_are_compared_with_full_attentions(tmp_path: Path) -> None:
    write_outputs(ANSWERS, "m", tmp_path)
    with (tmp_path / "mrcr.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["policy"], row["length"], row["task"], row["pairs"]) == ("turbo", "16384", "mrcr_2needle", "3")
    assert float(row["similarity"]) == pytest.approx((3 / 4 + 1 + 0) / 3, abs=1e-6)
    low, high = float(row["similarity_low"]), float(row["similarity_high"])
    assert 0 <= low < float(row["similarity"]) < high <= 1
    summary = (tmp_path / "summary.md").read_text()
    assert summary.splitlines()[-1].startswith("| 16384 | mrcr_2needle | turbo | 3 | 58.3 ± 30.0 | ")
    assert "10.0 ± 5.8" in summary  # full attention's score: 0.2, 0.1, 0


def test_without_full_attention_there_is_nothing_to_compare(tmp_path: Path) -> None:
    write_outputs([one for one in ANSWERS if one.policy != "full"], "m", tmp_path)
    assert not (tmp_path / "mrcr.csv").exists()
    assert "similarity" not in (tmp_path / "summary.md").read_text()


def test_the_command_and_going_on(
    tiny: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "load_from_config", lambda config: loaded)
    monkeypatch.setattr(mrcr, "_answer_tokens", lambda tokenizer: 8)
    out = tmp_path / "out"
    model = ["--model", str(tiny), "--load-format", "dummy", "--out", str(out), "--no-chat"]
    what = ["--tasks", "mrcr_2needle", "--length", "2500", "--samples", "2"]
    arguments = ["mrcr", *model, *what, "--kv", "full", "quest", "--budget", "80"]
    assert command.main(arguments) == 0
    with (out / "mrcr.csv").open() as file:
        assert [(row["policy"], row["pairs"]) for row in csv.DictReader(file)] == [("quest@80", "2")]
    lines = (out / "predictions.jsonl").read_text().splitlines(keepends=True)
    (out / "predictions.jsonl").write_text("".join(lines[:-1]))
    asked: list[tuple[str, list[str]]] = []
    answers = Forks.answers

    def counting(forks: Forks, work):  # type: ignore[no-untyped-def]
        asked.extend((sample.id, [policy.label for policy in policies]) for sample, policies in work)
        return answers(forks, work)

    monkeypatch.setattr(Forks, "answers", counting)
    assert command.main(arguments) == 0
    assert asked == [("0-1", ["quest@80"])]
    again = (out / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["predictions"] for line in again] == [json.loads(line)["predictions"] for line in lines]
