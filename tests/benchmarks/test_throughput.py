"""The sweep fills an engine with as many sequences as it is told, and means as many as planner and engine do."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace

import pytest
import torch

from benchmarks.serving.speculation import Always
from benchmarks.sweeps import throughput, weights
from benchmarks.sweeps.engines import window
from benchmarks.sweeps.synthetic import begin
from benchmarks.sweeps.throughput import fill, fitting, new_tokens, random_prompts, replay_acceptance, scores
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling import drafted_rows
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


@pytest.mark.parametrize("share, tokens", [(0.0, 1), (1.0, 5)])
def test_drafted_tokens_are_accepted_as_often_as_asked(share, tokens, monkeypatch):
    monkeypatch.setattr(drafted_rows._Drafted, "take", drafted_rows._Drafted.take)  # is restored
    replay_acceptance(share)
    with tiny_model() as path:
        config = {"kv": "full", "kv_dense_below": 0, "max_num_seqs": 2, "max_model_len": 1024, "max_cached_seqs": 0}
        drafts = {"method": "sparse", "num_speculative_tokens": 4}
        engine = Engine(EngineConfig(model=str(path), speculative_config=drafts, **{**ENGINE, **config}))
    engine.decode_steps.speculation.account = Always()
    fill(engine, random_prompts(engine, 2, 640), 60, True)
    assert window(engine, 2, 2).tokens == 2 * tokens


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
