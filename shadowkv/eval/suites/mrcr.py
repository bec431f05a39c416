"""MRCR, multi-round co-reference resolution (arXiv:2409.12640), in the form of OpenAI's data set (openai/mrcr).

In a long conversation the user asks for pieces of writing about topics. One request is made 2, 4 or 8 times, and the
assistant answers it with another text each time. At the end the user asks for one of these texts again, after a random
prefix. The texts are made up by ``prompts/writing.py`` and not by a model, so no data files are needed.
"""

from __future__ import annotations

import random
import string

from shadowkv.eval.prompts.fitter import PromptFitter, Question
from shadowkv.eval.prompts.writing import KINDS, TOPICS, piece
from shadowkv.eval.records.predictions import Sample
from shadowkv.models.tokenization.tokenizer import Tokenizer

NEEDLES = {"mrcr_2needle": 2, "mrcr_4needle": 4, "mrcr_8needle": 8}
"""Number of identical requests in a conversation, by task. The last question is about the answer to one of them."""
TASKS: tuple[str, ...] = tuple(NEEDLES)
PREFIX_LENGTH = 10
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
ANSWER_MARGIN = 1.25  # limit of new tokens, as a multiple of the longest of 64 right answers


def samples(task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, chat: bool) -> list[Sample]:
    """Returns ``count`` samples of a task, which ``metrics.mrcr.mrcr`` scores.

    Args:
        task: one of ``TASKS``.
        length: maximum tokens of conversation and answer together.
        seed: the same seed gives the same samples in every process; a larger ``count`` only adds samples.
        chat: whether to use the tokenizer's chat template. Without it, turns have the headers User and Assistant.

    Raises ValueError if the length is too short, or if ``chat`` is set and the tokenizer has no template.
    """
    fitter, needles = PromptFitter(tokenizer, length, _answer_tokens(tokenizer), chat), NEEDLES[task]

    def sample(index: int) -> Sample:
        def build(turns: int) -> Question:
            return conversation(needles, turns, random.Random(f"{task}/{seed}/{index}"))

        return fitter.sample(task, f"{seed}-{index}", "mrcr", build, needles)

    return [sample(index) for index in range(count)]


def conversation(needles: int, turns: int, rng: random.Random) -> Question:
    """Returns a conversation of ``turns`` requests with answers, and the last question. ``needles`` of the requests are
    identical, and the question is about the answer to one of them.

    The references are the prefix with which the answer must begin, and the text that must follow.
    """
    requests = [(kind, topic) for kind in KINDS for topic in TOPICS]
    kind, topic = requests.pop(rng.randrange(len(requests)))
    places = set(rng.sample(range(turns), needles))
    asked = [(kind, topic) if place in places else rng.choice(requests) for place in range(turns)]
    history = tuple((f"Write a {kind} about {topic}.", piece(kind, topic, rng)) for kind, topic in asked)
    number = rng.randrange(needles)
    prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=PREFIX_LENGTH))
    return Question(
        f"Prepend {prefix} to the {ORDINALS[number]} (1 indexed) {kind} about {topic}. "
        "Do not include any other text in your response.",
        "",
        (prefix, history[sorted(places)[number]][1]),
        history,
    )


def _answer_tokens(tokenizer: Tokenizer) -> int:
    """Returns a limit of new tokens that is larger than any right answer."""
    rng = random.Random("mrcr")
    prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=PREFIX_LENGTH))
    texts = (piece(rng.choice(tuple(KINDS)), rng.choice(TOPICS), rng) for _ in range(64))
    return int(ANSWER_MARGIN * max(len(tokenizer.encode(prefix + text)) for text in texts))
