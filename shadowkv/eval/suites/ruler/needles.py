"""RULER's needles: sentences that give the value of a key, hidden in noise, in essays or among more needles
(arXiv:2404.06654, section 3)."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shadowkv.eval.prompts.fitter import Question
from shadowkv.eval.prompts.texts import NOISE, sentences_of
from shadowkv.eval.suites.ruler.data import KeyWords, essay_words
from shadowkv.models.tokenization.tokenizer import Tokenizer

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
DEPTHS = [round(100 * step / 39) for step in range(40)]  # possible depths of needles in essays, in per cent


@dataclass(frozen=True)
class Config:
    """The configuration of a needle task.

    Attributes:
        hay: text around the needles: repeated noise, essays, or more needles.
        keys, values: form of the keys and of the values.
        num_keys: number of keys among which the question's keys are chosen.
        num_values: number of values of a key. Each value has its own needle.
        num_queries: number of keys in the question.
    """

    hay: Literal["repeat", "essay", "needle"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


CONFIGS: dict[str, Config] = {
    "niah_single_1": Config("repeat"),
    "niah_single_2": Config("essay"),
    "niah_single_3": Config("essay", values="uuids"),
    "niah_multikey_1": Config("essay", num_keys=4),
    "niah_multikey_2": Config("needle"),
    "niah_multikey_3": Config("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Config("essay", num_values=4),
    "niah_multiquery": Config("essay", num_keys=4, num_queries=4),
}


class Needles:
    """Questions of one configuration. A unit is a line of noise, a word of the essays or another needle."""

    most: int | None = None

    def __init__(self, config: Config, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        self.config = config
        self.least = 0 if config.hay == "essay" else 1
        self._words = KeyWords(data) if config.keys == "words" else None
        self._essays = essay_words(data) if config.hay == "essay" else []

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns a text with needles at random places, and a question about some of the needles."""
        config = self.config
        more = units if config.hay == "needle" else 0
        keys = self._keys(config.num_keys + more, rng)
        values = {key: [self._value(rng) for _ in range(config.num_values)] for key in keys}
        needles = [
            NEEDLE.format(kind=config.values, key=key, value=value)
            for key in keys[: config.num_keys]
            for value in values[key]
        ]
        rng.shuffle(needles)
        if config.hay == "essay":
            context = self._in_essays(needles, units, rng)
        else:
            lines = [NOISE] * units
            if more:
                lines = [NEEDLE.format(kind=config.values, key=key, value=values[key][0]) for key in keys[-more:]]
            context = "\n".join(_spread(needles, lines, rng))
        asked = rng.sample(keys[: config.num_keys], config.num_queries)
        references = tuple(value for key in asked for value in values[key])
        is_single = len(references) == 1
        text, prefix = ONE if is_single else SEVERAL
        kind = config.values.removesuffix("s") if is_single else config.values
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        return Question(
            text.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query), references
        )

    def _keys(self, count: int, rng: random.Random) -> list[str]:
        return [_uuid(rng) for _ in range(count)] if self._words is None else self._words.draw(count, rng)

    def _value(self, rng: random.Random) -> str:
        return _uuid(rng) if self.config.values == "uuids" else str(rng.randint(10**6, 10**7 - 1))

    def _in_essays(self, needles: list[str], words: int, rng: random.Random) -> str:
        rounds = -(-words // len(self._essays))  # essays repeat if the length needs more words
        sentences = sentences_of(" ".join((self._essays * rounds)[:words]))
        text, done = [], 0
        for needle, depth in zip(needles, sorted(rng.sample(DEPTHS, len(needles)))):
            place = len(sentences) * depth // 100
            text += [*sentences[done:place], needle]
            done = place
        return " ".join([*text, *sentences[done:]])


def _spread(needles: list[str], lines: list[str], rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles):
        lines.insert(place, needle)
    return lines


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
