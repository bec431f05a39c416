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
    assert [column.length for column in columns] == [16384, 32768, 65536] * 2
    for column in columns:
        assert column.seconds() > 30
        for command in reproduce.commands(column, reproduce.POLICIES, None, Path("out")):
            args = parser(None).parse_args(command[3:])
            check(args)
            assert (args.suite, args.seed, args.length) == ("ruler", 51, [column.length])
            for kv in args.kv:
                asked = column.recorded()[reproduce.label(kv)]
                assert len(asked) == args.samples * len(args.tasks)


def test_policies_of_the_same_tasks_share_their_prefills(column: reproduce.Column) -> None:
    runs = reproduce.commands(column, reproduce.POLICIES, 3, Path("out"))
    kvs = [run[run.index("--kv") + 1 : run.index("--out")] for run in runs]
    assert kvs == [list(reproduce.POLICIES[:3]), [reproduce.POLICIES[3]]]
    assert all(run[run.index("--samples") + 1] == "3" for run in runs)


def test_the_record_beside_itself_has_readmes_figures(column: reproduce.Column, tmp_path: Path) -> None:
    (tmp_path / column.folder).mkdir()
    file = PredictionFile(tmp_path / column.folder / "predictions.jsonl")
    for prediction in column.predictions():
        file.append(prediction)
    lines = reproduce.table([column], tmp_path).splitlines()
    assert [line.split("|")[2].strip() for line in lines[-4:]] == [
        "70.2 (70.2); +0.0 ± 0.0, n = 325",
        "-0.5 (-0.5); +0.0 ± 0.0, n = 325",
        "-0.8 (-0.8); +0.0 ± 0.0, n = 325",
        "-1.0 (-1.0); +0.0 ± 0.0, n = 200",
    ]


def test_a_changed_score_shows_on_the_samples_that_both_have() -> None:
    def answers(*values: float) -> list[Prediction]:
        return [
            Prediction("vt", f"51-{number}", 16384, "full", "full", 1.0, [""], value, 0.1)
            for number, value in enumerate(values)
        ]

    new, recorded = (reproduce.scores(answers(*values), 16384) for values in ((1.0, 0.5), (1.0, 1.0, 0.0)))
    assert reproduce.cell("full", new, recorded) == "75.0 (100.0); -25.0 ± 25.0, n = 2"
    assert reproduce.cell("turbo:prefill=sparse", new, recorded) == "–"
