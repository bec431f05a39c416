"""What the benchmarks' tests share: SmolLM2's tokeniser, and a small folder with all of RULER's files."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.sources import fetch
from shadowkv.models.tokenization.tokenizer import Tokenizer

ARTICLES, PARAGRAPHS = 6, 8


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    """The real one, without the weights."""
    return tokenizer_from_gguf(GGUFFile(fetch("smollm2-135m-instruct")))


def write_ruler_data(folder: Path) -> Path:
    """Essays, word lists, SQuAD and HotpotQA in their official formats, with made-up contents."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 5))) for _ in range(1500)})
    for kind, part in (("noun", words[::3]), ("adjective", words[1::3]), ("verb", words[2::3])):
        (folder / f"{kind}list.txt").write_text("\n".join(part) + "\n")
    essay = " ".join(f"{' '.join(rng.choices(words, k=12))}." for _ in range(60))
    write_json(folder / "PaulGrahamEssays.json", {"text": essay.replace(" ", "\n", 40)})
    articles, questions = [], []
    for article in range(ARTICLES):
        paragraphs = []
        for number in range(PARAGRAPHS):
            mark = f"{article}-{number}"
            text = f"Text {mark} says capital{mark}. {' '.join(rng.choices(words, k=20))}."
            asked = {"question": f"What says {mark}?", "is_impossible": False}
            asked["answers"] = [{"text": f"capital{mark}"}, {"text": f"says capital{mark}"}, {"text": f"capital{mark}"}]
            refused = {"question": f"Nothing {mark}?", "is_impossible": True, "answers": []}
            paragraphs.append({"context": text, "qas": [asked, refused]})
            documents = [[f"Title {mark} {i}", [f"City{i} is in {mark}.", f" It is {i}."]] for i in range(10)]
            questions.append({"question": f"Which city is in {mark}?", "answer": "City3", "context": documents})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    write_json(folder / "squad.json", {"data": articles})
    write_json(folder / "hotpotqa.json", questions)
    return folder


def write_json(file: Path, content: object) -> None:
    """As one JSON document."""
    file.write_text(json.dumps(content), encoding="utf-8")


def write_jsonl(file: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
