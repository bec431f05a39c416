"""LongBench's metrics (arXiv:2308.14508, table 1), after its published scoring. If there are several references, the
one with the highest score counts. ``jieba`` splits Chinese text into words, as in LongBench.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

from shadowkv.eval.metrics.overlap import common_subsequence, f1, harmonic, qa_f1, without_chinese_punctuation
from shadowkv.installation import adding


def best(metric: Callable[[str, str], float]) -> Callable[[str, tuple[str, ...]], float]:
    """Returns a metric whose score is the highest of ``metric`` over the references."""
    return lambda prediction, references: max(metric(prediction, reference) for reference in references)


def first_line(metric: Callable[[str, str], float]) -> Callable[[str, str], float]:
    """Returns a metric that scores only the answer's first line, because answers to few-shot prompts go on with another
    example."""
    return lambda prediction, reference: metric(prediction.lstrip("\n").split("\n")[0], reference)


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 of Chinese words without punctuation."""
    return f1(*([word for word in map(without_chinese_punctuation, _cut(t)) if word] for t in (prediction, reference)))


def rouge_l(prediction: str, reference: str) -> float:
    """Returns the ROUGE-L F1 as in the ``rouge`` package: each distinct word counts once, and sentences end at full
    stops."""
    predicted, expected = _sentences(prediction), _sentences(reference)
    union = set()
    for sentence in expected:
        for candidate in predicted:
            union |= {candidate[i] for i in common_subsequence(candidate, sentence)}
    return harmonic(len(union), len(set(chain(*predicted))), len(set(chain(*expected))))


def rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L F1 of Chinese words."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)))


def classification(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 divided by the number of classes that the answer's first line names, or 0 if the line does not name the
    right class.

    ``references`` are the right class, then all classes. Another class whose name is part of the right class's name is
    not counted.
    """
    right, answer = references[0], prediction.lstrip("\n").split("\n")[0]
    named = {name for name in references if name in answer and (name == right or name not in right)}
    return 1 / len(named) if right in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Returns the share of the answer's numbers that equal the number in ``reference``, the name of a paragraph."""
    number = re.search(r"\d+", reference)
    return count(prediction, number.group() if number else reference)


def count(prediction: str, reference: str) -> float:
    """Returns the share of the numbers in the answer that equal the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Returns the edit similarity of ``reference`` and the answer's first line that is neither a comment nor a code
    fence, rounded to 0.01."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def _sentences(text: str) -> list[list[str]]:
    # As in the package ``rouge``, a sentence that is only white space counts as one empty word.
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _cut(text: str) -> list[str]:
    try:
        import jieba
    except ImportError as error:
        raise ValueError(f"scoring answers in Chinese needs the package jieba: {adding('eval')}") from error
    words: Any = jieba.cut(text, cut_all=False)
    return list(words)


LONGBENCH_METRICS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "qa_f1": best(qa_f1),
    "qa_f1_first_line": best(first_line(qa_f1)),
    "qa_f1_zh": best(qa_f1_zh),
    "rouge_l": best(rouge_l),
    "rouge_l_first_line": best(first_line(rouge_l)),
    "rouge_l_zh": best(rouge_l_zh),
    "classification": classification,
    "retrieval": best(retrieval),
    "count": best(count),
    "code_similarity": best(code_similarity),
}
