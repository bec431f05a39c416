"""Open-ended answers: summaries and explanations of source files, logs, tables and essays. The model decides how long
an answer is.

There is no right answer. The suite measures how long answers are: if a policy's answers are longer, they can cost more
time than sparse attention saves per step. It also measures whether answers end by themselves and without a loop, and
how many words they share with full attention's answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.eval.prompts.fitter import PromptFitter, Question
from shadowkv.eval.prompts.texts import CHARACTERS_PER_TOKEN, ESSAYS, TEXTS_OF_LINES, essays
from shadowkv.eval.records.predictions import Sample
from shadowkv.models.tokenization.tokenizer import Tokenizer

NEW_TOKENS = 1024


@dataclass(frozen=True)
class Task:
    """A question about a text.

    Attributes:
        kind: kind of the text: ``ESSAYS``, or a name in ``TEXTS_OF_LINES``.
        introduction, question: words before and after the text.
    """

    kind: str
    introduction: str
    question: str


_CODE, _LOGS, _TABLES = "Here are source files.", "Here are log files of servers.", "Here are tables."
_ESSAYS = "Here is a part of a collection of essays."
_TASKS = {
    "summarise_code": Task(
        "code",
        _CODE,
        "Write a summary of these source files for a developer who is new to them: what each file is for, and how its "
        "main classes and functions work together.",
    ),
    "explain_code": Task(
        "code",
        _CODE,
        "Choose the three most important classes or functions of these source files. Explain step by step how each of "
        "them works: what it takes, what it does with it, what it returns, and how it fails.",
    ),
    "summarise_logs": Task(
        "logs",
        _LOGS,
        "Write a summary of these log files for the operator of the servers: what they did, what failed and how often.",
    ),
    "explain_logs": Task(
        "logs",
        _LOGS,
        "Choose the three most important problems in these log files. Explain for each of them which lines show it, "
        "what the cause may be, and what the operator should do.",
    ),
    "summarise_tables": Task(
        "tables",
        _TABLES,
        "Write a summary of these tables for a reader who cannot see them: what each of them lists, in which columns, "
        "and between which smallest and largest values.",
    ),
    "explain_tables": Task(
        "tables",
        _TABLES,
        "Choose the three most remarkable rows of these tables. Explain for each of them what it says, and how it "
        "differs from the other rows of its table.",
    ),
    "summarise_essays": Task(
        ESSAYS, _ESSAYS, "Write a summary of this text that covers all its essays and the main points of each."
    ),
    "explain_essays": Task(
        ESSAYS,
        _ESSAYS,
        "Explain the three most important arguments of this text: what the author claims, which reasons and examples "
        "he gives, and what may be said against them.",
    ),
}
TASKS: tuple[str, ...] = tuple(_TASKS)


def samples(task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, chat: bool) -> list[Sample]:
    """Returns ``count`` samples of a task, each about another text. A score of 1 means that the answer does not end in
    a loop.

    Args:
        task: one of ``TASKS``.
        length: maximum tokens of prompt and answer together.
        seed: the same seed gives the same samples in every process, if the packages with the texts have the same
            versions.
        chat: whether to use the tokenizer's chat template.

    Raises ValueError if the length is too short, if ``chat`` is set and the tokenizer has no template, or if the essays
    are missing.
    """
    asked = _TASKS[task]
    fitter = PromptFitter(tokenizer, length, NEW_TOKENS, chat)

    def sample(index: int) -> Sample:
        units, separator = _units(asked.kind, length, f"{seed}/{index}")

        def build(number: int) -> Question:
            text = separator.join(units[:number])
            return Question(f"{asked.introduction}\n\n{text}\n\n{asked.question}", "", ())

        return fitter.sample(task, f"{seed}-{index}", "no_loop", build, 1, len(units))

    return [sample(index) for index in range(count)]


def _units(kind: str, length: int, seed: str) -> tuple[Sequence[str], str]:
    """Returns sentences from a random place in the essays, or lines of another kind of text, and their separator.

    The result does not depend on the task, so both tasks about a kind of text get the same texts.
    """
    characters = CHARACTERS_PER_TOKEN * length
    if kind != ESSAYS:
        return TEXTS_OF_LINES[kind](seed, characters).splitlines(), "\n"
    hay, units = essays(), list[str]()
    for sentence in hay.starting_at(random.Random(seed).randrange(len(hay.sentences))):
        if characters <= 0:
            break
        units.append(sentence)
        characters -= len(sentence) + 1
    return units, hay.separator
