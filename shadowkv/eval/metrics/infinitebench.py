"""InfiniteBench's metrics (arXiv:2402.13718), after its published scoring. Metrics have the names of their tasks,
except two: ``first_integer`` scores Passkey and Number, and ``rouge_l_sum`` scores En.Sum.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain

from shadowkv.eval.metrics.overlap import common_subsequence, f1, harmonic, without_chinese_punctuation


def kv_retrieval(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the value, the only reference, is a word of the answer."""
    return float(references[0] in _words(prediction, "\n:\"'.,?!{}"))


def first_integer(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the first sequence of digits in the answer is the reference (Passkey, Number)."""
    match = re.search(r"[0-9]+", prediction)
    return float(match is not None and match.group() == references[0])


def code_run(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the answer's last word is the reference, an integer."""
    words = _words(prediction, "\n.`'\":")
    try:
        return float(int(words[-1]) == int(references[0]))
    except (IndexError, ValueError):
        return 0.0


def code_debug(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the answer begins with the right option's letter, or names the letter or the function after "is:" or
    "answer:". ``references`` are the right function and its letter."""
    letter = references[-1]
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _spaced(prediction.strip(), ["\n", "`", "'", '"', "-", "*", "Option", "option"])
    return float(_after(text, ("answer is:", "is:", "answer:"), references) or 0)


def longbook_choice(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the answer chooses the right letter. The chosen letter is the answer's first character, if it is an
    option's letter. Otherwise it is what follows "answer is" or a similar phrase. If there is no such phrase, it is the
    first word that is an option's letter.

    ``references`` are the right answer's text and its letter.
    """
    if prediction[:1] and prediction[0] in "ABCD":
        return float(prediction[0] in references)
    text = _spaced(prediction, list("\n\"'.,?!{}"))
    stated = _after(text, ("answer is:", "answer:", "answer is", "option is"), references)
    if stated is not None:
        return float(stated)
    return float(next((word for word in text.split() if word in "ABCD"), None) in references)


def longdialogue_qa(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the reference, a name in capitals, is a word of the answer. The answer may have it in upper or lower
    case."""
    return float(references[0] in [word.upper() for word in _words(prediction, "\n:\"'.,?!{}")])


def longbook_qa_chn(prediction: str, references: tuple[str, ...]) -> float:
    """Returns the F1 of Chinese characters against the reference with the highest F1."""
    answer = without_chinese_punctuation(prediction)
    return max(f1(answer, without_chinese_punctuation(reference)) for reference in references)


def math_find(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the first number in the answer is the reference."""
    match = re.search(r"\d+\.\d+|\d+", prediction)
    return float(match is not None and float(match.group()) == float(references[0]))


def math_calc(prediction: str, references: tuple[str, ...]) -> float:
    """Returns the share of the references that the answer's integers match, one by one, before the first mistake."""
    right = 0
    for number, reference in zip(re.findall(r"[0-9]+", prediction), references):
        if int(number) != int(reference):
            break
        right += 1
    return right / len(references)


def rouge_l_sum(prediction: str, references: tuple[str, ...]) -> float:
    """ROUGE-Lsum F1 as in the ``rouge_score`` package, unstemmed: sentences are lines, and each occurrence of a word is
    matched at most once."""
    return max(_rouge_l_sum(_lines(prediction), _lines(reference)) for reference in references)


def _rouge_l_sum(predicted: list[list[str]], reference: list[list[str]]) -> float:
    spare, hits = Counter(chain(*predicted)), 0
    for line in reference:
        positions = {i for candidate in predicted for i in common_subsequence(line, candidate)}
        for position in positions:
            if spare[line[position]]:
                spare[line[position]] -= 1
                hits += 1
    return harmonic(hits, sum(map(len, predicted)), sum(map(len, reference)))


def _lines(text: str) -> list[list[str]]:
    return [re.findall("[a-z0-9]+", line) for line in text.lower().split("\n")]


def _words(text: str, separators: str) -> list[str]:
    return _spaced(text, list(separators)).split()


def _spaced(text: str, separators: list[str]) -> str:
    for separator in separators:
        text = text.replace(separator, " ")
    return re.sub(" +", " ", text)


def _after(text: str, prefixes: tuple[str, ...], references: tuple[str, ...]) -> bool | None:
    """Returns whether a reference follows a prefix in the text, after one more character (usually a space). The prefix
    is the first of ``prefixes`` that the text contains. None if the text contains none of them."""
    for prefix in prefixes:
        if prefix in text:
            return text.split(prefix, 1)[1][1:].startswith(references)
    return None


INFINITEBENCH_METRICS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "kv_retrieval": kv_retrieval,
    "first_integer": first_integer,
    "code_run": code_run,
    "code_debug": code_debug,
    "longbook_choice": longbook_choice,
    "longdialogue_qa": longdialogue_qa,
    "longbook_qa_chn": longbook_qa_chn,
    "math_find": math_find,
    "math_calc": math_calc,
    "rouge_l_sum": rouge_l_sum,
}
