"""The command from end to end on a tiny model: files, going on after an interrupt, errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refusal
from stub_server import stub_server

from shadowkv.engine.config import EngineConfig
from shadowkv.eval import __main__ as command
from shadowkv.eval import command as execution
from shadowkv.eval.provenance import write_config
from shadowkv.eval.records.policies import local_policies
from shadowkv.eval.records.predictions import PredictionFile
from shadowkv.eval.running.local import Forks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.models.loader import LoadedModel


@pytest.fixture
def niah(tiny: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run of two samples under three policies; ``tmp_path / "out"`` has its results."""
    monkeypatch.setattr(execution, "load_from_config", lambda config: loaded)
    text = tmp_path / "text.txt"
    text.write_text("One sentence is here. Another one is there! And is this a third? " * 20)
    model = ["--model", str(tiny), "--load-format", "dummy", "--data", str(text), "--out", str(tmp_path / "out")]
    what = ["--tasks", "niah_single", "--length", "1300", "--depths", "0", "100", "--samples", "1"]
    return ["niah", *model, *what, "--kv", "full", "quest", "--budget", "80", "0.25"]


def test_a_run_and_its_files(niah: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(niah) == 0
    out = tmp_path / "out"
    assert (out / "summary.md").read_text() in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [line["policy"] for line in lines] == ["full", "quest@80", "quest@0.25"] * 2
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kv"], float(row["budget"]), row["samples"]) for row in rows] == [
        ("full", 1.0, "2"),
        ("quest", round(80 / 1300, 6), "2"),
        ("quest", 0.25, "2"),
    ]
    config = json.loads((out / "config.json").read_text())
    assert config["policies"]["quest@80"]["budget"] == 80
    assert config["runs"][0]["command"][3:] == niah
    assert (config["settings"]["seed"], config["settings"]["dtype"]) == (0, "float32")
    assert config["settings"]["quantization"] is None


