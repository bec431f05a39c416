"""Tables, figures and plots of documents come from result files, and a check finds those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import __main__ as command
from benchmarks.figures import plots, results
from benchmarks.figures.plots import Plot

PAGE = """A table:

<!-- figures: table -->

old

<!-- end -->

It has <!-- figures: product 6 7 -->41<!-- end --> rows.
"""
SUMMARY = """Model `m`.

| length | task | samples | full | turbo | quest@0.004 |
| ---: | --- | ---: | ---: | ---: | ---: |
| 1024 | vt | 25 | 80.0 ± 2.0 | 80.0 ± 2.0 (+0.0, -1.0 to +1.0), n = 20 | 70.0 ± 2.0 (-10.0, -12.0 to -8.0) |
"""
FIGURES = {
    "table": lambda: results.table(["", "rows"], [["here", "42"]]),
    "product": lambda left, right: str(int(left) * int(right)),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results with a CSV file and the table of an evaluation."""
    (tmp_path / "speed.csv").write_text("kv,context,speed\nfull,61440,472\nturbo,61440,4628\nturbo,124928,2422\n")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "summary.md").write_text(SUMMARY)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for cached in (results.lines, results.report, results.ruler, results.pooled):
        cached.cache_clear()
    return tmp_path


def test_places_are_filled_around_tables_and_within_sentences() -> None:
    filled = command.fill(PAGE, FIGURES)
    assert "<!-- figures: table -->\n\n| | rows |\n| --- | ---: |\n| here | 42 |\n\n<!-- end -->" in filled
    assert "It has <!-- figures: product 6 7 -->42<!-- end --> rows." in filled
    assert command.fill(filled, FIGURES) == filled


def test_a_place_in_a_sentence_does_not_begin_a_line() -> None:
    with pytest.raises(ValueError, match="figures: product begins a line"):
        command.fill("\n<!-- figures: product 6 7 -->42<!-- end --> rows", FIGURES)


def test_an_unknown_figure_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        command.fill("It has <!-- figures: nothing -->1<!-- end -->", FIGURES)


def test_a_number_is_of_one_line(written: Path) -> None:
    assert results.number("speed.csv", "speed", kv="turbo", context=124928) == 2422
    with pytest.raises(LookupError, match=r"^2 lines of"):
        results.number("speed.csv", "speed", kv="turbo")
    with pytest.raises(LookupError, match=r"^0 lines of"):
        results.number("speed.csv", "speed", kv="quest")


def test_scores_are_read_with_their_intervals(written: Path) -> None:
    scores = results.ruler("evaluation")
    assert {policy: str(score) for (_, _, policy), score in scores.items()} == {
        "full": "80.0",
        "turbo": "0.0 (-1.0 to +1.0)",
        "quest@0.004": "**-10.0 (-12.0 to -8.0)**",
    }


def test_scores_of_all_seeds_are_pooled(written: Path) -> None:
    for seed, lost in ("1", 1), ("2", 3):
        answers = [
            {"task": task, "id": f"{seed}-{number}", "length": 1024, "policy": kv, "kv": kv, "budget": None}
            | {"predictions": [""], "score": 0.5 - (lost / 100 if kv == "turbo" else 0), "seconds": 0.0}
            for task in ("vt", "cwe")
            for number in range(2)
            for kv in ("full", "turbo")
        ]
        (written / "seeds" / seed).mkdir(parents=True)
        (written / "seeds" / seed / "predictions.jsonl").write_text("\n".join(map(json.dumps, answers)))
    scores = results.pooled("seeds")
    assert str(scores["full"]) == "50.0" and str(scores["turbo"]) == "**-2.00 (-2.75 to -1.25)**"


def test_a_figure_that_differs_from_its_file_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    plot = Plot("bars", "tokens/s", {"turbo": [(4628,)]}, ("here",))
    for name, value in (("ROOT", tmp_path), ("DRAWN", tmp_path), ("FIGURES", FIGURES), ("pages", lambda: [page])):
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(plots, "PLOTS", {"speed": lambda: plot})

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["figures", *arguments])
        return command.main()

    assert run("--check") == 1
    assert page.read_text() == PAGE and not (tmp_path / "speed.svg").exists()
    assert capsys.readouterr().err.splitlines()[:2] == [
        "page.md differs from benchmarks/results",
        "speed.svg differs from benchmarks/results",
    ]
    assert run() == 0
    assert "42<!-- end --> rows" in page.read_text()
    assert run("--check") == 0
    plot.series["turbo"][0] = (4629,)
    assert run("--check") == 1


@pytest.mark.parametrize(
    "plot",
    [
        Plot("lines", "tokens/s", {"turbo": [(1024, 10.0), (2048, 5.0)], "vLLM": [(1024, 9.0)]}),
        Plot("bars", "seconds", {"turbo": [(1.0,), (20.0,)], "full": [(2.0,), (3.0,)]}, ("a", "b"), True),
        Plot("intervals", "points", {"turbo": [(-1.0, -2.0, 0.5), ()]}, ("a", "b")),
    ],
)
def test_a_plot_has_its_figures_and_no_background(plot: Plot, tmp_path: Path) -> None:
    plots.draw(plot, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert json.loads(plot.figures())[0] == plot.kind and plot.figures() in text
    assert "fill: #ffffff" not in text
    assert all(label in text for label in (plot.label, *plot.series, *plot.groups))
