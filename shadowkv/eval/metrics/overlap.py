"""Overlap of words between two texts: F1 over bags of words (SQuAD), and longest common subsequences for ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def english_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD, arXiv:1606.05250)."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def without_chinese_punctuation(text: str) -> str:
    """Returns a text in lower case, without white space and without Chinese and ASCII punctuation."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION))
    return "".join(text.split())


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 (harmonic mean of precision and recall) of words. A word counts as often as it occurs."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * same / (len(prediction) + len(reference)) if same else 0.0


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[int]:
    """Returns the positions in ``left`` of a longest common subsequence. If there are several, the one that
    backtracking finds first is returned."""
    lengths = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, word in enumerate(left):
        for j, other in enumerate(right):
            same = word == other
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if same else max(lengths[i][j + 1], lengths[i + 1][j])
    positions, i, j = [], len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            i, j = i - 1, j - 1
            positions.append(i)
        elif lengths[i][j - 1] > lengths[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return positions[::-1]


def harmonic(hits: int, predicted: int, reference: int) -> float:
    """Returns F1 for numbers of words: ``hits`` of the ``predicted`` words are among the ``reference`` words."""
    return 2 * hits / (predicted + reference) if hits else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of words, after SQuAD's normalisation."""
    return f1(english_words(prediction), english_words(reference))
