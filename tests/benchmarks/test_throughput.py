"""The sweep fills an engine with as many sequences as it is told, and means as many as planner and engine do."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.serving.speculation import Always
from benchmarks.sweeps import throughput, weights
from benchmarks.sweeps.synthetic import begin
from benchmarks.sweeps.throughput import fill, fitting, measure, new_tokens, random_prompts, scores
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.speculation.gate import Account
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.engine.startup.sizing import size_cache
from shadowkv.eval.records.predictions import Sample
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.plan.planner import Machine, Planner
from shadowkv.wording import GIB


@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("room", [1, 2])
def test_a_batch_is_begun_as_a_whole_or_refused(room, synthetic):
    with tiny_model() as path:
        engine = Engine(EngineConfig(model=str(path), max_num_seqs=4, max_model_len=1024, max_cached_seqs=0, **ENGINE))
    for _ in range(4 - room):
        engine.cache.allocate(1024, 1024)
    if room < 2:
        with pytest.raises(MemoryError, match="only 1 of 2 sequences fit"):
            fill(engine, random_prompts(engine, 2, 640), 20, synthetic)
    else:
        assert fill(engine, random_prompts(engine, 2, 640), 20, synthetic) > 0
        assert engine.num_running == 2
        assert len(engine.step()) == 2


def test_a_batch_takes_the_place_of_prompts_that_have_ended():
    with tiny_model() as path:
        engine = Engine(EngineConfig(model=str(path), max_num_seqs=2, max_model_len=1024, max_cached_seqs=0, **ENGINE))
    engine.add_request("ended", [*range(1, 101)] * 6, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    begin(engine, [[*range(1, 101)] * 5] * 2, 20, synthetic=True)
    assert len(engine.step()) == 2


@pytest.mark.parametrize("warm", [0, 2])
def test_prompts_before_the_timed_one_leave_nothing(warm, monkeypatch):
    with tiny_model() as path:
        engine = Engine(EngineConfig(model=str(path), max_num_seqs=2, max_model_len=1024, max_cached_seqs=0, **ENGINE))
    computed, first_token = [], throughput.first_token
    monkeypatch.setattr(throughput, "first_token", lambda *all: computed.append(all[1]) or first_token(*all))
    fill(engine, random_prompts(engine, 2, 640), 20, True, warm)
    assert computed == ["before"] * warm + ["0"] and engine.num_running == 2


SYNTHETIC = {
    "method": "suffix",
    "num_speculative_tokens": 1,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5],
}
HYBRID = {
    "eos_token_id": 1, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Sizes of a small Qwen3.5."""


