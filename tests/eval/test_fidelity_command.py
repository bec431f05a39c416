"""The fidelity suite from end to end: files, going on, and what is said of wrong flags."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refusal

from shadowkv.eval import __main__ as command
from shadowkv.eval import command as execution
from shadowkv.eval.fidelity import command as fidelity
from shadowkv.eval.prompts import texts
from shadowkv.eval.prompts.texts import Haystack
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.models.loader import LoadedModel


@pytest.fixture
def arguments(tiny: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two prompts; ``tmp_path / "out"`` has the results."""
    monkeypatch.setattr(execution, "load_from_config", lambda config: loaded)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(900)))
    model = ["--model", str(tiny), "--load-format", "dummy", "--text", str(text), "--out", str(tmp_path / "out")]
    what = ["--prompts", "2", "--prompt-tokens", "400", "--new-tokens", "4", "--measure-every", "2"]
    return ["fidelity", *model, *what, "--kv", "full", "turbo", "--budget", "80"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_files_and_going_on(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(arguments) == 0
    out = tmp_path / "out"
    assert (out / "summary.md").read_text() in capsys.readouterr().out
    full, turbo = rows(out / "fidelity.csv")
    assert full["texts"] == "files"
    assert "of files" not in (out / "summary.md").read_text()
    assert (full["kv"], full["prompts"], full["mean_kl"], full["hit_rate_1x"]) == ("full", "2", "0.0", "")
    assert float(turbo["mean_kl"]) > 0
    assert float(full["acceptance_rate"]) == 1 > float(turbo["acceptance_rate"]) > 0
    assert 0 <= float(turbo["hit_rate_1x"]) <= float(turbo["hit_rate_4x"]) <= 1
    assert [row["layer"] for row in rows(out / "layers.csv")] == ["0", "1"] * 2
    config = json.loads((out / "config.json").read_text())
    assert config["policies"]["turbo@80"]["rank"] == 32
    assert (config["settings"]["prompts"], config["runs"][0]["command"][3:]) == (2, arguments)
    for plot in ("kl", "mass_recall", "output_error", "hit_rate"):
        assert (out / f"{plot}.png").stat().st_size > 1000
    asked: list[str] = []
    follow = fidelity.follow
    monkeypatch.setattr(fidelity, "follow", lambda *all: asked.extend(one.label for one in all[1]) or follow(*all))
    assert command.main([*arguments, "--kv", "turbo", "quest"]) == 0
    assert asked == ["quest@80"] * 2
    assert [row["kv"] for row in rows(out / "fidelity.csv")] == ["full", "turbo", "quest"]
    assert command.main([*arguments, "--new-tokens", "5"]) == 2
    assert "new_tokens=4, not 5; use another folder" in capsys.readouterr().err


def test_texts_from_pipes(arguments: list[str], tmp_path: Path, pipe: Callable[[Path], str]) -> None:
    text = tmp_path / "text.txt"
    assert command.main([*arguments, "--prompts", "6", "--text", pipe(text), str(text), pipe(text)]) == 0
    names = [one["prompt"].split(":")[0] for one in json.loads((tmp_path / "out" / "fidelity.json").read_text())]
    assert [names.count(name) for name in dict.fromkeys(names)] == [4, 4, 4], "two prompts of each text, two policies"


def test_essays_and_code_are_summarised_separately(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hay = Haystack("essays", tuple(f"This is sentence {number} of an essay." for number in range(100)))
    monkeypatch.setattr(texts, "haystack", lambda file: hay)
    assert command.main([*arguments, "--text", "essays", "code"]) == 0
    out = tmp_path / "out"
    names = {entry["prompt"]: entry for entry in json.loads((out / "fidelity.json").read_text())}
    assert [name.split(":")[0] for name in names] == ["essays"] * 2 + ["code"] * 2
    table = rows(out / "fidelity.csv")
    assert [(row["kv"], row["texts"], row["prompts"]) for row in table] == [
        *(("full", "essays", "2"), ("turbo", "essays", "2"), ("full", "code", "2"), ("turbo", "code", "2"))
    ]
    mean, error = mean_and_error([one["mean_kl"] for name, one in names.items() if name.startswith("code")])
    assert float(table[3]["mean_kl"]) == pytest.approx(mean, rel=1e-5)
    assert float(table[3]["mean_kl_stderr"]) == pytest.approx(error, rel=1e-2)
    summary = (out / "summary.md").read_text()
    assert summary.index("Prompts of essays of 400 tokens (2)") < summary.index("Prompts of code of 400 tokens (2)")
    assert json.loads((out / "config.json").read_text())["settings"]["source_versions"] == texts.source_versions()
    # Source files of another version are other prompts.
    monkeypatch.setattr(execution, "source_versions", lambda: "Python 2.7")
    assert command.main([*arguments, "--text", "essays", "code"]) == 2
    assert "not 'Python 2.7'; use another folder" in capsys.readouterr().err


def test_logs_and_tables_are_kinds_of_texts(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [*arguments, "--text", "logs", "tables"]
    assert command.main(several) == 0
    out = tmp_path / "out"
    assert [(row["kv"], row["texts"]) for row in rows(out / "fidelity.csv")] == [
        *(("full", "logs"), ("turbo", "logs"), ("full", "tables"), ("turbo", "tables"))
    ]
    hashes = json.loads((out / "config.json").read_text())["settings"]["prompts_sha256"]
    assert set(hashes) == {"logs", "tables"} and hashes["logs"] != hashes["tables"]
    # Another text under the same name is other prompts.
    monkeypatch.setitem(texts.TEXTS_OF_LINES, "logs", lambda seed, characters: "one line of a log\n" * characters)
    capsys.readouterr()
    assert "has answers with prompts_sha256=" in refusal(several, capsys)


def test_an_ablation(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--kv", "full", "quest", "full:keys=low-rank", "--vary", "budget=16,300"]
    assert command.main([*arguments, *vary]) == 0
    error = capsys.readouterr().err
    assert "note: full:keys=low-rank stays as it is: index='none' attends to every token" in error
    found = rows(tmp_path / "out" / "vary_budget.csv")
    named = [(row["kv"], row["budget"]) for row in found]
    assert named == [("full", ""), ("quest", "16"), ("quest", "300"), ("full:keys=low-rank", "")]
    assert float(found[1]["mean_kl"]) > float(found[2]["mean_kl"]) > float(found[0]["mean_kl"]) == 0
    assert (tmp_path / "out" / "vary_budget.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ["--text", "absent.txt"],
            "--text absent.txt: No such file or directory; --text takes text files, essays, code, logs or tables",
        ),
        (["--text", "."], "--text .: Is a directory; --text takes text files, essays"),
        (["--prompts", "3"], "text.txt has 900 tokens, enough for 2 prompts of --prompt-tokens 400, not for 3"),
        (["--new-tokens", "0"], "--new-tokens 0 must be at least 1"),
        (["--measure-every", "0"], "--measure-every 0 must be at least 1"),
        (["--new-tokens", "9000"], "--prompt-tokens and --new-tokens make 9400 tokens"),
        (["--vary", "rank"], "argument --vary: 'rank' is not FIELD=V1,V2,..."),
        (["--vary", "ranks=1"], "'ranks' is not a field"),
        (["--vary", "rank=x"], "rank='x' is not an integer"),
        (["--vary", "rank=8", "--kv", "quest"], "--vary rank does not apply to quest"),
        (["--exact-tails", "--kv", "full"], "--exact-tails has no effect on full"),
        (["--unquantized-reference"], "--unquantized-reference has no meaning here: no weight is quantized"),
        (["--length", "9"], "unrecognized arguments: --length 9"),
    ],
)
def test_bad_input(arguments: list[str], wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal([*arguments, *wrong], capsys)
