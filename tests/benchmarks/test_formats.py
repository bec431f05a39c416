"""The table of formats: stages measure what is missing, once; what they measured is joined, and nothing made up."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.sweeps import formats, throughput
from benchmarks.sweeps.formats import distortions, measure_throughput, open_rows, paired_score
from benchmarks.sweeps.formats_summary import summarise
from benchmarks.sweeps.rows import read
from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.records.predictions import Prediction
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.presets import preset

COUNTS = ["--prompts", "2", "--prompt-tokens", "500", "--new-tokens", "4"]


@pytest.fixture
def model() -> Iterator[Path]:
    with tiny_model() as path:
        yield path


def flags(model: Path, out: Path) -> list[str]:
    (out / "text.txt").write_text("All work and no play makes a dull text. " * 100, encoding="utf-8")
    tiny = ["--model", str(model), "--speed-model", str(model), "--load-format", "dummy", "--device", "cpu", *COUNTS]
    return [*tiny, "--text", str(out / "text.txt"), "--out", str(out), "--docs", str(out / "formats.md")]


def test_stages_go_on_where_they_ended(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shadowkv.eval.fidelity.command.plot_fidelity", lambda *_: None)  # they take seconds
    asked, measure = [], formats.distortions

    def counted(loaded, specs, prompts):
        asked.append([spec.keys for spec in specs])
        return measure(loaded, specs, prompts)

    monkeypatch.setattr(formats, "distortions", counted)
    stages = ["--stages", "bytes", "distortion", "fidelity"]
    assert formats.main([*flags(model, tmp_path), *stages, "--kv", "full", "turboquant-4"]) == 0
    assert formats.main([*flags(model, tmp_path), *stages, "table", "--kv", "full", "polar-int4"]) == 0
    assert asked == [["dense", "lloyd-4bit"], ["polar-int4"]]
    kept = {name: (tmp_path / f"{name}.csv").read_text() for name in ("bytes", "distortion", "fidelity")}
    assert formats.main([*flags(model, tmp_path), *stages, "--kv", "polar-int4", "full"]) == 0
    assert {name: (tmp_path / f"{name}.csv").read_text() for name in kept} == kept and len(asked) == 2
    lines = {line["kv"]: line for line in read(tmp_path / "summary.csv")}
    assert list(lines) == ["full", "turboquant-4", "polar-int4"]
    assert (lines["full"]["d_keys"], lines["full"]["kl"], lines["full"]["top1"]) == ("0", "0", "1")
    assert float(lines["polar-int4"]["kl"]) > 0 and 0.005 < float(lines["polar-int4"]["d_values"]) < 0.015
    assert int(lines["full"]["bytes_per_token"]) > 2.5 * int(lines["polar-int4"]["bytes_per_token"])
    assert {lines["full"][name] for name in ("ruler_16k", "batch_60k", "tokens_per_s_122k")} == {""}
    for row in read(tmp_path / "fidelity.csv"):
        assert row["device"] == "cpu" and row["command"] and '"keys":' in row["spec"]
    assert "kl_by_bytes.png" in (tmp_path / "formats.md").read_text(encoding="utf-8")
    assert "score_by_speed.png" not in (tmp_path / "formats.md").read_text(encoding="utf-8")


def test_distortion_is_that_of_what_is_stored(model):
    loaded = load_from_config(EngineConfig(model=str(model), load_format="dummy", device="cpu", dtype="float32"))
    text = torch.randint(1, 128, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    names = ["full", "full:values=lloyd-4bit", "full:values=lloyd-4bit,place=host", "full:keys=lloyd-4bit", "quest"]
    full, values, on_host, keys, quest = distortions(
        loaded, [resolve(preset(name), loaded.config.shape) for name in names], [text]
    )
    assert full == quest == (0.0, 0.0)
    assert values == on_host and values[0] == keys[1] == 0
    assert 0.005 < values[1] < 0.015 and 0.005 < keys[0] < 0.015


def answers(policy: str, scores: list[float]) -> list[Prediction]:
    return [
        Prediction("vt", str(number), 16384, policy, policy, None, [""], score, 0.0)
        for number, score in enumerate(scores)
    ]


def test_scores_are_paired_with_full(model, tmp_path, monkeypatch):
    asked = []

    def evaluated(arguments):
        kv = arguments[arguments.index("--kv") + 1 :]
        asked.append((arguments[arguments.index("--length") + 1], arguments[arguments.index("--samples") + 1], kv))
        found = [*answers("full", [1, 1, 0, 1]), *answers("turbo", [1, 0, 0])]
        (tmp_path / "ruler").mkdir(exist_ok=True)
        lines = [json.dumps(vars(one)) + "\n" for one in found]
        (tmp_path / "ruler" / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
        return 0

    monkeypatch.setattr(formats, "evaluate", evaluated)
    command = [*flags(model, tmp_path), "--stages", "ruler", "table", "--samples", "3", "full=4", "--tasks", "vt"]
    command += ["--lengths", "16384"]
    assert formats.main([*command, "--kv", "full", "turbo"]) == 0
    assert asked == [("16384", "3", ["full", "turbo"]), ("16384", "4", ["full"])]
    assert formats.main([*command, "--kv", "turbo"]) == 0
    assert len(asked) == 2
    row = read(tmp_path / "ruler.csv")[0]
    assert [row[name] for name in ("kv", "score", "difference", "tasks")] == ["turbo", "33.33", "-33.33", "vt"]
    assert "33.3 (-33.3 ± 33.3)" in (tmp_path / "formats.md").read_text(encoding="utf-8")
    one = [*answers("full", [1]), *answers("turbo", [0.5])]
    assert paired_score(one, "turbo", 16384, ["vt"]) == {
        "score": 50, "stderr": None, "difference": -50, "difference_stderr": None
    }  # fmt: skip


def test_a_policy_that_fails_leaves_the_others(model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(formats, "_device", lambda name: "a GPU")
    swept = []

    def sweep(arguments):
        context = int(arguments[arguments.index("--context") + 1])
        for kv in arguments[arguments.index("--kv") + 1 :]:
            swept.append((kv, context))
            if kv == "fp8":
                raise RuntimeError("no kernel")
            path = throughput.cell_path(tmp_path / "throughput", str(model), kv, context)
            path.parent.mkdir(exist_ok=True)
            status = {"batch": 2, "step_ms": 20.0, "decode_tokens_per_s": 100.0, "status": "ok"}
            path.write_text(json.dumps(status), encoding="utf-8")

    monkeypatch.setattr(throughput, "main", sweep)
    args = formats.parser().parse_args([*flags(model, tmp_path), "--kv", "full", "fp8", "quest", "--long-kv", "full"])
    with pytest.raises(RuntimeError, match="not measured: fp8 at 61440: no kernel"):
        measure_throughput(args, open_rows(tmp_path, "throughput"))
    assert swept == [("full", 61440), ("fp8", 61440), ("quest", 61440), ("full", 124928)]
    summarise(tmp_path, tmp_path / "formats.md")
    lines = {line["kv"]: line for line in read(tmp_path / "summary.csv")}
    assert lines["full"]["tokens_per_s_60k"] == lines["full"]["tokens_per_s_122k"] == "100"
    assert (lines["quest"]["batch_60k"], lines["quest"]["batch_122k"]) == ("2", "")
    (commit,) = {row["commit"][:7] for row in read(tmp_path / "throughput.csv")}
    table = (tmp_path / "formats.md").read_text(encoding="utf-8").splitlines()
    (quest,) = (row for row in table if row.startswith("| `quest`"))
    assert quest.endswith(f"| 2 | 20.0 | 100 | {commit} |  |  |  |  |")
    with pytest.raises(RuntimeError):  # and only that one is tried again
        measure_throughput(args, open_rows(tmp_path, "throughput"))
    assert swept[4:] == [("fp8", 61440)]


def test_the_table_stands_between_its_lines(tmp_path):
    docs = tmp_path / "formats.md"
    docs.write_text("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n", encoding="utf-8")
    rows = open_rows(tmp_path, "bytes")
    about = {"model": "m", "commit": "c" * 40, "device": "none", "bytes_per_token": 10}
    rows.add(about | {"kv": "full", "context": 1})
    rows.add(about | {"kv": "full", "context": 2, "bytes_per_token": 20})  # the last one counts
    summarise(tmp_path, docs)
    with (tmp_path / "summary.csv").open(newline="", encoding="utf-8") as file:
        assert [line["bytes_per_token"] for line in csv.DictReader(file)] == ["20"]
    text = docs.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    docs.write_text("no place\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        summarise(tmp_path, docs)


@pytest.mark.parametrize("text", ["0", "many", "turbo=", "nothing=5"])
def test_samples_that_are_none_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        formats.main(["--out", "unused", "--samples", text])
    assert "--samples" in capsys.readouterr().err
