"""Metrics by hand, from their published definitions."""

from __future__ import annotations

import pytest

from shadowkv.eval.metrics.scoring import METRICS, score
from shadowkv.eval.records.predictions import Sample

CASES = [
    ("string_match_all", "It is ALPHA and beta.", ("alpha", "Beta", "gamma", "delta"), 1 / 2),
    ("string_match_part", "It is ALPHA.", ("gamma", "alpha"), 1),
    ("string_match_part", "It is delta.", ("gamma", "alpha"), 0),
    ("exact_match", "\n Paris \nLondon", ("Paris",), 1),
    ("exact_match", "Paris, France", ("Paris",), 0),
    ("exact_match", "", ("Paris",), 0),
    ("no_loop", "and so on " * 26, (), 0),
    ("no_loop", "and so on, and so on, and so on.", (), 1),
    ("mrcr", "Xk3abcd", ("Xk3", "abcd"), 1),
    ("mrcr", "Xk3abed", ("Xk3", "abcd"), 3 / 4),  # 2 * 3 matching characters of 4 + 4
    ("mrcr", "Xk3", ("Xk3", "abcd"), 0),
    ("mrcr", "abcd", ("Xk3", "abcd"), 0),
    ("mrcr", " Xk3abcd", ("Xk3", "abcd"), 0),
    ("mrcr", "Xk3abcd\n\nUser:\nAnother question.", ("Xk3", "abcd"), 1),
    # "the cat sat" -> cat sat; "a cat" -> cat: precision 1/2, recall 1.
    ("qa_f1", "The cat, sat!", ("dog", "a cat"), 2 / 3),
    ("qa_f1", "", ("a cat",), 0),
    ("qa_f1_first_line", "\ncat\ndog", ("cat",), 1),
    # Common subsequence "the sat down" of 4 and 3 distinct words.
    ("rouge_l", "the cat sat down", ("the sat down",), 6 / 7),
    # Union over sentences: "a b" and "d", of 4 and 3 distinct words (x once).
    ("rouge_l", "a x b. x d", ("a b. d",), 6 / 7),
    ("rouge_l", "", ("a b",), 0),
    ("rouge_l_first_line", "a b\nc", ("a b",), 1),
    # References: the right class, then all. "food" lies in "fast food", and does not count against it.
    ("classification", "fast food or animal\nother", ("fast food", "fast food", "food", "animal", "other"), 1 / 2),
    ("classification", "animal", ("food", "food", "animal"), 0),
    ("retrieval", "Paragraph 3, not 13 or 3", ("Paragraph 3",), 2 / 3),
    ("retrieval", "none", ("Paragraph 3",), 0),
    ("count", "7 of 8", ("7",), 1 / 2),
    # 2 * 3 matching characters of 3 + 4.
    ("code_similarity", "# comment\nabc\nabcd", ("abcd",), 0.86),
    ("code_similarity", "// only a comment", ("abcd",), 0),
    ("kv_retrieval", '{"value": "a-1"}', ("a-1",), 1),
    ("kv_retrieval", "xa-1", ("a-1",), 0),
    ("first_integer", "The key 123, not 456", ("123",), 1),
    ("first_integer", "1234", ("123",), 0),
    ("code_run", "The result is: 42.", ("42",), 1),
    ("code_run", "42 it is", ("42",), 0),
    ("code_debug", "B. because", ("f", "B"), 1),
    ("code_debug", "The answer is: f_1", ("f_1", "B"), 1),
    ("code_debug", "The answer is: C", ("f_1", "B"), 0),
    ("code_debug", "B", ("f_1", "B"), 0),
    ("longbook_choice", "B", ("Paris", "B"), 1),
    ("longbook_choice", "I think the answer is C", ("Paris", "B"), 0),
    ("longbook_choice", "the answer is: Paris", ("Paris", "B"), 1),
    ("longbook_choice", "perhaps B or C", ("Paris", "B"), 1),
    ("longbook_choice", "", ("Paris", "B"), 0),
    ("longdialogue_qa", "It was John.", ("JOHN",), 1),
    ("longbook_qa_chn", "北京。", ("上海", "北京市"), 4 / 5),
    ("math_find", "about 2.50 metres", ("2.5",), 1),
    ("math_find", "none", ("2",), 0),
    ("math_calc", "[1, 2, 4, 4]", ("1", "2", "3", "4"), 1 / 2),
    # Lines: "a b" and "d" of 4 and 3 words.
    ("rouge_l_sum", "a x b\nd", ("a b\nd",), 6 / 7),
]


@pytest.mark.parametrize(("name", "prediction", "references", "wanted"), CASES)
def test_metric(name: str, prediction: str, references: tuple[str, ...], wanted: float) -> None:
    assert METRICS[name](prediction, references) == pytest.approx(wanted)


def test_every_metric_has_a_case() -> None:
    # Those of Chinese words need jieba.
    assert set(METRICS) - {case[0] for case in CASES} == {"qa_f1_zh", "rouge_l_zh"}


def test_chinese_words() -> None:
    pytest.importorskip("jieba")
    assert METRICS["qa_f1_zh"]("北京。", ("北京",)) == 1
    assert METRICS["rouge_l_zh"]("我爱北京", ("我爱北京",)) == 1


def test_a_sample_scores_the_mean_of_its_turns() -> None:
    sample = Sample("t", "0", ("a", "b"), (("x",), ("y",)), 4, "exact_match", 100)
    assert score(sample, ["x", "z"]) == 1 / 2
