"""Stress tests: tasks in which sparse attention fails first. An answer needs many places of the context, or repeats a
long part of the context word by word.

``needles_64`` asks for 64 needles at once, ``table_to_json`` asks for rows of a long table, and ``long_copy`` asks for
a verbatim copy of a marked part. An answer needs far more of the context than one step can select, so the selection has
to change from step to step. Retrieving one needle does not test this (cf. SCBench, arXiv:2412.10319). All text is made
up, so no data files are needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from shadowkv.eval.prompts.fitter import PromptFitter, Question
from shadowkv.eval.records.predictions import Sample
from shadowkv.models.tokenization.tokenizer import Tokenizer

NEEDLES = 64
ROWS = 16  # rows asked for
LINES, WORDS_PER_LINE = 24, 10  # of the part to copy
ANSWER_MARGIN = 1.25  # limit of new tokens, as a multiple of a perfect answer's tokens


def samples(kind: str, tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Sample]:
    """Returns ``count`` samples of a kind. The score of a sample is the share of its needles, rows or lines that are
    exactly right.

    Args:
        kind: one of ``KINDS``.
        length: maximum tokens of prompt and answer together.
        seed: the same seed gives the same samples in every process; a larger ``count`` only adds samples.

    Raises ValueError for an unknown kind, or if the length is too short for the kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no stress test {kind!r}; there are {', '.join(KINDS)}")
    build, least = KINDS[kind]
    example = build(least, random.Random(f"{kind}/{seed}/0"))
    max_new_tokens = int(ANSWER_MARGIN * len(tokenizer.encode("\n".join(answer_lines(kind, example)))))
    fitter = PromptFitter(tokenizer, length, max_new_tokens)
    return [
        fitter.sample(kind, f"{seed}-{index}", "string_match_all", _seeded(build, f"{kind}/{seed}/{index}"), least)
        for index in range(count)
    ]


def needles(units: int, rng: random.Random) -> Question:
    """Returns a question about a text of ``units`` lines, each with the code of a name. It asks for ``NEEDLES`` of the
    codes."""
    names = _distinct(units, rng)
    codes = [str(rng.randint(10**6, 10**7 - 1)) for _ in names]
    asked = rng.sample(range(units), NEEDLES)
    context = "\n".join(f"The code of {name} is {code}." for name, code in zip(names, codes))
    return Question(
        f"Every line of the following text gives the code of a name. Memorize them.\n{context}\n"
        f'Write the codes of these {NEEDLES} names in this order, one a line, as "name: code": '
        f"{', '.join(names[i] for i in asked)}.",
        "\nCodes:\n",
        tuple(codes[i] for i in asked),
    )


def table_to_json(units: int, rng: random.Random) -> Question:
    """Returns a table of ``units`` rows, and a question that asks for ``ROWS`` of the rows as JSON objects."""
    columns = ("id", "name", "city", "amount")
    names = iter(_distinct(2 * units + 2, rng))
    numbers = rng.sample(range(10000, 100000), units + 1)
    rows = [(number, next(names), next(names), rng.randint(100, 9999)) for number in numbers]
    shown, table = rows[-1], rows[:-1]
    asked = rng.sample(table, ROWS)
    context = "\n".join(" | ".join(map(str, row)) for row in [columns, *table])
    return Question(
        f"Read the following table.\n{context}\n"
        "Write rows of the table as JSON, one object a line. "
        f'The row "{" | ".join(map(str, shown))}" would be {json.dumps(dict(zip(columns, shown)))}\n'
        f"Write the rows with these ids in this order: {', '.join(str(row[0]) for row in asked)}.",
        "\nRows:\n",
        tuple(json.dumps(dict(zip(columns, row))) for row in asked),
    )


def long_copy(units: int, rng: random.Random) -> Question:
    """Returns ``units`` lines of made-up words, and a request to copy ``LINES`` marked neighbouring lines."""
    vocabulary = _distinct(4 * WORDS_PER_LINE, rng)
    lines = list(_lines(units, vocabulary, rng))
    first = rng.randrange(units - LINES + 1)
    span = lines[first : first + LINES]
    context = "\n".join([*lines[:first], "<copy>", *span, "</copy>", *lines[first + LINES :]])
    return Question(
        f"A part of the following text is marked with <copy> and </copy>.\n{context}\n"
        "Copy the marked part of the text, word by word and line by line.",
        "\n<copy>\n",
        tuple(span),
    )


# For each kind, the function that makes a question, and the minimum number of units (names, rows or lines) of a
# question.
KINDS: dict[str, tuple[Callable[[int, random.Random], Question], int]] = {
    "needles_64": (needles, NEEDLES),
    "table_to_json": (table_to_json, ROWS),
    "long_copy": (long_copy, LINES),
}


def answer_lines(kind: str, question: Question) -> list[str]:
    """The lines of a perfect answer."""
    if kind != "needles_64":
        return list(question.references)
    names = question.text.rsplit(": ", 1)[1].removesuffix(".").split(", ")
    return [f"{name}: {code}" for name, code in zip(names, question.references)]


def _seeded(build: Callable[[int, random.Random], Question], seed: str) -> Callable[[int], Question]:
    return lambda units: build(units, random.Random(seed))


def _lines(count: int, vocabulary: list[str], rng: random.Random) -> Iterator[str]:
    """Yields distinct lines. All lines are made of the same few words, so that no word occurs at only one place in the
    text."""
    seen: set[str] = set()
    while len(seen) < count:
        line = " ".join(rng.choices(vocabulary, k=WORDS_PER_LINE))
        if line not in seen:
            seen.add(line)
            yield line


def _distinct(count: int, rng: random.Random) -> list[str]:
    """Distinct words of four syllables."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(4))] = None
    return list(words)
