"""InfiniteBench's files become prompts in its own forms, with references as its metrics take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_data import smollm2_tokenizer, write_jsonl

from shadowkv.eval.metrics.scoring import METRICS, score
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import infinitebench

# Task: row, a piece of the prompt, the prompt's end, a right answer.
ROWS: dict[str, tuple[dict[str, object], str, str, str]] = {
    "passkey": ({"input": "What is the pass key?", "answer": ["71432"]}, "Find it and", "The pass key is", " 71432."),
    "number_string": ({"input": "Which?", "answer": ["1234567890"]}, "Find it. I", "of digits is", "1234567890"),
    "kv_retrieval": ({"input": "Key: k\nValue:", "answer": ["ab-cd"]}, "JSON object", "Value:", '"ab-cd"}'),
    "longbook_sum_eng": (
        {"input": "", "answer": ["A man met a whale."]},
        "Summarize",
        "Summary:",
        "A man met a whale.",
    ),
    "longbook_choice_eng": (
        {"input": "Who?", "options": ["Al", "Bo", "Cy", "Di"], "answer": ["Bo"]},
        "Question: Who?\nA. Al\nB. Bo\nC. Cy\nD. Di\n\n",
        "correct answer is",
        "B. Bo",
    ),
    "longbook_qa_eng": ({"input": "Who?", "answer": ["Bo", "Mr Bo"]}, "Question: Who?\n", "Answer:", "Mr. Bo"),
    "longbook_qa_chn": ({"input": "谁？", "answer": ["小明"]}, "问题：谁？\n", "答案：", "小明。"),
    "longdialogue_qa_eng": ({"input": "", "answer": ["JACK", "Jack"]}, '"$$MASK$$"', "is likely", "Jack:"),
    "math_find": (
        {"input": "The largest number of the list is:", "answer": 97},
        "What is the largest number in the following list?\n\nthe context",
        "list is:",
        " 97",
    ),
    "math_calc": ({"input": "", "answer": [1, -4, 8]}, "Expression: the context", "Values:", "[1, 4, 8]"),
    "code_run": (
        {"input": "Give the value of func_7(-12).", "answer": [-3]},
        "a function called func_7 in",
        "The value of func_7(-12) is",
        "-3",
    ),
    "code_debug": (
        {"input": "", "options": ["f", "g", "h", "k"], "answer": "h"},
        "Options:\nA. f\nB. g\nC. h\nD. k",
        "option is:",
        "C. h",
    ),
}


def made(task: str, data: Path, length: int = 32000) -> list[Sample]:
    return infinitebench.samples(task, smollm2_tokenizer(), length, 5, 0, data)


@pytest.mark.parametrize("task", infinitebench.TASKS)
def test_every_task_has_its_prompt_and_metric(task: str, tmp_path: Path) -> None:
    row, piece, end, answer = ROWS[task]
    write_jsonl(tmp_path / f"{task}.jsonl", [{"id": 0, "context": "the context", **row}])
    (sample,) = made(task, tmp_path)
    assert "the context" in sample.turns[0]
    assert piece in sample.turns[0] and sample.turns[0].endswith(end)
    assert sample.metric in METRICS
    if task != "math_calc":  # the published metric knows no negative numbers
        assert score(sample, [answer]) == 1
        assert score(sample, ["0"]) < 1
    assert len(infinitebench.TASKS) == 12


def test_options_give_the_answer_and_its_letter(tmp_path: Path) -> None:
    row = {"context": "", "input": "Who?", "options": ["Al", "Bo", "Cy", "Di"]}
    write_jsonl(tmp_path / "longbook_choice_eng.jsonl", [{**row, "answer": ["Cy"]}, {**row, "answer": ["Cy", "C"]}])
    assert [sample.references for sample in made("longbook_choice_eng", tmp_path)] == [(("Cy", "C"),)] * 2


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    context = " ".join(f"word{number}" for number in range(2000))
    write_jsonl(tmp_path / "passkey.jsonl", [{"context": context, "input": "Which?", "answer": "1"}])
    (sample,) = made("passkey", tmp_path, 400)
    assert 380 <= len(smollm2_tokenizer().encode(sample.turns[0])) <= 394
    assert "word0 " in sample.turns[0] and "word1999" in sample.turns[0] and "word1000 " not in sample.turns[0]


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"code_run.jsonl is missing: get it from https://huggingface.co"):
        made("code_run", tmp_path)
    write_jsonl(tmp_path / "code_run.jsonl", [{"context": "", "input": "Run it.", "answer": 1}])
    with pytest.raises(ValueError, match=r"'Run it\.' has nothing like"):
        made("code_run", tmp_path)
    with pytest.raises(ValueError, match=r"no task 'en\.qa'"):
        made("en.qa", tmp_path)
