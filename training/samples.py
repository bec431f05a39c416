"""Retrieval samples, made as they are needed: RULER's kinds over other texts and words, and planted facts.

RULER's own essays, words and questions are left for tests.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from shadowkv.eval.prompts.fitter import PromptFitter, Question, TooShortError
from shadowkv.eval.suites.ruler import Generator
from shadowkv.eval.suites.ruler.aggregation import CommonWords, FrequentWords
from shadowkv.eval.suites.ruler.data import KeyWords
from shadowkv.eval.suites.ruler.needles import CONFIGS, Config, Needles
from shadowkv.eval.suites.ruler.question_answering import PREFIX, TEMPLATE
from shadowkv.eval.suites.ruler.variable_tracking import VariableTracking
from shadowkv.models.loader import load_tokenizer
from shadowkv.models.tokenization.tokenizer import Tokenizer
from training.texts import Texts, read_texts

ANSWER_TOKENS = 128
"""Room for an answer; the longest are four UUIDs."""
TASKS = (*CONFIGS, "vt", "cwe", "fwe", "facts", "facts", "fact_in_text")

ROLES = (
    "keeper of the lighthouse", "mayor", "head of the library", "founder of the museum", "owner of the mill",
    "teacher of music", "doctor", "captain of the ferry", "baker", "judge", "architect of the bridge", "gardener",
    "director of the theatre", "first settler", "champion of chess", "painter of the ceiling", "postmaster",
)  # fmt: skip
THINGS = (
    "password of the archive", "height of the tower", "colour of the gate", "name of the boat", "year of the flood",
    "code of the safe", "number of the bus", "price of the painting", "motto of the school", "date of the festival",
    "weight of the bell", "name of the river", "favourite dish of the king", "length of the wall",
)  # fmt: skip
FIRST = "Alma Boris Clara Dario Edith Farid Greta Hugo Ines Jonas Kira Leon Mina Nils Olga Pavel Rosa Sven Tara Viktor"
SYLLABLES = "ba ber dor el fen gar hol in kas lor mar nor os pel quin ran sol tir ul ver wen yor zan"


@dataclass(frozen=True)
class Tokens:
    """A sample as tokens: ``ids`` of prompt and answer, and how many of them are the answer's, with its end."""

    ids: list[int]
    answer: int


class ProseNeedles(Needles):
    """RULER's needles in other prose, of which every sample begins at another place."""

    def __init__(self, config: Config, texts: Texts) -> None:
        self.config = config
        self.least = 0 if config.hay == "essay" else 1
        self._words = KeyWords(texts.folder) if config.keys == "words" else None
        self._prose = texts.words

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """As RULER's."""
        self._essays = _stretch(self._prose, max(units, 1), rng)
        return super().question(index, units, rng)


class Facts:
    """A question whose answer stands once, in documents numbered as RULER's are or somewhere in a plain text.

    A unit is a stretch of 80 words of prose.
    """

    least: int = 1
    most: int | None = None

    def __init__(self, texts: Texts, numbered: bool) -> None:
        self._prose, self._numbered = texts.words, numbered

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """One fact that is asked for, up to seven that are like it, and prose."""
        facts = dict(_fact(rng) for _ in range(rng.randint(1, 8)))
        prose = _stretch(self._prose, 80 * units, rng)
        pieces = [" ".join(prose[start : start + 80]) for start in range(0, len(prose), 80)]
        for about, answer in facts.items():
            pieces.insert(rng.randint(0, len(pieces)), f"{about[0].upper()}{about[1:]} is {answer}.")
        about = rng.choice(list(facts))
        question = f"{'Who' if any(role in about for role in ROLES) else 'What'} is {about}?"
        if self._numbered:
            context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(pieces, 1))
            return Question(TEMPLATE.format(context=context, question=question), PREFIX, (facts[about],))
        context = rng.choice([" ", "\n", "\n\n"]).join(pieces)
        sentence = f"{about[0].upper()}{about[1:]} is {facts[about]}."
        return Question(rng.choice([f"{context}\n\n{question}", f"{question}\n\n{context}"]), "", (sentence,))


