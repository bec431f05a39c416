"""Rules by which steps select tokens: chances have the sum that is wanted, and the present rule is a step's own."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.ops.selection.sketch_selection import selected_by
from benchmarks.selection import policies as compared
from benchmarks.selection import touched as touched_tokens
from benchmarks.selection.__main__ import Follower, main, rows_of, summarise
from benchmarks.selection.rules import FORMER, RULES, TAKEN, ByRule, Rule, chances
from benchmarks.selection.touched import STEPS, Touched, follow
from benchmarks.sweeps.rows import read
from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.kvcache import parts
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.kvcache.presets import preset


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_chances_are_in_proportion_to_weights_up_to_one(sharpness: float) -> None:
    log_weight = sharpness * torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))
    found = chances(log_weight, 400)
    assert found.sum(-1).tolist() == pytest.approx([400, 400], rel=2e-2)
    unsure = found < 1
    level = (found.log2() - log_weight).masked_fill(~unsure, math.nan)
    assert (level - level.nanmean(-1, keepdim=True)).nan_to_num(0).abs().max() < 1e-3
    assert all(log_weight[head, ~unsure[head]].min() >= log_weight[head, unsure[head]].max() for head in range(2))


def test_rows_follow_full_attention(tmp_path, capsys, monkeypatch) -> None:
    """The present rule selects what a step of that budget selects, of a context of which all runs are examined."""
    select, rule = ByRule.select, RULES[TAKEN]

    def checked(self, store, layer, q, batch):
        selected = select(self, store, layer, q, batch)
        counts = torch.full_like(batch.budget, rule.tokens // 2)
        step = replace(batch, budget=counts, sampling=replace(batch.sampling, counts=counts))
        own = Sketch.select(self, store, layer, q, step)
        for found, wanted in zip(selected.chunks[TAKEN], own.chunks[TAKEN], strict=True):
            common = torch.isin(wanted[wanted >= 0], found).float().mean()
            assert common > 0.95  # which ones are sampled depends on the last bits of sums
        return selected

    monkeypatch.setattr(ByRule, "select", checked)
    monkeypatch.setitem(parts.REGISTERED["index"], "by-rule", ByRule)  # for this test alone
    with tiny_model() as path:
        loaded = load_from_config(
            EngineConfig(model=str(path), max_model_len=1640, load_format="dummy", dtype="float32")
        )
    prompt = torch.randint(5, 128, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = list(Follower(loaded, 1560).follow(prompt, 4, set(), math.inf))
    assert [int(row["tokens"]) for row in rows] == [rule.tokens for rule in RULES]
    assert all(0.85 < float(row["tokens_selected"]) / int(row["tokens"]) < 1.01 for row in rows)
    errors = [float(row["output_error"]) for row in rows]
    fewer, more = (errors[RULES.index(Rule("logits", "halves", 1.5, tokens))] for tokens in (480, 960))
    assert 0 < more < fewer < 1
    file = tmp_path / "rows.csv"
    about = {"seed": "71", "length": "1500", "text": "random", "prompt": "0"}
    lines = [",".join((about | row).values()) for row in rows]
    file.write_text("\n".join([",".join(about | rows[0]), *lines]) + "\n")
    summarise(rows_of(file))
    printed = capsys.readouterr().out
    assert printed.count("| unit | halves | 1 | 960 | ") == 2
    assert printed.count(f" | {100 * errors[FORMER]:.2f} | 1.00 (1.00 to 1.00) |") == 2


def test_touched_tokens_are_those_that_steps_have_selected() -> None:
    touched = Touched()
    batch = SimpleNamespace(num_chunks=torch.tensor([128]))
    for tokens in ([[[0, 1, -1], [127, -1, -1]]], [[[1, 2, 130], [126, 127, -1]]]):
        selection = SimpleNamespace(chunks=torch.tensor(tokens))
        assert touched(0, None, batch, selection) is selection
        batch.num_chunks += 64  # a page was compressed
    assert touched.shares() == {"values": 5 / 256, "value_pages": 0.5, "latents": 5 / 128, "latent_pages": 1.0}
    with tiny_model() as path:
        loaded = load_from_config(EngineConfig(model=str(path), max_model_len=2048, load_format="dummy"))
    prompt = torch.randint(5, 128, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    shares = follow(loaded, preset("turbo", dense_below=0), prompt, 1700)
    assert [*shares] == [*STEPS]
    for name in ("values", "latents"):
        found = [shares[steps][name] for steps in STEPS]
        assert 0 < found[0] < found[-1] <= 1 and found == sorted(found)


@pytest.mark.parametrize(
    ("kv", "wrong"),
    [
        ("turbo:chunk=8", "--kv turbo:chunk=8 selects chunks of 8 tokens; use a policy with an index and chunk=1"),
        ("full:chunk=1", "--kv full:chunk=1 selects no tokens; use a policy with an index and chunk=1"),
        ("turbo:chunk=3", "--kv turbo:chunk=3: KV policy 'turbo:chunk=3' cannot be read"),
    ],
)
def test_touched_tokens_need_a_policy_that_selects_tokens(kv: str, wrong: str, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        touched_tokens.main(["--model", "none", "--out", str(tmp_path / "rows.csv"), "--kv", kv])
    assert wrong in capsys.readouterr().err


def test_policies_are_compared_along_full_attentions_tokens(tmp_path, capsys) -> None:
    file = tmp_path / "rows.csv"
    flags = ["--out", str(file), "--text", "logs", "fwe", "--prompts", "1", "--seed", "5"]
    flags += ["--length", "1500", "--new-tokens", "6", "--load-format", "dummy", "--device", "cpu"]
    more, fewer = "turbo:budget=800,sampled=0.0", "turbo:budget=8,sampled=0.0"
    with tiny_model() as path:
        flags += ["--model", str(path)]
        assert compared.main([*flags, "--kv", more, fewer]) == 0
        rows = read(file)
        assert compared.main([*flags, "--kv", "full", fewer]) == 0
    assert [row["kv"] for row in rows] == 2 * [more, fewer]
    assert read(file)[:4] == rows and [row["kv"] for row in read(file)[4:]] == ["full", "full"]
    for text in ("logs", "fwe"):
        figures = {row["kv"]: row for row in read(file) if row["text"] == text}
        assert 0 < float(figures[more]["kl"]) < float(figures[fewer]["kl"])
        assert float(figures["full"]["kl"]) == float(figures["full"]["disagreement"]) == 0
        assert {row["steps"] for row in figures.values()} == {"6"}
    capsys.readouterr()
    assert compared.main(["--out", str(file), "--summary"]) == 0
    printed = capsys.readouterr().out
    for name, text in (("texts", "logs"), ("RULER", "fwe")):
        assert f"{name}, 1500 tokens, prompts: 1\n" in printed
        kl = {row["kv"]: float(row["kl"]) for row in rows if row["text"] == text}
        ratio = f"{kl[fewer] / kl[more]:.2f}"
        assert f"| `{fewer}` | {1e3 * kl[fewer]:.2f} | {ratio} ({ratio} to {ratio}) | " in printed


def test_files_of_earlier_versions_are_refused(tmp_path, capsys) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("length,prompt,kl\n8192,essays:0,0.01\n")
    for more in ([], ["--summary"]):
        with pytest.raises(SystemExit):
            main(["--model", "none", "--out", str(file), *more])
        assert "has no column output_error" in capsys.readouterr().err


def test_timed_selections_are_those_of_the_policies() -> None:
    for tokens in (61440, 1048576):
        (chunk, budget, sampled), (_, same, none) = (selected_by(kv, tokens) for kv in ("turbo", "turbo:sampled=0.0"))
        assert budget == same == preset("turbo").budget_tokens(np.array(tokens)) and chunk == 1
        assert sampled == budget // 2 and none == 0
    chunk, budget, sampled = selected_by("turbo-host:budget=800", 61440)
    assert (chunk, budget, sampled) == (8, 100, 0)
