"""Needles in a haystack, by depth and length. A task asks for one needle, for several needles at once, or for another
needle in each turn of a conversation. The turns of a conversation share a cache.

The wording is RULER's (arXiv:2404.06654). If there are several needles, the first is at the given depth, and the others
are spread evenly from there to the end. ``niah_multiturn`` is ShadowKV's multi-turn test (arXiv:2410.21465, section
5.2).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from shadowkv.eval.prompts.texts import Filler, Haystack
from shadowkv.eval.records.predictions import Sample

TASKS = ("niah_single", "niah_multi", "niah_multiturn")
DEPTHS = tuple(range(0, 101, 10))
TOKENS_PER_ANSWER = 32

NEEDLE = "One of the special magic numbers for {key} is: {value}."
INTRODUCTIONS = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
)
ONE = (
    "\nWhat is the special magic number for {keys} mentioned in the provided text? "
    "The special magic number for {keys} mentioned in the provided text is"
)
SEVERAL = (
    "\nWhat are all the special magic numbers for {keys} mentioned in the provided text? "
    "The special magic numbers for {keys} mentioned in the provided text are"
)
COLOURS = ("amber", "azure", "black", "bronze", "brown", "coral", "crimson", "cyan", "golden", "green", "grey", "jade")
THINGS = ("anchor", "barrel", "candle", "desert", "engine", "falcon", "garden", "island", "kettle", "ladder", "meadow")


def samples(
    hay: Haystack,
    count_tokens: Callable[[str], int],
    length: int,
    count: int,
    *,
    tasks: Sequence[str] = TASKS,
    depths: Sequence[float] = DEPTHS,
    needles: int = 4,
    turns: int = 8,
    seed: int = 0,
) -> list[Sample]:
    """Returns ``count`` samples for every task and depth, each of at most ``length`` tokens including answers.

    Args:
        count_tokens: counts the tokens of a text with the model's tokenizer.
        depths: positions of the first needle in the haystack, in per cent.
        needles: number of needles in ``niah_multi``; one question asks for all of them.
        turns: number of turns in ``niah_multiturn``. Each asks for another needle, in random order.

    Raises ValueError if the questions and answers alone are longer than ``length``.
    """
    filler = Filler(hay, count_tokens)
    drawn = []
    for task in tasks:
        number, questions = {"niah_single": (1, 1), "niah_multi": (needles, 1)}.get(task, (turns, turns))
        for depth in depths:
            for index in range(count):
                rng = random.Random(f"{seed}/{task}/{length}/{depth:g}/{index}")
                turned, references = _conversation(filler, length, depth, number, questions, rng)
                drawn.append(
                    Sample(
                        task=task,
                        id=f"{depth:g}-{index}",
                        turns=turned,
                        references=references,
                        max_new_tokens=TOKENS_PER_ANSWER * number // questions,
                        metric="string_match_all",
                        length=length,
                    )
                )
    return drawn


def depth_of(sample_id: str) -> float:
    """Returns the depth of the first needle in per cent, which is a part of the sample's id."""
    return float(sample_id.rsplit("-", 1)[0])


def _conversation(
    filler: Filler, length: int, depth: float, number: int, questions: int, rng: random.Random
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    keys = rng.sample([f"{colour}-{thing}" for colour in COLOURS for thing in THINGS], number)
    values = [str(rng.randrange(10**6, 10**7)) for _ in keys]
    hidden = [NEEDLE.format(key=key, value=value) for key, value in zip(keys, values)]
    order = rng.sample(range(number), number)
    asked = [order] if questions == 1 else [[index] for index in order]
    turns = [_question([keys[index] for index in indices]) for indices in asked]
    # Number of tokens that are not in the first prompt: those of later questions and of all answers.
    rest = sum(map(filler.count, turns[1:])) + TOKENS_PER_ANSWER * number

    def build(sentences: list[str]) -> str:
        return INTRODUCTIONS[number > 1] + filler.hay.separator.join(_hide(hidden, sentences, depth)) + turns[0]

    first = rng.randrange(len(filler.hay.sentences))
    prompt = filler.fill(first, length - rest, build)
    return (prompt, *turns[1:]), tuple(tuple(values[index] for index in indices) for indices in asked)


def _question(keys: list[str]) -> str:
    if len(keys) == 1:
        return ONE.format(keys=keys[0])
    return SEVERAL.format(keys=f"{', '.join(keys[:-1])}, and {keys[-1]}")


def _hide(needles: list[str], sentences: list[str], depth: float) -> list[str]:
    """Returns the sentences with the needles among them. The first needle is at ``depth`` per cent, and the others are
    evenly spread after it."""
    step = (100 - depth) / len(needles)
    text, done = [], 0
    for number, needle in enumerate(needles):
        place = round(len(sentences) * (depth + number * step) / 100)
        text += [*sentences[done:place], needle]
        done = place
    return text + sentences[done:]
