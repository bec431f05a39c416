"""Hybrids (Qwen3.5, Qwen3-Next, Nemotron-H): layers with a state and full attention through the engine, on ranks too.
Qwen3.5's files, and its configs that cannot be run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from dense_cache import packed_logits
from families import build, oracle_logits
from gguf_files import write_model
from quantized_files import write_quantized
from safetensors.torch import load_file, save_file
from test_experts_engine import LONG, lossless, oracle, prompt
from test_families import assert_ranks_give, assert_same, sequences
from test_quantized_engine import answers, assert_alike
from test_quantized_formats import assert_close
from thread_group import on_ranks

from shadowkv import LLM, SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.fidelity.follow import follow
from shadowkv.eval.fidelity.prompts import Prompt
from shadowkv.eval.records.policies import local_policies
from shadowkv.eval.running.caches import open_cache, prefill, prefill_all
from shadowkv.kvcache.recurrent import states
from shadowkv.kvcache.snapshots.header import Link, Snapshot, SnapshotHeader
from shadowkv.layers.quantized_matrix import QuantizedLinear
from shadowkv.models import load_config, load_model
from shadowkv.ops.registry import Ops

NAMES = ("qwen3_5", "qwen3_5-more-full", "qwen3_next", "nemotron_h", "nemotron_h-experts")
KINDS = pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
"""One model for each kind of layer with a state."""
WHOLE = "turbo:keys=low-rank,values=dense,dense_below=0,rank=32,budget=1.0"
"""``turbo`` where it loses nothing."""


@pytest.mark.parametrize("block", [1024, 48])
@pytest.mark.parametrize("kv", ["full", "turbo"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    name: str, kv: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ragged prompts, of steps of all of them, and of forks at every checkpoint."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, block)
    monkeypatch.setattr(states, "CHECKPOINT_EVERY", 192)
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kv, loaded.config.shape.kv_dim), 700, slots=8)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((500, 70, 5))]
    sequences = [cache.allocate(len(text), 700) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)
    points = set()
    for length in range(64, 500, 64):
        if point := cache.fork_point(sequences[0], length):
            points.add(point)
            fork = cache.fork(sequences[0], point, point + 9, 700)
            text = [*texts[0][:point], *prompt(5, 9)]
            got = prefill(loaded.model, cache, [(fork, text[point:])])
            torch.testing.assert_close(got[0], oracle(theirs, text), atol=1e-4, rtol=0)
            cache.release(fork)
    assert points == {192, 384, 448}
    for step in zip(*(prompt(10 + seed, 70) for seed in range(3)), strict=True):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
    assert kv == "full" or (cache.groups[0].pool.tables.compressed > 0).any()
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)
    for sequence in sequences:
        cache.release(sequence)
    assert cache.use()["recurrent_states"].used_bytes == 0


@pytest.mark.parametrize("name", [*NAMES, "qwen3_5_moe", "qwen3_next-some-dense"])
def test_two_ranks_give_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    assert_ranks_give(2, tmp_path, build(name, tmp_path))


@KINDS
def test_ranks_answer_as_one(name: str, tmp_path: Path) -> None:
    build(name, tmp_path, LONG)
    assert_alike(answers(tmp_path, tensor_parallel_size=2)[1], answers(tmp_path)[1])


@pytest.mark.parametrize(
    ("name", "words"), [("qwen3_5", "2 key heads of linear attention"), ("nemotron_h", "2 groups of Mamba-2")]
)
def test_more_ranks_than_shares_are_refused(name: str, words: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=3 is more than the {words}"):
        on_ranks(3, lambda group: load_model(tmp_path, group=group))


def test_the_text_model_is_loaded_alone(tmp_path: Path) -> None:
    """From files with an image encoder and a layer that drafts tokens."""
    theirs = build("qwen3_5", tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "eos_token_id": 5}))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    weights |= {name: torch.ones(3) for name in ("model.visual.x.weight", "mtp.fc.weight")}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert 5 in loaded.config.eos_token_ids
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(theirs, sequences()))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("kind", ["awq", "fp8, blocks", "int8", "nvfp4"])
def test_quantized_checkpoints(kind: str, name: str, tmp_path: Path) -> None:
    """Of projections of linear attention, too, beside gates that are not quantized."""
    sizes = {"linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64)
    quantized, plain = (load_model(path) for path in write_quantized(tmp_path, kind, name, **sizes))
    assert any(isinstance(module, QuantizedLinear) for module in quantized.model.layers[0].linear_attention.modules())
    assert_close(packed_logits(quantized.model, sequences()), packed_logits(plain.model, sequences()))


def test_configs_without_layer_types_have_every_fourth_layer_full(tmp_path: Path) -> None:
    build("qwen3_5", tmp_path)
    listed = load_config(tmp_path)
    assert [bool(kind.state) for kind in listed.layer_kinds] == [True, True, True, False]
    edit_json(tmp_path / "config.json", layer_types=None)
    assert load_config(tmp_path) == listed
    edit_json(tmp_path / "config.json", full_attention_interval=2)
    assert [bool(kind.state) for kind in load_config(tmp_path).layer_kinds] == [True, False, True, False]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"linear_num_key_heads": 0}, "linear_num_key_heads=0 is not a whole number from 1 to 4096"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is less than 2"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported, only 'float32'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported, only 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"layer_types": None, "full_attention_interval": 9}, "full_attention_interval=9 is not a whole number from 1"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is not a list of linear_attention or full_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
    ],
)
def test_configs_that_cannot_be_run(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    build("qwen3_5", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)


@KINDS
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_snapshots_hold_states(kv: str, name: str, tmp_path: Path) -> None:
    """Of a whole sequence, and a chain of two, of which the first ends where no state was kept."""
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    policy, text = lossless(kv, loaded.config.shape.kv_dim), prompt(0, 500)
    cache, other = (open_cache(loaded, policy, 700, slots=6) for _ in range(2))
    sequence = cache.allocate(len(text), 700)
    prefill(loaded.model, cache, [(sequence, text)])
    copied = other.snapshots.load(cache.snapshots.export(sequence), 700)
    more = [*text, *prompt(1, 9)]
    other.extend(copied, len(more), 700)
    got = prefill(loaded.model, other, [(copied, more[len(text) :])])
    torch.testing.assert_close(got[0], oracle(theirs, more), atol=1e-4, rtol=0)

    first, second = 192, cache.fork_point(sequence, 480)
    assert not cache.fork_point(sequence, first) and second == 448
    snapshots = []
    for start, stop in ((0, first), (first, second)):
        with cache.snapshots.open_reading(sequence, start, stop) as reading:
            snapshot = Snapshot(reading.header, torch.empty(reading.header.pieces, dtype=torch.uint8))
            for layer in range(reading.header.num_layers):
                reading.read_layer(layer, snapshot.layer(layer))
        assert SnapshotHeader.from_plain(asdict(snapshot.header)) == snapshot.header
        snapshots.append((snapshot, stop))
    chained = other.snapshots.load(snapshots, 700)
    for branch in ([*text[:second], *prompt(2, 30)], [*text[:second], *prompt(3, 40)]):
        if branch[second:] == prompt(2, 30):
            one = chained
            other.extend(one, len(branch), 700)
        else:  # the restored state has become a checkpoint
            one = other.fork(chained, second, len(branch), 700)
        got = prefill(loaded.model, other, [(one, branch[second:])])
        torch.testing.assert_close(got[0], oracle(theirs, branch), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="there is no recurrent state after 192 tokens"):
        other.snapshots.load(snapshots[:1], 700)
    with pytest.raises(ValueError, match="there is no recurrent state after 320 tokens"):
        other.snapshots.load([snapshots[0], (snapshots[1][0], 320)], 700)


def test_a_prefill_for_several_policies_gives_all_of_them_the_state(tmp_path: Path) -> None:
    theirs, loaded = build("qwen3_5", tmp_path, LONG), load_model(tmp_path)
    policies = [lossless(kv, loaded.config.shape.kv_dim) for kv in ("full", "turbo", "full")]
    caches = [open_cache(loaded, policy, 600, slots=2) for policy in policies]
    text, token = prompt(0, 500), 7
    sequences, _ = prefill_all(loaded.model, caches, text, 600)
    for cache, sequence in zip(caches, sequences, strict=True):
        cache.extend(sequence, 500, 600)
        got = Runner(loaded.model, cache).decode([sequence], [token])
        torch.testing.assert_close(got[0], oracle(theirs, [*text, token]), atol=1e-4, rtol=0)
        cache.release(sequence)
        assert cache.use()["recurrent_states"].used_bytes == 0


@pytest.mark.parametrize(
    ("kv", "ranks", "name"),
    [
        *((kv, ranks, name) for name in ("qwen3_5", "nemotron_h") for kv, ranks in (("full", 1), ("full", 2))),
        *(("turbo:dense_below=0", 1, "qwen3_5"), (WHOLE, 1, "nemotron_h")),
    ],
)
def test_prompts_are_found_again_after_a_restart(kv: str, ranks: int, name: str, tmp_path: Path) -> None:
    build(name, tmp_path / "model", LONG)
    text, options = prompt(0, 500), {"kv_disk_dir": str(tmp_path / "disk"), "dtype": "float32", "max_num_seqs": 2}
    options["tensor_parallel_size"] = ranks
    asked = [[*text, *prompt(seed, 20)] for seed in (1, 2)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cold = dict[int, Any]()
    for number in (0, 1):
        with LLM(str(tmp_path / "model"), kv=kv, max_model_len=700, max_num_seqs=2, dtype="float32") as llm:
            cold[number] = llm.generate([asked[number]], params)[0]
    with LLM(str(tmp_path / "model"), kv=kv, max_model_len=700, **options) as llm:
        llm.generate([text], params)
    with LLM(str(tmp_path / "model"), kv=kv, max_model_len=700, **options) as llm:
        for number in (0, 1):
            warm = llm.generate([asked[number]], params)[0]
            assert warm.num_cached_tokens == 448
            assert warm.outputs[0].token_ids == cold[number].outputs[0].token_ids


@pytest.mark.parametrize("kinds", [{}, {"attn_qkv": "Q8_0", "attn_gate": "Q4_0", "ssm_out": "Q8_0", "ffn_up": "Q4_0"}])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_gguf_files(name: str, kinds: dict[str, str], tmp_path: Path) -> None:
    """Their value heads are in another order, and their rates and norms are of another form."""
    model = build(name, tmp_path / "model", {"hidden_size": 64, "linear_value_head_dim": 16, "intermediate_size": 96})
    file = write_model(tmp_path / "model.gguf", model, kinds=kinds)
    plain = write_model(tmp_path / "plain.gguf", model, kinds=kinds, plain=True)
    ops = Ops(overrides={"quantized_matmul": "reference"})  # others round activations
    found, expected = (packed_logits(load_model(path).model, sequences(), ops=ops) for path in (file, plain))
    assert_close(found, expected)
    if not kinds:
        assert_close(found, packed_logits(load_model(tmp_path / "model").model, sequences()))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: GGUF files of \w+ run on one rank"):
        on_ranks(2, lambda group: load_model(file, group=group))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kinds", [{}, {"attn_qkv": "Q8_0", "attn_gate": "Q4_0", "ssm_in": "Q8_0", "ssm_ba": "Q8_0"}])
def test_gguf_files_of_qwen3_next(joined: bool, kinds: dict[str, str], tmp_path: Path) -> None:
    """Those whose inputs of linear attention are apart, and older ones. They run on several ranks, too."""
    model = build("qwen3_next", tmp_path / "model", {"hidden_size": 64, "linear_value_head_dim": 16})
    file = write_model(tmp_path / "model.gguf", model, kinds=kinds, joined=joined)
    plain = write_model(tmp_path / "plain.gguf", model, kinds=kinds, plain=True, joined=joined)
    ops = Ops(overrides={"quantized_matmul": "reference"})  # others round activations
    expected = packed_logits(load_model(plain).model, sequences(), ops=ops)
    assert_close(packed_logits(load_model(file).model, sequences(), ops=ops), expected)
    if not kinds:
        assert_close(expected, packed_logits(load_model(tmp_path / "model").model, sequences()))
    for found in on_ranks(2, lambda group: packed_logits(load_model(file, group=group).model, sequences(), ops=ops)):
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("kv", "name"),
    [("full", "qwen3_5"), ("turbo:dense_below=0", "qwen3_5"), ("full", "nemotron_h"), (WHOLE, "nemotron_h")],
)
def test_conversations_answer_as_without_reuse(kv: str, name: str, tmp_path: Path) -> None:
    """Of several turns, whose steps run ahead; some are answered twice, and half of the last answers are edited."""
    build(name, tmp_path, LONG)
    params = [
        SamplingParams(max_tokens=30, temperature=0, stop_token_ids=list(range(3, 12))),
        SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True),
    ]
    options = {"kv": kv, "max_model_len": 1000, "max_num_seqs": 3, "dtype": "float32", "max_cached_seqs": 3}
    found = dict[bool, list[list[int]]]()
    cached = 0
    for reuse in (False, True):
        with LLM(str(tmp_path), enable_prefix_caching=reuse, **options) as llm:
            llm.engine.decode_steps.run_ahead = reuse
            texts, found[reuse] = [prompt(seed, 90 + 64 * seed) for seed in range(4)], []
            for turn in range(3):
                for repeated in range(1 + turn % 2):
                    outputs = llm.generate(texts, [params[(n + repeated) % 2] for n in range(4)])
                    found[reuse] += [output.outputs[0].token_ids for output in outputs]
                    cached += sum(output.num_cached_tokens or 0 for output in outputs)
                for number, output in enumerate(outputs):
                    answer = list(output.outputs[0].token_ids)
                    texts[number] = [*texts[number], *answer[: None if number % 2 else 7], *prompt(turn, 40)]
            assert bool(cached) == reuse
            if reuse:
                states = llm.engine.cache.recurrent
                running = [one for one in llm.engine.scheduler.running]
                assert not running and 0 < states.used_bytes <= states.total_bytes
    assert found[True] == found[False]


@pytest.mark.parametrize("more", [150, 300])
def test_a_restored_sequence_shares_only_its_parents_own_tokens(more: int, tmp_path: Path) -> None:
    """The parent, a question about the same document, has states behind its other tokens, too."""
    theirs, loaded = build("qwen3_5", tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless("full", loaded.config.shape.kv_dim), 700, slots=8)
    document = prompt(0, 192)
    texts = [[*document, 5], [*document, *prompt(1, 150)], [*document, *prompt(2, more)]]
    sequences = list[Any]()
    for text in texts:
        start = 192 if sequences else 0
        one = cache.fork(sequences[0], start, len(text), 700) if sequences else cache.allocate(len(text), 700)
        prefill(loaded.model, cache, [(one, text[start:])])
        sequences.append(one)
    stop = cache.fork_point(sequences[2], len(texts[2]) - 1)
    with cache.snapshots.open_reading(sequences[2], 192, stop) as reading:
        snapshot = Snapshot(reading.header, torch.empty(reading.header.pieces, dtype=torch.uint8))
        for layer in range(reading.header.num_layers):
            reading.read_layer(layer, snapshot.layer(layer))
    cache.release(sequences[2])
    restoring = cache.snapshots.restore([Link(snapshot.header, stop)], len(texts[2]), 700, sequences[1])
    for layer in range(snapshot.header.num_layers):
        restoring.write_layer(0, layer, snapshot.layer(layer))
    sequences[2] = restoring.sequence
    got = prefill(loaded.model, cache, [(sequences[2], texts[2][stop:])])
    torch.testing.assert_close(got[0], oracle(theirs, texts[2]), atol=1e-4, rtol=0)
    for one, text in zip(sequences[1:], texts[1:], strict=True):
        for point in {cache.fork_point(one, length) for length in range(64, len(text), 64)} - {0}:
            edited = [*text[:point], *prompt(9, 7)]
            fork = cache.fork(one, point, len(edited), 700)
            got = prefill(loaded.model, cache, [(fork, edited[point:])])
            torch.testing.assert_close(got[0], oracle(theirs, edited), atol=1e-4, rtol=0)
            cache.release(fork)


@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_layers_wait_for_states_that_are_still_arriving(kv: str, tmp_path: Path) -> None:
    """Layers of a snapshot are written only when somebody waits for them."""
    theirs, loaded = build("qwen3_5", tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kv, loaded.config.shape.kv_dim), 700, slots=3)
    text = prompt(0, 500)
    sequence = cache.allocate(len(text), 700)
    prefill(loaded.model, cache, [(sequence, text)])
    snapshot = cache.snapshots.export(sequence)
    cache.release(sequence)
    restoring = cache.snapshots.restore([Link(snapshot.header, len(text))], 530, 700)
    arrived = list[int]()

    class Arrival:
        def wait(self, layer: int) -> None:
            for number in range(len(arrived), layer + 1):
                restoring.write_layer(0, number, snapshot.layer(number))
                arrived.append(number)

        def end(self) -> None:
            pass

    restoring.sequence.pending_layers = Arrival()
    more = [*text, *prompt(1, 30)]
    got = prefill(loaded.model, cache, [(restoring.sequence, more[len(text) :])])
    torch.testing.assert_close(got[0], oracle(theirs, more), atol=1e-4, rtol=0)
    assert arrived == [0, 1, 2, 3]


def test_fidelity_counts_layers_with_attention(tmp_path: Path) -> None:
    build("qwen3_5", tmp_path, LONG)
    loaded = load_model(tmp_path)
    policies = local_policies(["full", "quest:chunk=8,budget=64"], [], loaded.config.shape)
    _, quest = follow(loaded, policies, [Prompt("a", prompt(0, 400))], 4, 2)
    assert len(quest.mass_recall) == len(quest.output_error) == 1  # one of four layers
    assert 0 < quest.mass_recall[0] < 1 and quest.hit_rates is not None


def test_gguf_files_with_layers_that_draft_tokens(tmp_path: Path) -> None:
    """They are left out."""
    model = build("qwen3_5", tmp_path / "model")
    whole = load_model(write_model(tmp_path / "whole.gguf", model))
    last = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("model.layers.3.")}
    extra = {name.replace("layers.3.", "layers.4."): tensor for name, tensor in last.items()}
    file = write_model(tmp_path / "drafting.gguf", model, extra, block_count=5, nextn_predict_layers=1)
    assert load_model(file).config == whole.config


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"ssm.inner_size": 65},
            r"qwen35\.ssm\.inner_size=65 is not a positive multiple of qwen35\.ssm\.time_step_rank=4",
        ),
        ({"ssm.conv_kernel": 4000000000}, "linear_conv_kernel_dim=4000000000 is not a whole number from 1 to 4096"),
        ({"nextn_predict_layers": 9}, r"qwen35\.nextn_predict_layers=9 is not a number from 0 to 3"),
    ],
)
def test_gguf_files_that_cannot_be_run(fields: dict[str, int], words: str, tmp_path: Path) -> None:
    model = build("qwen3_5", tmp_path / "model")
    with pytest.raises(ValueError, match=words):
        load_model(write_model(tmp_path / "model.gguf", model, **fields))
