"""RULER's aggregation tasks: the ten most common words of a list, and the three most frequent made-up words
(arXiv:2404.06654, section 3)."""

from __future__ import annotations

import math
import random
import string
from pathlib import Path

from shadowkv.eval.prompts.fitter import Question
from shadowkv.eval.suites.ruler.data import word_list
from shadowkv.models.tokenization.tokenizer import Tokenizer

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
# How often each common word and each other word is repeated. The first pair is for samples of at least 4096 tokens, the
# second for shorter ones.
REPEATS, SHORT_REPEATS = (30, 3), (6, 1)
# Number of distinct words in the solved example, and how often they are repeated, for the same two lengths of samples.
EXAMPLE, SHORT_EXAMPLE = (40, (10, 3)), (20, (3, 1))


class CommonWords:
    """Questions about the words that a numbered list repeats most often, after a solved example.

    A unit is a distinct word of the list. Ten of the distinct words are common.
    """

    least: int = COMMON + 1

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        self._words = sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind, data)})
        self._repeats, self._example = (SHORT_REPEATS, SHORT_EXAMPLE) if length < 4096 else (REPEATS, EXAMPLE)
        self.most: int | None = len(self._words)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns a prompt with two lists and a question about each. The first is a solved example."""
        words, repeats = self._example
        example, top = self._list(words, repeats, rng)
        context, common = self._list(units, self._repeats, rng)
        solved = f"{COMMON_TEMPLATE.format(context=example)}{COMMON_PREFIX}{_numbered(top)}"
        return Question(f"{solved}\n{COMMON_TEMPLATE.format(context=context)}", COMMON_PREFIX, tuple(common))

    def _list(self, count: int, repeats: tuple[int, int], rng: random.Random) -> tuple[str, list[str]]:
        words = rng.sample(self._words, count)
        common, others = words[:COMMON], words[COMMON:]
        listed = common * repeats[0] + others * repeats[1]
        rng.shuffle(listed)
        return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
NOISE = "..."
LETTERS = 6
TOKENS_PER_NEW_WORD = 50  # a sample has one distinct word for this many tokens of its length
MIN_WORDS = 100  # so many that the word of rank 4 is rarer than that of rank 3 and more frequent than that of rank 5


class FrequentWords:
    """Questions about the three most frequent made-up words. Frequencies follow Zipf's law: the word of rank k has a
    frequency proportional to k^-2. The word of rank 1 is noise and does not count. A unit is a word of the text."""

    least: int = MIN_WORDS
    most: int | None = None

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        self._distinct = max(length // TOKENS_PER_NEW_WORD, 4)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns a question about shuffled words. The answer is the words of ranks 2 to 4."""
        vocabulary: dict[str, None] = {NOISE: None}
        while len(vocabulary) < self._distinct:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked, zeta = list(vocabulary), math.pi**2 / 6
        text = [word for rank, word in enumerate(ranked, 1) for _ in range(int(units / (rank * rank * zeta)))]
        rng.shuffle(text)
        return Question(FREQUENT_TEMPLATE.format(context=" ".join(text)), FREQUENT_PREFIX, tuple(ranked[1:4]))
