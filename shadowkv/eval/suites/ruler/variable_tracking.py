"""RULER's variable tracking: a chain of assignments scattered in noise (arXiv:2404.06654, section 3)."""

from __future__ import annotations

import itertools
import random
import string
from pathlib import Path

from shadowkv.eval.prompts.fitter import PromptFitter, Question
from shadowkv.eval.prompts.texts import NOISE
from shadowkv.models.tokenization.tokenizer import Tokenizer

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# The misspelling "assgined" is RULER's.
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assgined the value {value}, they are: "
)
HOPS = 4
EXAMPLE_LENGTH, EXAMPLE_ANSWER = 500, 30  # tokens of the solved example, and of its answer


class VariableTracking:
    """Questions about a chain of ``HOPS`` assignments of one variable to the next. A solved example comes first. A unit
    is a line of noise."""

    least: int = HOPS + 1
    most: int | None = None

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int, data: Path | None) -> None:
        fitter = PromptFitter(tokenizer, EXAMPLE_LENGTH, EXAMPLE_ANSWER)
        _, example = fitter.fill(lambda lines: _chain(3, lines, random.Random(f"vt/{seed}")), self.least)
        self._example_lines = example.text.count(NOISE)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns a solved example, followed by the question."""
        example, asked = _chain(3, self._example_lines, rng), _chain(5, units, rng)
        solved = f" {example.text}{example.answer_prefix} {' '.join(example.references)}\n\n"
        return Question(f"{solved}\n\n{asked.text}", asked.answer_prefix, asked.references)


def _chain(letters: int, lines: int, rng: random.Random) -> Question:
    """Returns a question about a chain of variables among ``lines`` lines of noise. Variables have names of ``letters``
    capitals."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names[_name(letters, rng)] = None
    variables, value = tuple(names), rng.randint(10000, 99999)
    chain = [f"VAR {variables[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(variables)]
    places = sorted(rng.sample(range(lines), len(chain)))
    text = [f"{NOISE}\n"] * lines
    for offset, (place, assignment) in enumerate(zip(places, chain)):
        text.insert(place + offset, assignment)
    return Question(
        TEMPLATE.format(context=" ".join(text), value=value),
        PREFIX.format(count=len(variables), value=value),
        variables,
    )


def _name(letters: int, rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))