def _stretch(words: list[str], count: int, rng: random.Random) -> list[str]:
    """Words from a random place on, and from the beginning again where they end."""
    first = rng.randrange(len(words))
    return words[first : first + count] + words[: max(first + count - len(words), 0)]


def _fact(rng: random.Random) -> tuple[str, str]:
    """What is asked for, and the answer: a person's name, a place-like name, a number or a code."""
    place, surname = ("".join(rng.choices(SYLLABLES.split(), k=rng.randint(2, 3))).title() for _ in range(2))
    kind, person = rng.choice([(role, True) for role in ROLES] + [(thing, False) for thing in THINGS])
    code = "".join(rng.choices(string.ascii_uppercase + string.digits, k=6))
    answers = [f"{rng.choice(FIRST.split())} {surname}"] if person else [surname, str(rng.randint(10, 99_999)), code]
    return f"the {kind} {rng.choice(['of', 'at', 'in'])} {place}", rng.choice(answers)


def _generator(task: str, tokenizer: Tokenizer, length: int, seed: int, texts: Texts) -> Generator:
    if task in CONFIGS:
        return ProseNeedles(CONFIGS[task], texts)
    if task in ("facts", "fact_in_text"):
        return Facts(texts, numbered=task == "facts")
    kinds: dict[str, Callable[[Tokenizer, int, int, Path], Generator]] = {
        "vt": VariableTracking,
        "cwe": CommonWords,
        "fwe": FrequentWords,
    }
    return kinds[task](tokenizer, length, seed, texts.folder)


def answer_text(task: str, question: Question) -> str:
    """The answer in the form that is taught, without the end token."""
    answers = list(question.references)
    if task == "niah_multivalue":
        answers.sort(key=question.text.find)
    if task == "cwe":
        return " " + " ".join(f"{number}. {word}" for number, word in enumerate(answers, 1))
    if task == "vt":
        return " ".join(answers)  # the question's beginning of it ends in a space
    if task == "fact_in_text":
        return answers[0]
    return " " + (", ".join(answers) + "." if task in CONFIGS else " ".join(answers))


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """The tokeniser, loaded once in every process."""
    return load_tokenizer(model)


def retrieval_batch(model: str, folder: Path, length: int, count: int, seed: str) -> list[Tokens]:
    """``count`` samples of about ``length`` tokens: half of them plain prompts, half chats; all of one to four tasks.

    Args:
        model: whose tokeniser is used.
        folder: of ``write_texts``.
        seed: the same samples for the same one.
    """
    rng, tokenizer, texts = random.Random(seed), tokenizer_of(model), read_texts(folder)
    samples: list[Tokens] = []
    while len(samples) < count:
        task, number = rng.choice(TASKS), rng.randrange(1 << 30)
        chat = task == "fact_in_text" or rng.random() < 0.5
        generator = _generator(task, tokenizer, length, number, texts)
        fitter = PromptFitter(tokenizer, length, ANSWER_TOKENS, chat)
        for index in range(min(-(-count // 4), count - len(samples))):
            fitter.budget = int(length * rng.uniform(0.8, 1.0)) - ANSWER_TOKENS
            build = partial(_question, generator, index, f"{number}/{index}")
            try:
                prompt, question = fitter.fill(build, generator.least, generator.most)
            except TooShortError:  # common words need 3,000 tokens for their lists
                break
            answer = tokenizer.encode(answer_text(task, question), add_special_tokens=False)
            answer = answer[: ANSWER_TOKENS - 1] + [end_token(tokenizer)]
            samples.append(Tokens(tokenizer.encode(prompt) + answer, len(answer)))
    return samples


def _question(generator: Generator, index: int, seed: str, units: int) -> Question:
    return generator.question(index, units, random.Random(seed))


def end_token(tokenizer: Tokenizer) -> int:
    """What ends an answer."""
    end = tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"])
    assert end is not None
    return int(end)
