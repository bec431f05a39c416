"""Sweeps write a row for every cell that they are asked for, once, with figures that fit together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.prefix_cache import reuse
from benchmarks.sweeps import engines, mixed, plots, prefill, ranks
from benchmarks.sweeps.mixed import GapCase, measure_gaps
from benchmarks.sweeps.rows import PREFILL, Rows, read
from benchmarks.sweeps.synthetic import random_blocks
from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.kvcache.parts import prefill as sparse_prefill

TINY = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def model() -> Iterator[Path]:
    with tiny_model() as path:
        yield path


@pytest.fixture
def in_this_process(monkeypatch) -> list[tuple[object, ...]]:
    """What sweeps would have done in processes of their own."""
    calls = []

    def call(function, *args) -> bool:
        calls.append(args)
        function(*args)
        return True

    monkeypatch.setattr(engines, "in_fresh_process", call)
    return calls


def test_every_length_of_every_policy_is_measured_once(model, tmp_path, in_this_process):
    out = tmp_path / "new" / "summary.csv"
    flags = ["--model", str(model), *TINY, "--out", str(out), "--repeats", "2"]
    assert prefill.main([*flags, "--kv", "full", "--contexts", "128,64"]) == 0
    assert prefill.main([*flags, "--kv", "full", "turbo", "--contexts", "64,200"]) == 0
    rows = read(out)
    assert [(row["kv"], row["context"]) for row in rows] == [
        ("full", "64"), ("full", "128"), ("full", "200"), ("turbo", "64"), ("turbo", "200")
    ]  # fmt: skip
    for row in rows:
        assert float(row["ttft_s"]) > 0 and float(row["first_ttft_s"]) > 0
        assert (row["engine"], row["prefill"], row["quantization"]) == ("shadowkv", "auto", "none")
        assert (row["attention_density"], row["device"]) == ("", "cpu")
        assert '"keys":' in row["spec"]
    assert out.with_suffix(".png").stat().st_size > 0
    assert len(in_this_process) == 3
    assert prefill.main([*flags, "--kv", "full", "turbo", "--contexts", "64,200"]) == 0
    assert len(in_this_process) == 3 and read(out) == rows


@pytest.mark.slow
def test_ranks_are_compared_with_one_gpu_and_with_full(model, tmp_path, in_this_process):
    out = tmp_path / "ranks.csv"
    flags = ["--model", str(model), *TINY, "--prefill", "dense", "--context", "640", "--batch", "2", "--out", str(out)]
    few = ["--steps", "2", "--windows", "1", "--prompts", "1"]
    assert ranks.main([*flags, *few, "--kv", "full", "turbo", "--gpus", "1", "2"]) == 0
    rows = read(out)
    decode = {(row["gpus"], row["kv"]): row for row in rows if row["case"].endswith("batch of 2")}
    prompts = {(row["gpus"], row["kv"]): row for row in rows if row["case"].endswith("prompt")}
    assert list(decode) == list(prompts) == [("1", "full"), ("2", "full"), ("1", "turbo"), ("2", "turbo")]
    assert len(rows) == 8 and all(row["batch"] == "2" for row in decode.values())
    for table in (decode, prompts):
        rates = {key: float(row["tokens_per_s"]) for key, row in table.items()}
        assert table["1", "full"]["ratio"] == ""
        for one, base in (
            (("2", "full"), ("1", "full")),
            (("2", "turbo"), ("1", "turbo")),
            (("1", "turbo"), ("1", "full")),
        ):
            assert float(table[one]["ratio"]) == pytest.approx(rates[one] / rates[base], rel=2e-3)
    assert ranks.main([*flags, *few, "--kv", "full", "--gpus", "2"]) == 0
    assert read(out) == rows and len(in_this_process) == 4


@pytest.mark.slow
def test_an_engine_has_a_process_of_its_own(model, tmp_path, monkeypatch):
    out = tmp_path / "summary.csv"
    monkeypatch.setattr(sys, "path", [*sys.path])  # what a spawned process is given
    flags = ["--model", str(model), *TINY, "--out", str(out), "--repeats", "1", "--kv", "full"]
    assert prefill.main([*flags, "--contexts", "64"]) == 0
    assert len(read(out)) == 1
    assert prefill.main([*flags, "--contexts", "64,1000000000"]) == 1  # does not fit
    assert len(read(out)) == 1


def test_short_prompts_are_compared_with_full(model, tmp_path):
    out = tmp_path / "short.csv"
    flags = ["--model", str(model), *TINY, "--short", "--contexts", "64,100", "--repeats", "3", "--out", str(out)]
    assert prefill.main(flags) == 0
    rows = read(out)
    assert [(row["kv"], row["context"]) for row in rows] == [("turbo", "64"), ("turbo", "100")]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["ttft_s"]) / float(row["full_ttft_s"]), rel=0.01)


def test_a_case_of_many_requests(model, tmp_path, in_this_process):
    out = tmp_path / "mixed.csv"
    flags = ["--model", str(model), *TINY, "--kv", "full", "--out", str(out)]
    for _ in range(2):
        assert mixed.main([*flags, "--cases", "6x100+5", "3x40+1", "--max-num-seqs", "2"]) == 0
    assert len(in_this_process) == 2
    many, one = read(out)
    assert (many["requests"], many["input"], many["output"]) == ("6", "100", "5")
    wall, rate = float(many["wall_s"]), float(many["output_tokens_per_s"])
    assert rate * wall == pytest.approx(30, rel=0.01)
    assert 0 < float(many["ttft_mean_s"]) < wall and 0 < float(many["tpot_ms"]) / 1e3 * 4 < wall
    assert one["tpot_ms"] == ""
    with pytest.raises(SystemExit):
        mixed.main([*flags, "--cases", "6x0+5"])


def test_gaps_and_waits_beside_a_long_prompt(model, monkeypatch, capsys):
    case = GapCase(3, 2000, 64, 3000, prompt=100, answer=600, delay=0.0)
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", max_num_seqs=5, max_model_len=4096)
    engine = Engine(config)
    drawn = []

    def noted_prompt(engine, tokens, draw, random_prompt=engines.random_prompt):
        drawn.append((tokens, engine.num_running))
        return random_prompt(engine, tokens, draw)

    monkeypatch.setattr(engines, "random_prompt", noted_prompt)
    figures = measure_gaps(engine, case)
    assert (2000, 0) in drawn, "while requests decode, the time would be in the first gap"
    shown = [float(gap) for gap in capsys.readouterr().out.partition("ms:")[2].split()]
    assert 0 < figures["gap_p50_ms"] <= figures["gap_p99_ms"] <= max(shown) + 0.05
    assert figures["probe_ttft_s"] > 0
    assert not engine.has_work
    with pytest.raises(RuntimeError, match="left no room"):
        measure_gaps(engine, case._replace(answer=33))


def test_rows_of_other_columns_are_not_appended_to(tmp_path):
    out = tmp_path / "x.csv"
    out.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns a,b"):
        Rows(out, PREFILL)


def test_a_plot_has_a_line_for_every_engine(tmp_path, monkeypatch):
    rows = Rows(tmp_path / "summary.csv", PREFILL)
    row = {"engine": "shadowkv", "kv": "turbo", "prefill": "dense", "quantization": "none", "ttft_s": 1.0}
    for engine in ("shadowkv", "vllm 0.26.0"):
        for context in (61440, 124928):
            rows.add(row | {"engine": engine, "context": context})
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw)))
    assert plots.plot_prefill(rows.path).stat().st_size > 0
    names = [line.get_label() for line in drawn[0].axes[0].get_lines()]
    assert names == ["shadowkv turbo, dense", "vllm 0.26.0 turbo, dense"]
    assert drawn[0].axes[0].get_xscale() == drawn[0].axes[0].get_yscale() == "log"


def test_sparse_prefills_are_given_their_blocks(model, tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr(sparse_prefill, "SPARSE_FROM", 1000)
    monkeypatch.setattr(sparse_prefill, "MIN_QUERIES", 100)
    out = tmp_path / "summary.csv"
    flags = ["--model", str(model), *TINY, "--out", str(out), "--repeats", "1", "--kv", "full", "--contexts", "64,1900"]
    replay = ["--replay", "1900=0.6", "0.8"]
    assert prefill.main([*flags, "--prefill", "dense", "sparse", *replay]) == 0
    rows = read(out)
    assert [(row["prefill"], row["context"], row["replayed_density"]) for row in rows] == [
        ("dense", "64", ""), ("dense", "1900", ""),
        ("sparse", "64", ""), ("sparse", "1900", "0.6"), ("sparse", "64", "0.8"), ("sparse", "1900", "0.8"),
    ]  # fmt: skip
    densities = [row["attention_density"] for row in rows]
    assert densities[:3] + densities[4:5] == [""] * 4
    assert float(densities[3]) < float(densities[5]) < 1


def test_blocks_that_are_replayed():
    like = torch.zeros(2, 4, 40, dtype=torch.int32)
    indices, counts, weights = random_blocks(like, 0.5, seed=0)
    assert indices.shape == weights.shape == (2, 4, 20), "no longer than the longest list"
    for tile in range(4):
        end = 37 + tile
        assert counts[:, tile].tolist() == [round(0.5 * end)] * 2
        for head in range(2):
            listed = indices[head, tile, : counts[head, tile]].tolist()
            assert listed == sorted(set(listed)) and listed[:2] == [0, 1] and listed[-5:] == [*range(end - 5, end)]
            stands_for = weights[head, tile, : counts[head, tile]].tolist()
            assert stands_for == [1.0] * 2 + [2.0] * (len(listed) - 7) + [1.0] * 5
    assert random_blocks(like, 0.01, seed=0)[1].tolist() == [[7] * 4] * 2


def test_reuse_is_measured_in_every_tier(model, tmp_path, in_this_process):
    out = tmp_path / "reuse.csv"
    sizes = ["--document", "256", "--restored", "256", "--own", "100", "--output", "3", "--requests", "3"]
    trace = ["--chats", "3", "--turns", "2", "--documents", "2", "--shortest", "128", "--at-once", "2"]
    flags = ["--model", str(model), *TINY, "--kv", "full", *sizes, *trace, "--kv-offload-gib", "0.05"]
    assert reuse.main([*flags, "--reuse", "on", "off", "--disk", str(tmp_path / "disk"), "--out", str(out)]) == 0
    rows = {(row["case"], row["reuse"]): row for row in read(out)}
    compared = [(case, reuse) for case in ("shared", "one-by-one", "trace") for reuse in ("on", "off")]
    copies = [("copies", "off"), ("copies", "on")]
    assert list(rows) == [*compared[:4], ("restore", "on"), ("disk", "on"), *compared[4:], *copies]
    # Of three prompts of 356 tokens two find 256; of one of 256 tokens 192 can be found.
    for name, tier, rate in (
        (("shared", "on"), "device", 2 * 256 / (3 * 356)),
        (("shared", "off"), "device", 0),
        (("one-by-one", "on"), "host", 256 / 356),
        (("one-by-one", "off"), "host", 0),
        (("restore", "on"), "host", 0.75),
        (("disk", "on"), "disk", 0.75),
    ):
        assert float(rows[name][f"hit_rate_{tier}"]) == pytest.approx(rate, rel=1e-3), name
    assert float(rows["trace", "on"]["hit_rate_device"]) > 0
    assert all(float(rows[name]["output_tokens_per_s"]) > 0 for name in copies)
    assert not list((tmp_path / "disk").iterdir())
