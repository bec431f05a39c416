"""Short chats for distillation: prompts from templates and word lists (``topics.json``), answers by the base itself.

Held-out prompts share neither template nor topic, country, book or task with those of training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shadowkv import LLM, SamplingParams
from shadowkv.eval.suites.ruler.data import word_list
from shadowkv.models.tokenization.tokenizer import Tokenizer
from training.samples import Tokens
from training.texts import Texts

LISTS = Path(__file__).with_name("topics.json")
SHARES = {"topic": 0.42, "country": 0.05, "other": 0.33, "text": 0.2}
"""Kinds of first questions."""
FOLLOWED = 0.25
"""Share of the chats with a second question."""
TEXT_WORDS = (60, 1200)
"""Of a text that is asked about."""
GREEDY = 0.5
"""Share of the chats that are answered greedily, as servers are asked at temperature 0; of others tokens are drawn."""


@dataclass(frozen=True)
class Chat:
    """Questions and the base's answers to them; ``greedy`` says how it chose their tokens."""

    questions: list[str]
    greedy: bool
    held_out: bool
    answers: list[list[int]]

    def tokens(self, tokenizer: Tokenizer) -> Tokens:
        """The chat, ending with the last answer, which is what is learnt."""
        answer = self.answers[-1]
        return Tokens(_prompt(tokenizer, self.questions, self.answers[:-1]) + answer, len(answer))


def write_chats(model: str, texts: Texts, out: Path, count: int, held_out_count: int, max_tokens: int) -> None:
    """``count`` chats to learn from and ``held_out_count`` for a test, one a line of JSON, answered by ``model``."""
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    drawn: dict[str, None] = {}
    chats: list[Chat] = []
    rng = random.Random("chats")
    for held_out, number in ((True, held_out_count), (False, count)):
        first = _first_questions(lists, texts, held_out)
        follow_ups = lists["held_out_follow_ups" if held_out else "follow_ups"]
        for _ in range(number):
            question = next(first)
            # A short question is asked many times, for which its answers are drawn: greedily there is only one.
            greedy = rng.random() < GREEDY and question not in drawn
            drawn[question] = None
            questions = [question] + ([rng.choice(follow_ups)] if rng.random() < FOLLOWED else [])
            chats.append(Chat(questions, greedy, held_out, []))
    with LLM(model, kv="full", max_num_seqs=256, max_model_len=8192) as llm:
        for turn in (0, 1):
            asked = [chat for chat in chats if len(chat.questions) > turn]
            prompts = [_prompt(llm.get_tokenizer(), chat.questions[: turn + 1], chat.answers) for chat in asked]
            ways = [
                SamplingParams(max_tokens=max_tokens, temperature=0.0 if chat.greedy else 1.0, seed=number)
                for number, chat in enumerate(asked)
            ]
            for chat, answer in zip(asked, llm.generate(prompts, ways), strict=True):
                chat.answers.append(answer.outputs[0].token_ids)  # with the end token, where it ended
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(asdict(chat)) + "\n" for chat in chats), encoding="utf-8")


def read_chats(file: Path) -> list[Chat]:
    """What ``write_chats`` wrote."""
    return [Chat(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _prompt(tokenizer: Tokenizer, questions: list[str], answers: list[list[int]]) -> list[int]:
    messages = [{"role": "user", "content": questions[0]}]
    for answer, question in zip(answers, questions[1:]):
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
        messages.append({"role": "user", "content": question})
    return tokenizer.encode_chat(messages)


def _first_questions(lists: dict[str, Any], texts: Texts, held_out: bool) -> Iterator[str]:
    """First questions without end, drawn; each number of it is the same in every run."""
    rng, prefix = random.Random(f"chats/{held_out}"), "held_out_" if held_out else ""

    def of(name: str) -> str:
        return str(rng.choice(lists[prefix + name]))

    words = {kind: word_list(kind, texts.folder) for kind in ("noun", "adjective", "verb")}
    kinds, shares = list(SHARES), list(SHARES.values())
    while True:
        kind = rng.choices(kinds, shares)[0]
        if kind == "topic":
            yield of("topic_prompts").format(topic=of("topics"))
        elif kind == "country":
            yield of("country_prompts").format(country=of("countries"))
        elif kind == "text":
            length = int(rng.uniform(*TEXT_WORDS) * rng.random()) + TEXT_WORDS[0]
            place = rng.randrange(len(texts.words) - length)
            yield of("text_prompts").replace("{text}", " ".join(texts.words[place : place + length]))
        else:
            low = rng.randint(1, 20)
            yield of("others").format(
                book=of("books"),
                task=of("tasks"),
                sentence=of("sentences"),
                a=rng.randint(20, 400),
                b=rng.randint(2, 99),
                c=low,
                d=low + rng.randint(3, 9),
                noun=rng.choice(words["noun"]),
                noun2=rng.choice(words["noun"]),
                adjective=rng.choice(words["adjective"]),
                verb=rng.choice(words["verb"]),
            )
