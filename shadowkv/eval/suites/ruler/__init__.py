"""RULER (Hsieh et al., arXiv:2404.06654): 13 synthetic tasks of any length, in its default configuration.

Templates, beginnings of answers and token limits are the published ones (github.com/NVIDIA/RULER, Apache-2.0). Samples
differ from RULER's only in being stricter: keys, names and words are never repeated by accident, and prompt and answer
together fit the length in every task.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from shadowkv.eval.prompts.fitter import PromptFitter, Question, TooShortError
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites.ruler import needles, question_answering
from shadowkv.eval.suites.ruler.aggregation import CommonWords, FrequentWords
from shadowkv.eval.suites.ruler.variable_tracking import VariableTracking
from shadowkv.models.tokenization.tokenizer import Tokenizer

# A question is skipped if the documents that it needs are longer than the length. If more than this number of questions
# are skipped in a row, the length is too short for the task.
PATIENCE = 20


class Generator(Protocol):
    """Makes the questions of a task. A question has as many units of text (words, sentences, documents) as fit the
    length.

    Attributes:
        least: minimum number of units of a question.
        most: number of available units; None if there is no limit.
    """

    least: int
    most: int | None

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns question ``index`` with ``units`` units. Every call for an index gets a new ``rng`` with the same
        seed."""
        ...


@dataclass(frozen=True)
class Task:
    """A task of ``TASKS``.

    Attributes:
        generator: makes a ``Generator`` from tokenizer, length in tokens, seed and data folder.
        max_new_tokens: limit for an answer.
        metric: name in ``metrics.scoring.METRICS``.
    """

    generator: Callable[[Tokenizer, int, int, Path | None], Generator]
    max_new_tokens: int
    metric: str = "string_match_all"


_TASKS: dict[str, Task] = {
    **{name: Task(partial(needles.Needles, config), 128) for name, config in needles.CONFIGS.items()},
    "vt": Task(VariableTracking, 30),
    "cwe": Task(CommonWords, 120),
    "fwe": Task(FrequentWords, 50),
    "qa_1": Task(partial(question_answering.QuestionAnswering, question_answering.squad), 32, "string_match_part"),
    "qa_2": Task(partial(question_answering.QuestionAnswering, question_answering.hotpotqa), 32, "string_match_part"),
}
TASKS: tuple[str, ...] = tuple(_TASKS)


def samples(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    count: int,
    seed: int,
    data: Path | None = None,
    chat: bool = False,
) -> list[Sample]:
    """Returns ``count`` samples of a task.

    Args:
        task: one of ``TASKS``.
        tokenizer: the model's tokenizer, which measures prompts and answers.
        length: maximum tokens of prompt and answer together. Prompts fill at least 0.9 of the tokens that the answer
            leaves. There are two exceptions: too few words (``cwe``), and documents that are long compared with the
            length (``qa_1``, ``qa_2``).
        seed: the same seed gives the same samples in every process; a larger ``count`` only adds samples.
        data: folder with the task's files. Files missing there are looked up in installed packages (``data.py``).
        chat: whether to use the tokenizer's chat template. The answer's beginning then follows the assistant's header.

    Raises ValueError for an unknown task, or if the length is too short for the task. Raises FileNotFoundError if data
    is missing.
    """
    if task not in _TASKS:
        raise ValueError(f"RULER has no task {task!r}; it has {', '.join(TASKS)}")
    kind = _TASKS[task]
    generator = kind.generator(tokenizer, length, seed, data)
    fitter = PromptFitter(tokenizer, length, kind.max_new_tokens, chat)
    drawn: list[Sample] = []
    index = skipped = 0
    while len(drawn) < count:
        try:
            build = _build(generator, task, seed, index)
            drawn.append(fitter.sample(task, f"{seed}-{index}", kind.metric, build, generator.least, generator.most))
            skipped = 0
        except TooShortError:
            skipped += 1
            if skipped > PATIENCE:
                raise
        index += 1
    return drawn


def _build(generator: Generator, task: str, seed: int, index: int) -> Callable[[int], Question]:
    # ``Random`` derives its state from the SHA-512 hash of a string, which is the same in every process.
    return lambda units: generator.question(index, units, random.Random(f"{task}/{seed}/{index}"))
