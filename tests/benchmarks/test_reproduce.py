"""The table of RULER is run as it was recorded, and shows what changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reproduce
from shadowkv.eval.arguments import check, parser
from shadowkv.eval.records.predictions import Prediction, PredictionFile


@pytest.fixture
def column() -> reproduce.Column:
    return reproduce.columns(None)[1]


def test_every_record_is_there_and_every_command_is_one() -> None:
    columns = reproduce.columns(Path("qwen.gguf"))
    assert [column.length for column in columns] == [16384, 32768, 16384, 32768]
    for column in columns:
        assert column.seconds() > 30
        args = parser(None).parse_args(reproduce.command(column, reproduce.POLICIES, None, Path("out"))[3:])
        check(args)
        assert (args.suite, args.seed, args.length) == ("ruler", column.seed, [column.length])
        recorded = reproduce.scores(column.predictions())
        assert all(len(recorded[kv]) == args.samples * 13 for kv in args.kv)


def test_fewer_samples_and_rows(column: reproduce.Column) -> None:
    run = reproduce.command(column, reproduce.POLICIES[:1], 3, Path("out"))
    assert run[run.index("--samples") + 1] == "3"
    assert run[run.index("--kv") + 1 : run.index("--out")] == ["full"]


def test_the_record_beside_itself_has_its_figures(column: reproduce.Column, tmp_path: Path) -> None:
    (tmp_path / column.folder).mkdir()
    file = PredictionFile(tmp_path / column.folder / "predictions.jsonl")
    for prediction in column.predictions():
        file.append(prediction)
    lines = reproduce.table([column], tmp_path).splitlines()
    assert [line.split("|")[2].strip() for line in lines[-4:]] == [
        "69.8 (69.8); +0.0 ± 0.0, n = 325",
        "-0.1 (-0.1); +0.0 ± 0.0, n = 325",
        "-0.0 (-0.0); +0.0 ± 0.0, n = 325",
        "-0.6 (-0.6); +0.0 ± 0.0, n = 325",
    ]


def test_a_changed_score_shows_on_the_samples_that_both_have() -> None:
    def answers(*values: float) -> list[Prediction]:
        return [
            Prediction("vt", f"51-{number}", 16384, "full", "full", 1.0, [""], value, 0.1)
            for number, value in enumerate(values)
        ]

    new, recorded = (reproduce.scores(answers(*values)) for values in ((1.0, 0.5), (1.0, 1.0, 0.0)))
    assert reproduce.cell("full", new, recorded) == "75.0 (100.0); -25.0 ± 25.0, n = 2"
    assert reproduce.cell("turbo:prefill=sparse", new, recorded) == "–"
