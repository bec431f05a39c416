"""RULER's common words: ten words that a numbered list repeats most often (arXiv:2404.06654, section 3)."""

from __future__ import annotations

import random
from pathlib import Path

from shadowkv.eval.suites.prompts import Question
from shadowkv.eval.suites.ruler.data import word_list
from shadowkv.models.tokenization.tokenizer import Tokenizer

TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
# Repetitions of common and other words, from 4096 tokens on and below; the same for the solved example with its words.
REPEATS, SHORT_REPEATS = (30, 3), (6, 1)
EXAMPLE, SHORT_EXAMPLE = (40, (10, 3)), (20, (3, 1))


class CommonWords:
    """Questions after a solved example. A unit is a distinct word in the list, ten of which are common."""

    least: int = COMMON + 1

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        self._words = sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind, data)})
        self._repeats, self._example = (SHORT_REPEATS, SHORT_EXAMPLE) if length < 4096 else (REPEATS, EXAMPLE)
        self.most: int | None = len(self._words)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Two lists: the example's question is answered."""
        words, repeats = self._example
        example, top = self._list(words, repeats, rng)
        context, common = self._list(units, self._repeats, rng)
        solved = f"{TEMPLATE.format(context=example)}{PREFIX}{_numbered(top)}"
        return Question(f"{solved}\n{TEMPLATE.format(context=context)}", PREFIX, tuple(common))

    def _list(self, count: int, repeats: tuple[int, int], rng: random.Random) -> tuple[str, list[str]]:
        words = rng.sample(self._words, count)
        common, others = words[:COMMON], words[COMMON:]
        listed = common * repeats[0] + others * repeats[1]
        rng.shuffle(listed)
        return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
