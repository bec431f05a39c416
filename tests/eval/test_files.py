"""predictions.jsonl: what is read is what was written, a torn end is dropped, anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from predicted import predicted

from shadowkv.eval.records.predictions import PredictionFile, replacing


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    file = PredictionFile(path)
    for number in range(3):
        file.append(predicted(0.5, number))
    content = path.read_bytes()
    for cut in (1, 20):
        path.write_bytes(content[:-cut])
        again = PredictionFile(path)
        assert again.predictions == file.predictions[:2]
        again.append(predicted(0.5, 2))
        assert path.read_bytes() == content
    assert PredictionFile(path).answered() == {(("t", 1000, str(number)), "full") for number in range(3)}


def test_a_line_of_before_has_no_output_tokens(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    PredictionFile(path).append(predicted(1, output_tokens=7))
    assert PredictionFile(path).predictions == [predicted(1, output_tokens=7)]
    line = json.loads(path.read_text())
    del line["output_tokens"]
    path.write_text(json.dumps(line) + "\n")
    assert PredictionFile(path).predictions == [predicted(1)]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    PredictionFile(path).append(predicted(1))
    for bad in ("{", '{"task": "t"}'):
        path.write_text(path.read_text().splitlines()[0] + "\n" + bad + "\n")
        with pytest.raises(ValueError, match="line 2 is not a prediction"):
            PredictionFile(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