def test_going_on_where_a_run_was_torn(niah: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.main(niah) == 0
    path = tmp_path / "out" / "predictions.jsonl"
    whole = PredictionFile(path).predictions
    path.write_bytes(path.read_bytes()[:-30])
    asked: list[str] = []
    answers = Forks.answers

    def counting(forks: Forks, work):  # type: ignore[no-untyped-def]
        asked.extend(policy.label for _, policies in work for policy in policies)
        return answers(forks, work)

    monkeypatch.setattr(Forks, "answers", counting)
    assert command.main(niah) == 0
    assert asked == ["quest@0.25"]
    again = PredictionFile(path).predictions
    assert [(p.sample, p.policy, p.predictions) for p in again] == [(p.sample, p.policy, p.predictions) for p in whole]
    assert command.main([*niah, "--kv", "full", "turbo"]) == 0
    assert asked == ["quest@0.25", *(["turbo@80", "turbo@0.25"] * 2)]


def test_an_interrupt_leaves_what_is_done(niah: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Forks.answers

    def interrupted(forks: Forks, work):  # type: ignore[no-untyped-def]
        for number, prediction in enumerate(answers(forks, work)):
            if number == 2:
                raise KeyboardInterrupt
            yield prediction

    monkeypatch.setattr(Forks, "answers", interrupted)
    assert command.main(niah) == 130
    assert len(PredictionFile(tmp_path / "out" / "predictions.jsonl").predictions) == 2
    assert (tmp_path / "out" / "summary.csv").read_text().count("\n") == 3


def test_overrides_reach_the_model_and_are_kept(
    niah: list[str],
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[EngineConfig] = []

    def load(config: EngineConfig) -> LoadedModel:
        asked.append(config)
        return loaded

    monkeypatch.setattr(execution, "load_from_config", load)
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert command.main([*niah, "--hf-overrides", json.dumps(yarn)]) == 0
    assert [config.overrides for config in asked] == [yarn]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["settings"]["hf_overrides"] == yarn
    capsys.readouterr()
    assert "has answers with hf_overrides={'rope_scaling'" in refusal(niah, capsys)


def test_other_settings_need_another_folder(niah: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(niah) == 0
    assert command.main([*niah, "--seed", "1"]) == 2
    assert "seed=0, not 1; use another folder" in capsys.readouterr().err


def test_a_folder_from_before_a_policys_fields_changed_goes_on(niah: list[str], tmp_path: Path) -> None:
    assert command.main(niah) == 0
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    for spec in config["policies"].values():
        del spec["skip_layers"]
        spec |= {"rank": None, "key_groups": 1, "prefill_error": 0.05, "sampled": 0.0}  # once fields of every policy
    path.write_text(json.dumps(config))
    assert command.main(niah) == 0


def test_a_folder_from_before_minimum_budgets_goes_on_if_they_are_the_former_ones(tmp_path: Path) -> None:
    for heads in (4, 3):
        folder, shape = tmp_path / str(heads), ModelShape(2, 12, heads, 128)
        policies = local_policies(["full", "quest", "turbo:values=rotated-4bit", "turbo:budget=9"], [], shape)
        write_config(folder, {}, policies, [])
        config = json.loads((folder / "config.json").read_text())
        for spec in config["policies"].values():
            del spec["min_budget"]
        (folder / "config.json").write_text(json.dumps(config))
        if heads == 4:
            write_config(folder, {}, policies, [])
        else:  # narrow keys: 1,280 tokens instead of 640
            with pytest.raises(ValueError, match="answers of another 'turbo:values=rotated-4bit'"):
                write_config(folder, {}, policies, [])


def test_an_ablation_of_scores(niah: list[str], tmp_path: Path) -> None:
    assert command.main([*niah[:-3], "--vary", "chunk=8,16"]) == 0
    rows = (tmp_path / "out" / "vary_chunk.csv").read_text().splitlines()
    assert [row.split(",")[2:4] for row in rows] == [["kv", "chunk"], ["full", ""], ["quest", "8"], ["quest", "16"]]
    assert (tmp_path / "out" / "vary_chunk.png").exists()


def test_a_server(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["niah", "--tasks", "niah_multiturn", "--turns", "2", "--depths", "50", "--length", "600", "--samples"]
    with stub_server(600) as (url, bodies):
        assert command.main([*arguments, "2", "--base-url", url, "--kv", "theirs", "--out", str(out)]) == 0
    assert len(bodies) == 4
    rows = (out / "summary.csv").read_text().splitlines()
    assert rows[1] == "stub,theirs,600,,niah_multiturn,0.0,0.0,2,0,,,,,6.0,0.0,,"


def test_a_haystack_from_a_pipe(niah: list[str], tmp_path: Path, pipe: Callable[[Path], str]) -> None:
    data = pipe(tmp_path / "text.txt")
    assert command.main([*niah, "--data", data]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["settings"]["haystack"] == data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "--length 0 must be at least 1"),
        (["--samples", "0"], "--samples 0 must be at least 1"),
        (["--depths", "101"], "--depths 101.0 is not in [0, 100]"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--kv", "fulll"], "--kv fulll: unknown KV preset 'fulll'; known: full"),
        (["--kv", "quest:budget=1.5"], "budget=1.5 must be a share of the context in (0, 1]"),
        (["--budget", "1.5"], "argument --budget: budget=1.5 must be a share of the context in (0, 1]"),
        (["--budget", "x"], "argument --budget: 'x' is neither"),
        (["--tasks", "niah_none"], "--tasks niah_none is not one of niah_single"),
        (["--data", "absent.txt"], "--data absent.txt: No such file or directory; --data takes a text file"),
        (["--base-url", "http://localhost:1/v1", "--budget", "64"], "--budget has no meaning with --base-url"),
        (["--base-url", "http://localhost:1/v1", "--vary", "rank=8"], "--vary has no meaning with --base-url"),
        (["--base-url", "http://localhost:1/v1", "--kv", "a", "b"], "--kv a b: a server has one policy"),
        (["--length", "100"], "not even the question fits"),
    ],
)
def test_bad_input(niah: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["niah", "--out", "out"] if "--base-url" in arguments else niah
    assert message in refusal([*base, *arguments], capsys)


def test_suites_that_need_data_say_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["longbench", "--model", str(tiny), "--load-format", "dummy", "--out", "out"]
    assert command.main(arguments) == 2
    assert "longbench needs --data DIR" in capsys.readouterr().err
