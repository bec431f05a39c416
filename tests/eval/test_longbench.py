"""LongBench's files become prompts in its own forms, cut in the middle, with the metric of each data set."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_data import smollm2_tokenizer, write_jsonl

from shadowkv.eval.metrics.scoring import METRICS, score
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import longbench

ROW: dict[str, object] = {
    "input": "Who {sings}?",
    "context": "Mia {sings} loudly.",
    "answers": ["Mia", "Mia Bo"],
    "all_classes": None,
    "_id": "a1",
}


def made(task: str, data: Path, length: int = 1000, count: int = 9, seed: int = 0, chat: bool = False) -> list[Sample]:
    return longbench.samples(task, smollm2_tokenizer(), length, count, seed, data, chat)


@pytest.mark.parametrize("task", longbench.TASKS)
def test_every_data_set_has_a_prompt_and_a_metric(task: str, tmp_path: Path) -> None:
    kinds = {"all_classes": ["Mia", "Bo"], "answers": ["Mia"]} if task in ("trec", "lsht") else {}
    write_jsonl(tmp_path / f"{task}.jsonl", [{**ROW, **kinds}])
    (sample,) = made(task, tmp_path)
    prompt = sample.turns[0]
    assert "Mia {sings} loudly." in prompt
    without_question = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert ("Who {sings}?" in prompt) == (task not in without_question)
    assert sample.metric in METRICS
    assert sample.references == ((("Mia", "Mia", "Bo") if kinds else ("Mia", "Mia Bo")),)
    assert len(longbench.TASKS) == 21


def test_one_prompt_in_full(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "musique.jsonl", [ROW])
    (sample,) = made("musique", tmp_path)
    assert sample.turns[0] == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\nMia {sings} loudly.\n\nAnswer the question based on the given passages."
        " Only give me the answer and do not output any other words.\n\nQuestion: Who {sings}?\nAnswer:"
    )
    assert (sample.max_new_tokens, sample.metric, sample.length) == (32, "qa_f1", 1000)
    assert score(sample, ["It is Mia"]) == 0.5


def test_classes_are_scored(tmp_path: Path) -> None:
    classes = ["Food", "Date", "City"]
    write_jsonl(tmp_path / "trec.jsonl", [{**ROW, "answers": ["Date"], "all_classes": classes}])
    (sample,) = made("trec", tmp_path)
    assert [score(sample, [text]) for text in ("Date\nFood", "City", "Date or City")] == [1, 0, 0.5]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [300, 777])
def test_long_prompts_lose_their_middle(length: int, chat: bool, tmp_path: Path) -> None:
    context = " ".join(f"naïve{number} 中文字" for number in range(2000))
    write_jsonl(tmp_path / "qmsum.jsonl", [{**ROW, "context": context}])
    with pytest.raises(ValueError, match="leaves no prompt beside 512 new tokens"):
        made("qmsum", tmp_path, 500)
    (sample,) = made("qmsum", tmp_path, 512 + length, chat=chat)
    prompt = sample.turns[0]
    assert length - 16 <= len(smollm2_tokenizer().encode(prompt)) <= length
    assert "You are given a meeting transcript" in prompt
    assert "naïve0 " in prompt and "naïve1999 " in prompt and "naïve1000 " not in prompt
    assert "Query: Who {sings}?\nAnswer:" in prompt
    assert prompt.endswith("<|im_start|>assistant\n" if chat else "Answer:")


def test_prompts_to_continue_have_no_chat_template(tmp_path: Path) -> None:
    for task in ("lcc", "samsum", "hotpotqa"):
        write_jsonl(tmp_path / f"{task}.jsonl", [ROW])
        assert ("<|im_start|>" in made(task, tmp_path, chat=True)[0].turns[0]) == (task == "hotpotqa")


def test_the_seed_chooses_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "lcc.jsonl", [{**ROW, "context": f"x{number}"} for number in range(30)])
    assert [sample.id for sample in made("lcc", tmp_path, count=99)] == [str(number) for number in range(30)]
    some = made("lcc", tmp_path, count=10)
    assert some == made("lcc", tmp_path, count=10)
    assert [int(sample.id) for sample in some] == sorted({int(sample.id) for sample in some})
    assert some != made("lcc", tmp_path, count=10, seed=1)


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"qasper.jsonl is missing: get it from https://huggingface.co"):
        made("qasper", tmp_path)
    write_jsonl(tmp_path / "qasper.jsonl", [{"context": "", "input": ""}])
    with pytest.raises(ValueError, match="row 0 has no 'answers'"):
        made("qasper", tmp_path)
    (tmp_path / "qasper.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="row 0 has no 'context'"):
        made("qasper", tmp_path)
    (tmp_path / "qasper.jsonl").write_text("\n{\n")
    with pytest.raises(ValueError, match=r"qasper.jsonl, row 0 is not a JSON object"):
        made("qasper", tmp_path)
    with pytest.raises(ValueError, match="no data set 'squad'"):
        made("squad", tmp_path)
