"""RULER's frequent words: the three most frequent of made-up words under Zipf's law (arXiv:2404.06654, section 3)."""

from __future__ import annotations

import math
import random
import string
from pathlib import Path

from shadowkv.eval.suites.prompts import Question
from shadowkv.models.tokenization.tokenizer import Tokenizer

TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
NOISE = "..."
LETTERS = 6
TOKENS_PER_NEW_WORD = 50  # of the length
LEAST_WORDS = 100  # from here on the fourth word is rarer than the third and more frequent than the fifth


class FrequentWords:
    """Questions about words whose frequency at rank k is proportional to k^-2; rank 1 is noise. A unit is a word."""

    least: int = LEAST_WORDS
    most: int | None = None

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        self._distinct = max(length // TOKENS_PER_NEW_WORD, 4)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Shuffled words; the answer is ranks 2 to 4."""
        vocabulary: dict[str, None] = {NOISE: None}
        while len(vocabulary) < self._distinct:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked, zeta = list(vocabulary), math.pi**2 / 6
        text = [word for rank, word in enumerate(ranked, 1) for _ in range(int(units / (rank * rank * zeta)))]
        rng.shuffle(text)
        return Question(TEMPLATE.format(context=" ".join(text)), PREFIX, tuple(ranked[1:4]))
