"""RULER's question answering: questions of SQuAD and HotpotQA. A question's own documents are mixed with those of other
questions (arXiv:2404.06654, section 3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.prompts.fitter import Question
from shadowkv.eval.suites.ruler.data import read_json
from shadowkv.models.tokenization.tokenizer import Tokenizer

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
TEMPLATE = (
    f"{INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n{INSTRUCTION}\n\nQuestion: {{question}}"
)
PREFIX = " Answer:"


@dataclass(frozen=True)
class Item:
    """A question of a data set.

    Attributes:
        answers: the right answers. One of them suffices.
        own: documents that answer the question.
        near: other documents of the same article, which are the first to be added.
    """

    question: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    near: tuple[str, ...] = ()


def squad(data: Path | None) -> list[Item]:
    """SQuAD 2.0 (arXiv:1806.03822), development set: questions that have an answer."""
    items = []
    for article in read_json("squad.json", data)["data"]:
        contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            near = tuple(dict.fromkeys(context for context in contexts if context != paragraph["context"]))
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    items.append(Item(asked["question"], answers, (paragraph["context"],), near))
    return items


def hotpotqa(data: Path | None) -> list[Item]:
    """HotpotQA (arXiv:1809.09600), development set with distractors."""
    return [
        Item(
            asked["question"],
            (asked["answer"],),
            tuple(dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"])),
        )
        for asked in read_json("hotpotqa.json", data)
    ]


class QuestionAnswering:
    """Questions in an order that the seed determines. A unit is a document. A question's own documents are always
    included."""

    def __init__(
        self, read: Callable[[Path | None], list[Item]], tokenizer: Tokenizer, length: int, seed: int, data: Path | None
    ) -> None:
        self._items = read(data)
        self._documents = sorted({document for item in self._items for document in (*item.own, *item.near)})
        random.Random(f"{read.__name__}/{seed}").shuffle(self._items)
        self.least: int = max(len(item.own) for item in self._items)
        self.most: int | None = len(self._documents)

    def question(self, index: int, units: int, rng: random.Random) -> Question:
        """Returns the question with ``units`` shuffled documents. The question's own documents are added first, then
        other documents of the same article, then documents of other articles.

        Raises ValueError if there is no question ``index``.
        """
        if index >= len(self._items):
            raise ValueError(f"there are only {len(self._items)} questions, and too few of them fit")
        item = self._items[index]
        documents = list(item.own)
        documents += rng.sample(item.near, min(len(item.near), max(units - len(documents), 0)))
        # More documents are drawn than needed, because some may be included already.
        taken = set(documents)
        spare = rng.sample(self._documents, min(len(self._documents), units + len(taken)))
        documents += [document for document in spare if document not in taken][: max(units - len(documents), 0)]
        rng.shuffle(documents)
        context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, 1))
        return Question(TEMPLATE.format(context=context, question=item.question), PREFIX, item.answers)
