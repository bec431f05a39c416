"""LongBench (Bai et al., arXiv:2308.14508): 21 data sets in English, Chinese and code, from their official files.

Prompts, token limits and metrics are the published ones (github.com/THUDM/LongBench, MIT).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowkv.eval.prompts.fitter import PromptFitter
from shadowkv.eval.records.predictions import Sample
from shadowkv.models.tokenization.tokenizer import Tokenizer

SOURCE = "https://huggingface.co/datasets/THUDM/LongBench (data.zip)"


@dataclass(frozen=True)
class Dataset:
    """One data set.

    Attributes:
        prompt: template with the fields ``context`` and ``input`` of a row.
        max_new_tokens: limit for an answer.
        metric: name in ``metrics.scoring.METRICS``.
        chat: whether a chat template may be used. It is not used if the answer continues the prompt, as after few-shot
            examples and code.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool = True


_ONLY_ANSWER = "Only give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. {_ONLY_ANSWER}\n\nThe following are given passages.\n"
    f"{{context}}\n\nAnswer the question based on the given passages. {_ONLY_ANSWER}\n\nQuestion: {{input}}\nAnswer:"
)
# The space missing in "asconcisely" is LongBench's.
_STORY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)

DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_STORY}\n\nStory: {{context}}\n\n"
        f"Now, answer the question based on the story {_STORY}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Dataset(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        f"Article: {{context}}\n\n Answer the question based on the above article {_ARTICLE}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": Dataset(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：",
        64,
        "qa_f1_zh",
    ),
    "hotpotqa": Dataset(_PASSAGES, 32, "qa_f1"),
    "2wikimqa": Dataset(_PASSAGES, 32, "qa_f1"),
    "musique": Dataset(_PASSAGES, 32, "qa_f1"),
    "dureader": Dataset(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_l_zh",
    ),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": Dataset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_zh",
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        chat=False,
    ),
    "triviaqa": Dataset(
        f"Answer the question based on the given passage. {_ONLY_ANSWER} The following are some examples.\n\n"
        "{context}\n\n{input}",
        32,
        "qa_f1_first_line",
        chat=False,
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l_first_line",
        chat=False,
    ),
    "lsht": Dataset("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, "classification", chat=False),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as "
        "1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval",
    ),
    "lcc": Dataset(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_similarity", chat=False
    ),
    "repobench-p": Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
}
TASKS: tuple[str, ...] = tuple(DATASETS)


def samples(
    task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, data: Path, chat: bool = False
) -> list[Sample]:
    """At most ``count`` samples of a data set, chosen by ``seed``, in the file's order.

    Args:
        task: one of ``TASKS``.
        length: maximum tokens of prompt and answer together. The middle of a longer prompt is cut out.
        data: folder with ``<task>.jsonl``.
        chat: whether to use the tokenizer's chat template. Data sets whose ``Dataset.chat`` is false do not use it.

    Raises ValueError for an unknown task or a bad row, and FileNotFoundError if the file is missing.
    """
    if task not in DATASETS:
        raise ValueError(f"LongBench has no data set {task!r}; it has {', '.join(TASKS)}")
    dataset = DATASETS[task]
    fields = ("context", "input", "answers", *(["all_classes"] if dataset.metric == "classification" else []))
    fitter = PromptFitter(tokenizer, length, dataset.max_new_tokens, chat and dataset.chat)
    return [
        Sample(
            task,
            f"{number}",
            (fitter.cut(dataset.prompt.format(context=row["context"], input=row["input"])),),
            (_references(dataset, row),),
            dataset.max_new_tokens,
            dataset.metric,
            length,
        )
        for number, row in chosen_rows(data / f"{task}.jsonl", fields, count, seed, SOURCE)
    ]


def chosen_rows(
    file: Path, fields: tuple[str, ...], count: int, seed: int, source: str
) -> list[tuple[int, dict[str, Any]]]:
    """Returns at most ``count`` rows of a JSONL file, chosen by ``seed``, in the file's order. Each row comes with its
    number, counted from 0.

    Raises ValueError for a line that is not an object with ``fields``. If the file is missing, raises a
    FileNotFoundError whose message names ``source``.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: get it from {source}")
    # The file is read twice, so that only the chosen rows are in memory: files of whole books are large.
    total = sum(1 for _ in _lines(file))
    chosen = set(random.Random(f"{file.stem}/{seed}").sample(range(total), min(count, total)))
    rows = []
    for number, line in enumerate(_lines(file)):
        if number in chosen:
            try:
                row = json.loads(line)
                missing = [field for field in fields if field not in row]
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, row {number} is not a JSON object: {error}") from error
            if missing:
                raise ValueError(f"{file}, row {number} has no {missing[0]!r}")
            rows.append((number, row))
    return rows


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        yield from (line for line in lines if line.strip())


def _references(dataset: Dataset, row: dict[str, Any]) -> tuple[str, ...]:
    if dataset.metric == "classification":  # the right class, then all classes
        return (row["answers"][0], *row["all_classes"])
    return tuple(row["answers"])