@pytest.mark.parametrize(
    ("method", "kv", "share", "accepted"),
    [
        ("suffix", "turbo:budget=64", 1.0, 2),  # the sequences share 4 rows for drafts
        ("mtp", "full", 0.8, 0.8 + 0.64 + 0.512),
        ("", "full-speculative:dense_below=0", 1.0, 6),
        ("", "full", 1.0, None),
    ],
)
def test_cells_have_the_tokens_that_were_accepted_per_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, kv: str, share: float, accepted: float | None
) -> None:
    """The sweep's engines draft whatever it costs. A policy without drafts is measured beside them."""
    monkeypatch.setattr(Account, "length", Always.length)
    monkeypatch.setattr(throughput, "profile", lambda engine: {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    flags = ["--load-format", "dummy", "--context", "700", "--kv", kv, "--batch", "2", "--acceptance", str(share)]
    flags += ["--synthetic-prefill", "--steps", "20", "--out", str(tmp_path)]
    if method:
        flags += ["--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3})]
    with tiny_model(max_position_embeddings=8192) as path:
        model = ["--model", str(path)]
        if method == "mtp":
            model = ["--model", "qwen3.5-9b", "--hf-overrides", json.dumps(HYBRID)]
        args = throughput.command().parse_args([*model, *flags])
        cell = measure(args, load_from_config(throughput.config_of(args, kv, 2, 700)), kv, 700, "2")
    if accepted is None:
        found = [cell[name] for name in ("speculative_config", "accepted_per_round", "tokens_per_step")]
        assert found == [None, None, 1]
        return
    rates = cell["speculative_config"]["synthetic_acceptance_rates"]
    assert rates == [share**place for place in range(1, len(rates) + 1)]
    assert cell["accepted_per_round"] == pytest.approx(accepted, abs=0.5)
    assert cell["tokens_per_step"] == pytest.approx(1 + cell["drafts_per_step"] * cell["accepted_per_round"], abs=0.3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--acceptance", "1.5", "--kv", "full-speculative"], "--acceptance 1.5 must be a share from 0 to 1"),
        (["--acceptance", "0.5", "--kv", "full"], "--acceptance needs a policy that drafts"),
        (
            ["--acceptance", "0.5", "--speculative-config", json.dumps(SYNTHETIC)],
            "--acceptance sets rejection_sample_method and synthetic_acceptance_rates: leave it out",
        ),
    ],
)
def test_acceptance_is_refused_where_it_has_no_meaning(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        throughput.main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_cells_of_weights():
    assert [weights.batch_and_context(text) for text in ("1x1024", "autox61440")] == [(1, 1024), (None, 61440)]
    for text in ("0x1024", "x1024", "auto", "1x"):
        with pytest.raises(ArgumentTypeError, match="is not sequences x tokens, as 1x1024, or autox61440"):
            weights.batch_and_context(text)


def test_parts_of_a_mix():
    mix = throughput.mix_of("1x1000000,40x61440")
    assert mix == ((1, 1_000_000), (40, 61_440)) and throughput.mix_name(mix) == "1x1000000,40x61440"
    for text in ("1x1024", "1x1024,", "0x1024,1x1024", "1x1024,2x64"):
        with pytest.raises(ArgumentTypeError, match=text):
            throughput.mix_of(text)


TOTAL = 20 * GIB


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo", "turbo-host", "quest"])
@pytest.mark.parametrize("host_gib", [2.0, 100.0])
def test_planner_sweep_and_engine_name_the_same_largest_batch(monkeypatch, kv, host_gib):
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    args = Namespace(
        model="", load_format="dummy", quantization=None, windows=3, steps=20, host_memory_gib=host_gib,
        enforce_eager=True, speculative_config=None, acceptance=None, hf_overrides=None,
    )  # fmt: skip
    with tiny_model(**shape, max_position_embeddings=65536) as path:
        config = EngineConfig(model=str(path), load_format="dummy", device="cpu", dtype="bfloat16")
        loaded = load_from_config(config)
        args.model = str(path)
        context = 30_000
        capacity = context + new_tokens(args, kv)
        machine = Machine(TOTAL / GIB, throughput.UTILIZATION, host_gib, 1.0, 1.0)
        planner = Planner(loaded.shard, torch.bfloat16, capacity, machine, 0.6, 2.0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL - planner.weight_bytes, TOTAL))
        monkeypatch.setattr("shadowkv.engine.startup.sizing.free_host_bytes", lambda: 200 * GIB)
        count = fitting(args, loaded, kv, context)
        assert count == planner.plan(EngineConfig(kv=kv)).largest_batch.both > 1

        def sequences(batch: int) -> int:
            """Those that an engine for ``batch`` of them has blocks for."""
            sweep = throughput.config_of(args, kv, batch, context)
            layout = Layout(preset(kv), loaded.config.shape, torch.bfloat16, capacity)
            have, _ = size_cache(sweep, layout, batch, torch.device("cuda"), loaded.config)
            need = layout.demand(context, capacity)
            return min(have[tier] // need[tier] for tier in ("device", "host") if need[tier])

        assert sequences(count) >= count and sequences(count + 1) <= count


def test_answers_of_a_timed_batch_are_scored_up_to_their_end():
    class Words:
        eos_token_ids = frozenset({0})

        def decode(self, tokens):
            return " ".join(f"w{token}" for token in tokens)

    def running(number, tokens):
        return Namespace(request=Namespace(request_id=str(number), output_token_ids=tokens))

    def sample(limit):
        return Sample("vt", "1", ("",), (("w3", "w4"),), limit, "string_match_all", 100)

    answers = [[3, 4, 9], [3, 0, 4], [9, 3, 4]]
    engine = Namespace(scheduler=Namespace(running=[running(*one) for one in enumerate(answers)]))
    loaded = Namespace(tokenizer=Words(), config=Namespace(eos_token_ids=[8]))
    assert scores(engine, loaded, [sample(3), sample(3), sample(2)]) == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("flags", [["--load-format", "dummy"], ["--synthetic-prefill"], ["--mix", "1x1000,2x200"]])
def test_answers_of_random_weights_or_prompts_are_not_scored(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        throughput.main(["--ruler", "1", "--out", str(tmp_path), *flags])
    assert "--ruler scores answers of a trained model" in capsys.readouterr().err


def test_a_sweep_of_weights_has_all_flags_of_a_cell(tmp_path):
    args = weights.arguments(["--load-format", "dummy", "--cells", "2x1024", "--out", str(tmp_path / "weights.csv")])
    config = throughput.config_of(args, "turbo", 2, 1024)
    assert (config.load_format, config.max_num_seqs) == ("dummy", 2)
    assert (args.synthetic_prefill, args.ruler, args.cells) == (True, None, [(2, 1024)])
