"""Needles are where they should be, every one once, and prompts fill the length by the model's own tokeniser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shadowkv.eval.prompts.texts import NOISE, Haystack, haystack, sentences_of
from shadowkv.eval.suites import niah

WORDS = Haystack("words", tuple(f"This is sentence {number} of many." for number in range(1000)))


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("hay", [WORDS, Haystack("noise", (NOISE,), "\n")])
@pytest.mark.parametrize("length", [900, 3000])
def test_prompts_fill_the_length(hay: Haystack, length: int) -> None:
    for sample in niah.samples(hay, count, length, 1, depths=(0, 35, 100)):
        tokens = sum(map(count, sample.turns)) + len(sample.turns) * sample.max_new_tokens
        assert length - count(NOISE) - 10 <= tokens <= length
        assert sample.length == length
        for number, (turn, references) in enumerate(zip(sample.turns, sample.references)):
            for value in references:
                assert sample.turns[0].count(f"is: {value}.") == 1
                assert number == 0 or value not in turn
                (key,) = re.findall(rf"numbers for (\S+) is: {value}\.", sample.turns[0])
                assert key in turn.split("What ")[-1]


def test_tasks() -> None:
    found = niah.samples(WORDS, count, 2000, 2, depths=(50,), needles=3, turns=5)
    shapes = [(s.task, len(s.turns), len(s.references[0]), s.max_new_tokens) for s in found[::2]]
    assert shapes == [("niah_single", 1, 1, 32), ("niah_multi", 1, 3, 96), ("niah_multiturn", 5, 1, 32)]
    assert found == niah.samples(WORDS, count, 2000, 2, depths=(50,), needles=3, turns=5)
    assert niah.samples(WORDS, count, 2000, 3, depths=(50,), tasks=["niah_single"])[:2] == found[:2]
    assert niah.samples(WORDS, count, 2000, 2, depths=(50,), seed=1) != found
    assert len({s.references for s in found}) == len(found)


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_the_first_needle_is_at_its_depth(depth: float) -> None:
    (sample,) = niah.samples(WORDS, count, 3000, 1, tasks=["niah_single"], depths=(depth,))
    assert niah.depth_of(sample.id) == depth
    text = sample.turns[0].split("afterwards.\n")[1].split("\nWhat is")[0]
    sentences = [sentence for sentence in text.split(". ")]
    (place,) = [i for i, sentence in enumerate(sentences) if "magic" in sentence]
    assert 100 * place / (len(sentences) - 1) == pytest.approx(depth, abs=1)


def test_several_needles_are_spread_to_the_end() -> None:
    (sample,) = niah.samples(WORDS, count, 3000, 1, tasks=["niah_multi"], depths=(20,), needles=4)
    sentences = sample.turns[0].split("afterwards.\n")[1].split("\nWhat are")[0].split(". ")
    places = [100 * i / len(sentences) for i, sentence in enumerate(sentences) if "magic" in sentence]
    assert places == pytest.approx([20, 40, 60, 80], abs=1.5)


def test_haystacks(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One  is.\nTwo is! Three")
    assert haystack(file).sentences == sentences_of("One is. Two is! Three") == ("One is.", "Two is!", "Three")
    file.write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        haystack(file)
    assert haystack(None).name in ("noise", "essays")
