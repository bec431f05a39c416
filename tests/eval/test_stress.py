"""Stress samples: what they ask for is in the prompt, and a perfect answer fits the length and scores 1."""

from __future__ import annotations

import json
import re

import pytest
from benchmark_data import smollm2_tokenizer

from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import stress


def made(kind: str, seed: int, length: int = 8192, count: int = 2) -> list[Sample]:
    return stress.samples(kind, smollm2_tokenizer(), length, count, seed)


def answer(sample: Sample) -> str:
    """A perfect answer, found in the prompt alone."""
    prompt = sample.turns[0]
    if sample.task == "needles_64":
        codes = dict(re.findall(r"The code of (\w+) is (\d{7})\.", prompt))
        names = re.search(r'as "name: code": (.*)\.\n', prompt)
        assert names is not None
        return "\n".join(f"{name}: {codes[name]}" for name in names[1].split(", "))
    if sample.task == "table_to_json":
        rows = {row[0]: row for row in re.findall(r"^(\d{5}) \| (\w+) \| (\w+) \| (\d+)$", prompt, re.M)}
        asked = re.search(r"in this order: ([\d, ]+)\.\n", prompt)
        assert asked is not None
        parts = [rows[number] for number in asked[1].split(", ")]
        return "\n".join(
            json.dumps({"id": int(i), "name": name, "city": city, "amount": int(n)}) for i, name, city, n in parts
        )
    span = re.search(r"\n<copy>\n(.*)\n</copy>\n", prompt, re.S)
    assert span is not None
    return span[1]


@pytest.mark.parametrize("kind", stress.KINDS)
def test_a_perfect_answer_scores_one_and_fits(kind: str, seed: int) -> None:
    parts = {"needles_64": 64, "table_to_json": 16, "long_copy": 24}[kind]
    for sample in made(kind, seed):
        right = answer(sample)
        assert len(right.splitlines()) == len(sample.references[0]) == parts
        assert score(sample, [right]) == 1
        assert score(sample, ["\n".join(right.splitlines()[: parts // 4])]) == pytest.approx(
            0.25, abs=0.02
        )  # codes may repeat
        limit = sample.length - sample.max_new_tokens
        tokens = len(smollm2_tokenizer().encode(sample.turns[0]))
        assert 0.9 * limit <= tokens <= limit
        assert len(smollm2_tokenizer().encode(right)) <= sample.max_new_tokens


def test_the_example_row_is_not_in_the_table() -> None:
    prompt = made("table_to_json", 0)[0].turns[0]
    example = re.search(r'The row "(\d{5}) ', prompt)
    assert example is not None
    assert f"\n{example[1]} |" not in prompt


@pytest.mark.parametrize("kind", stress.KINDS)
def test_samples_depend_on_the_seed_alone(kind: str) -> None:
    many = made(kind, 1, count=3)
    assert made(kind, 1, count=1) == many[:1]
    assert len({sample.turns for sample in many}) == 3
    assert made(kind, 2, count=1) != many[:1]


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="needles_64 at length 2048: the shortest prompt"):
        made("needles_64", 0, 2048)
    with pytest.raises(ValueError, match="no stress test 'copy'"):
        made("copy", 0)
