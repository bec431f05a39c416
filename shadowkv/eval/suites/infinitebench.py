"""InfiniteBench (Zhang et al., arXiv:2402.13718): 12 tasks beyond 100K tokens, from their official files.

Prompts, token limits and metrics are the published ones (github.com/OpenBMB/InfiniteBench, MIT). The prompts are the
benchmark's templates for YaRN-Mistral and Yi, which are for plain completion.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shadowkv.eval.prompts.fitter import PromptFitter
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites.longbench import Dataset, chosen_rows
from shadowkv.models.tokenization.tokenizer import Tokenizer

SOURCE = "https://huggingface.co/datasets/xinrongzhang2022/InfiniteBench"


_HIDDEN = "I will quiz you about the important information there.\n\n{context}\n\n{input}\n\n"
_OPTIONS = "A. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"

_TASKS: dict[str, Dataset] = {
    "passkey": Dataset(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        f"{_HIDDEN}The pass key is",
        6,
        "first_integer",
    ),
    "number_string": Dataset(
        "There is an important info hidden inside a lot of irrelevant text. Find it. "
        f"{_HIDDEN}The sequence of digits is",
        12,
        "first_integer",
    ),
    "kv_retrieval": Dataset(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
        "kv_retrieval",
    ),
    "longbook_sum_eng": Dataset("Summarize the book below.\n\n{context}\n\nSummary:", 1200, "rouge_l_sum"),
    "longbook_choice_eng": Dataset(
        "Read the book and answer the question.\n\n{context}\n\n"
        f"Question: {{input}}\n{_OPTIONS}The letter of the correct answer is",
        40,
        "longbook_choice",
    ),
    "longbook_qa_eng": Dataset(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:",
        40,
        "qa_f1",
    ),
    "longbook_qa_chn": Dataset(
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：", 40, "longbook_qa_chn"
    ),
    "longdialogue_qa_eng": Dataset(
        "Below is a dialogue script where one random occurrence of a character name is replaced with "
        '"$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
        "The name that has been replaced with $$MASK$$ is likely",
        40,
        "longdialogue_qa",
    ),
    "math_find": Dataset("What is {target} in the following list?\n\n{context}\n\n{input}", 3, "math_find"),
    "math_calc": Dataset(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
        30000,
        "math_calc",
    ),
    "code_run": Dataset(
        "There is a function called {function} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {call}. The value of {call} is",
        5,
        "code_run",
    ),
    "code_debug": Dataset(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        f"crash.\n\n{{context}}\n\nOptions:\n{_OPTIONS}The correct option is:",
        5,
        "code_debug",
    ),
}
TASKS: tuple[str, ...] = tuple(_TASKS)


def samples(
    task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, data: Path, chat: bool = False
) -> list[Sample]:
    """Returns at most ``count`` samples of a task, chosen by ``seed``, in the file's order.

    Args:
        task: one of ``TASKS``.
        length: maximum tokens of prompt and answer together. The middle of a longer prompt is cut out.
        data: folder with ``<task>.jsonl``.
        chat: whether the prompt is a user's message in the tokenizer's chat template.

    Raises ValueError for an unknown task or a bad row, and FileNotFoundError if the file is missing.
    """
    if task not in _TASKS:
        raise ValueError(f"InfiniteBench has no task {task!r}; it has {', '.join(TASKS)}")
    kind = _TASKS[task]
    fitter = PromptFitter(tokenizer, length, kind.max_new_tokens, chat)
    return [
        Sample(
            task,
            f"{number}",
            (fitter.cut(kind.prompt.format(**_fields(task, row))),),
            (_references(row),),
            kind.max_new_tokens,
            kind.metric,
            length,
        )
        for number, row in chosen_rows(data / f"{task}.jsonl", ("context", "input", "answer"), count, seed, SOURCE)
    ]


def _fields(task: str, row: dict[str, Any]) -> dict[str, str]:
    """Returns the fields of the task's template."""
    fields = {"context": row["context"], "input": row["input"], **dict(zip("ABCD", row.get("options") or ()))}
    if task == "math_find":
        fields["target"] = _search(r"The .+ of", row["input"]).lower().removesuffix(" of")
    if task == "code_run":
        fields["call"] = _search(r"func_[0-9]+\(-?[0-9]+\)", row["input"])
        fields["function"] = fields["call"].split("(")[0]
    return fields


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{text!r} has nothing like {pattern!r}")
    return match.group()


def _references(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the right answers as text. If the row has options, returns the right option and its letter."""
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    options = row.get("options")
    if options and len(answers) == 1:
        answers = [answers[0], "ABCD"[options.index(answers[0])]]
    return tuple(map(str, answers))
