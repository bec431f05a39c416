"""Hits are measured against computing all, and come from the tier that they are said to come from."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.prefix_cache import hits
from benchmarks.prefix_cache.questions import questions
from robustness.tiny_model import tiny_model


def test_hits_of_every_tier_are_compared(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "new" / "hits.csv"
    text.write_text("".join(chr(32 + n * n * n % 90) for n in range(3000)), encoding="utf-8")
    with tiny_model() as model:
        flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
        flags += ["--kv", "turbo:dense_below=0", "shadowkv:dense_below=0,outliers=4", "--text", str(text)]
        flags += ["--prompts", "2", "--document", "512", "--steps", "17", "--out", str(out)]
        assert hits.main(flags) == 0
    with out.open(newline="", encoding="utf-8") as file:
        rows = {(row["kv"].partition(":")[0], row["pair"]): row for row in csv.DictReader(file)}
    assert len(rows) == 15
    assert {row["cached_tokens"] for row in rows.values()} == {"512"}
    assert float(rows["full", "fresh > hit"]["largest_logit_difference"]) < 1e-4
    assert float(rows["turbo", "fresh > hit"]["mean_kl"]) > 0


def test_a_sample_of_many_queries_is_asked_one_by_one():
    needle = "One of the special magic numbers for {} is: {}."
    text = f"Start.\n{needle.format('old-key', 1234567)} Hay. {needle.format('new-key', 7654321)}"
    asked = questions(f"{text}\nWhat are all the special magic numbers for new-key, and old-key mentioned? They are")
    assert [value for _, value in asked] == ["1234567", "7654321"]
    for (prompt, _), key in zip(asked, ("old-key", "new-key"), strict=True):
        assert prompt.startswith(f"{text}\nWhat is the special magic number for {key} mentioned")
        assert prompt.endswith(f" The special magic number for {key} mentioned in the provided text is")
