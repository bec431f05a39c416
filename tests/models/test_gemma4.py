"""Gemma 4: layers with heads of their own, keys that are values, keys of other layers, inputs of layers and experts
beside the MLP. All of it through the engine, on ranks too; and configs that cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from dense_cache import packed_logits
from families import build, oracle_logits
from quantized_files import write_quantized
from safetensors.torch import load_file, save_file
from test_experts_engine import LONG, lossless, oracle, prompt
from test_families import assert_ranks_give, assert_same, sequences
from test_quantized_engine import answers, assert_alike
from test_quantized_formats import assert_close

from shadowkv import LLM, SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS, Step, run_through
from shadowkv.engine.execution.forward import prefill as steps_of_prefill
from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import open_cache, prefill, prefill_all
from shadowkv.kvcache.compression.rebuilt import RebuiltTokens
from shadowkv.kvcache.policy.shape import Heads
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.quantized_matrix import QuantizedLinear
from shadowkv.models import load_config, load_model
from shadowkv.plan.__main__ import main as plan

NAMES = ("gemma4-keys-are-values", "gemma4-shared-keys", "gemma4-all")
CASES = (*NAMES, "gemma4", "gemma4-layer-inputs", "gemma4-experts", "gemma4-soft-cap", "gemma4-same-heads")
LARGE = {"max_position_embeddings": 1024, "head_dim": 256, "global_head_dim": 512}


@pytest.mark.parametrize("block", [1024, 48])
@pytest.mark.parametrize("kv", ["full", "turbo", "turbo-host"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    name: str, kv: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ragged prompts, of steps of all of them across the ends of windows, and of a fork."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, block)
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    width = loaded.config.shape.kv_dim
    on_host = preset("turbo-host:keys=low-rank,values=dense,dense_below=0", rank=width, budget=1.0)
    cache = open_cache(loaded, on_host if kv == "turbo-host" else lossless(kv, width), 700, slots=8)
    runner = Runner(loaded.model, cache)
    texts = [prompt(seed, length) for seed, length in enumerate((500, 70, 5))]
    sequences = [cache.allocate(len(text), 700) for text in texts]
    got = prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)
    point = cache.fork_point(sequences[0], 490)
    assert point == 448
    fork, text = cache.fork(sequences[0], point, point + 9, 700), [*texts[0][:point], *prompt(5, 9)]
    got = prefill(loaded.model, cache, [(fork, text[point:])])
    torch.testing.assert_close(got[0], oracle(theirs, text), atol=1e-4, rtol=0)
    sequences, texts = [*sequences, fork], [*texts, text]
    for step in zip(*(prompt(10 + seed, 70) for seed in range(4)), strict=True):
        got = runner.decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
    assert kv == "full" or (cache.groups[0].pool.tables.compressed > 0).any()
    torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in texts]), atol=1e-4, rtol=0)


def noted_rows(model: torch.nn.Module) -> list[int]:
    """How many tokens each layer's MLP has computed since, by layer."""
    rows = [0] * len(model.layers)
    for number, layer in enumerate(model.layers):

        def note(_: Any, given: tuple[torch.Tensor, ...], number: int = number) -> None:
            rows[number] += len(given[0])

        layer.mlp.register_forward_pre_hook(note)
    return rows


@pytest.mark.parametrize("block", [1024, 48])
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_layers_without_keys_compute_only_the_ends_of_prompts(
    kv: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of new prompts, of prompts with the same beginning, which attend to it together, and beside a step."""
    for kind in BLOCK_TOKENS:
        monkeypatch.setitem(BLOCK_TOKENS, kind, block)
    theirs, loaded = build("gemma4-shared-keys", tmp_path, LONG), load_model(tmp_path)
    cache = open_cache(loaded, lossless(kv, loaded.config.shape.kv_dim), 700, slots=24)
    runner, rows, texts = Runner(loaded.model, cache), noted_rows(loaded.model), [prompt(0, 500), prompt(1, 70), [5]]

    def prefilled(work: list[tuple[CachedSequence, list[int]]], whole: list[list[int]], **how: Any) -> list[int]:
        """The rows of each layer's MLP, after a comparison of the logits."""
        before = list(rows)
        got, _ = run_through(steps_of_prefill(loaded.model, cache, work, **how))
        torch.testing.assert_close(got, torch.stack([oracle(theirs, text) for text in whole]), atol=1e-4, rtol=0)
        return [after - one for after, one in zip(rows, before, strict=True)]

    with torch.inference_mode():
        new = [cache.allocate(len(text), 700) for text in texts]
        counts = prefilled(list(zip(new, texts, strict=True)), texts)
        assert counts[:3] == [571] * 3 and set(counts[3:]) == {3 if block == 1024 else counts[3]} and counts[3] < 20
        point = cache.fork_point(new[0], 490)
        ends = [prompt(10 + seed, 3 + seed) for seed in range(3)]
        whole = [texts[0][:point] + end for end in ends]
        forks = [cache.fork(new[0], point, len(text), 700) for text in whole]
        spans, rebuilt = [], cache.groups[0].storing.rebuilt
        monkeypatch.setattr(rebuilt, "spans", lambda *what: spans.append(what) or RebuiltTokens.spans(rebuilt, *what))
        counts = prefilled(list(zip(forks, ends, strict=True)), whole)
        assert counts == [12] * 3 + [3] * 5
        assert len(spans) == (0 if kv == "full" else 4), "each layer with full attention rebuilds the beginning once"
        more, text = [7] * 6, prompt(20, 30)
        plan, sequence = cache.plan_decode([*new, *forks]), cache.allocate(len(text), 700)
        whole = [[*one, token] for one, token in zip((*texts, *whole), more, strict=True)]
        step = Step(cache.decode_batch(plan), torch.tensor(more))
        counts = prefilled([(sequence, text)], [*whole, text], step=step)
        assert counts == [36] * 3 + [7] * 5
        cache.end_decode(plan)
        counts = prefilled([(cache.allocate(70, 700), texts[1])], texts[1:2], scored=True)
        assert counts == [70] * 8
    blocks = -(-100 // block)
    assert (runner.prefill_pieces(100), runner.prefill_pieces(100, scored=True)) == (4 * blocks, 8 * blocks)


@pytest.mark.parametrize("kv, error", [("full", 1e-5), ("fp8:dense_below=0", 0.02), ("turbo:dense_below=0", 0.1)])
@pytest.mark.parametrize("name", ["gemma4-keys-are-values", "gemma4-all"])
def test_policies_on_heads_of_512(name: str, kv: str, error: float, tmp_path: Path) -> None:
    theirs, loaded = build(name, tmp_path, LARGE), load_model(tmp_path)
    cache = open_cache(loaded, preset(kv), 700, slots=2)
    assert [group.layout.shape.head_dim for group in cache.groups] == [512, 256]
    texts = [prompt(0, 500), prompt(1, 9)]
    sequences = [cache.allocate(len(text), 700) for text in texts]
    prefill(loaded.model, cache, list(zip(sequences, texts, strict=True)))
    for step in zip(prompt(2, 9), prompt(3, 9), strict=True):
        got = Runner(loaded.model, cache).decode(sequences, list(step))
        texts = [[*text, token] for text, token in zip(texts, step, strict=True)]
    assert kv == "full" or sequences[0].compressed > 0
    for logits, text in zip(got, texts, strict=True):
        wanted = oracle(theirs, text)
        assert (logits - wanted).norm() <= error * wanted.norm()


@pytest.mark.parametrize("name, size", [*((name, 2) for name in CASES), *((name, 3) for name in CASES[:2])])
def test_ranks_give_the_logits_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    """Two have a kv head of each window; of three, two have the same."""
    assert_ranks_give(size, tmp_path, build(name, tmp_path))


@pytest.mark.parametrize("name", ["gemma4-keys-are-values", "gemma4-all"])
def test_ranks_answer_as_one(name: str, tmp_path: Path) -> None:
    build(name, tmp_path, LONG)
    assert_alike(answers(tmp_path, tensor_parallel_size=2)[1], answers(tmp_path)[1])


@pytest.mark.parametrize("name", ["gemma4-soft-cap", "gemma4-all"])
def test_log_probabilities_are_of_capped_logits(name: str, tmp_path: Path) -> None:
    """Of prompts and of greedy answers. Later prompts join the steps of earlier ones."""
    theirs = build(name, tmp_path, LONG)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    texts = [prompt(seed, length) for seed, length in enumerate((100, 9, 70, 40, 5))]
    with LLM(str(tmp_path), kv="full", max_model_len=300, max_num_seqs=2, dtype="float32") as llm:
        outputs = llm.generate(texts, greedy)
    for text, output in zip(texts, outputs, strict=True):
        whole = [*text, *output.outputs[0].token_ids]
        (logits,) = oracle_logits(theirs, [whole])
        assert logits.abs().max() <= 3.0
        wanted = logits.log_softmax(-1)[range(len(whole) - 1), whole[1:]]
        of_prompt = [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
        of_answer = [
            one[token].logprob
            for one, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        ]
        assert [*of_prompt, *of_answer] == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize("kv", ["full", "turbo"])
@pytest.mark.parametrize("name", NAMES)
def test_snapshots(name: str, kv: str, tmp_path: Path) -> None:
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    policy, text = lossless(kv, loaded.config.shape.kv_dim), prompt(0, 500)
    cache, other = (open_cache(loaded, policy, 700, slots=2) for _ in range(2))
    sequence = cache.allocate(len(text), 700)
    prefill(loaded.model, cache, [(sequence, text)])
    copied, more = other.snapshots.load(cache.snapshots.export(sequence), 700), [*text, *prompt(1, 9)]
    other.extend(copied, len(more), 700)
    got = prefill(loaded.model, other, [(copied, more[len(text) :])])
    torch.testing.assert_close(got[0], oracle(theirs, more), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv", ["full", "turbo:dense_below=0"])
@pytest.mark.parametrize("name", ["gemma4-keys-are-values", "gemma4-shared-keys"])
def test_prompts_are_found_again_after_a_restart(name: str, kv: str, tmp_path: Path) -> None:
    build(name, tmp_path / "model", LONG)
    text, options = prompt(0, 500), {"kv": kv, "max_model_len": 700, "dtype": "float32", "max_num_seqs": 2}
    asked, params = [*text, *prompt(1, 20)], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path / "model"), **options) as llm:
        cold = llm.generate([asked], params)[0]
    options["kv_disk_dir"] = str(tmp_path / "disk")
    with LLM(str(tmp_path / "model"), **options) as llm:
        llm.generate([text], params)
    with LLM(str(tmp_path / "model"), **options) as llm:
        warm = llm.generate([asked], params)[0]
    assert warm.num_cached_tokens == 448
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_for_several_policies(name: str, tmp_path: Path) -> None:
    """Their groups of layers differ: one leaves the first and the last full layer exact."""
    theirs, loaded = build(name, tmp_path, LONG), load_model(tmp_path)
    width = loaded.config.shape.kv_dim
    some = preset("turbo:keys=low-rank,values=dense,dense_below=0,skip_layers=1", rank=width, budget=1.0)
    caches = [open_cache(loaded, policy, 600, slots=1) for policy in (lossless("full", width), some)]
    text, token = prompt(0, 500), 7
    sequences, _ = prefill_all(loaded.model, caches, text, 600)
    for cache, sequence in zip(caches, sequences, strict=True):
        cache.extend(sequence, 500, 600)
        got = Runner(loaded.model, cache).decode([sequence], [token])
        torch.testing.assert_close(got[0], oracle(theirs, [*text, token]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layers", [8, 4])
def test_selections_of_layers_that_reuse_keys_are_not_reported(layers: int, tmp_path: Path) -> None:
    """The last layers attend to the keys of the newest or the only full layer. This layer's selection is reported."""
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes = {"num_hidden_layers": layers, "num_kv_shared_layers": layers // 2, "layer_types": types}
    build("gemma4-shared-keys", tmp_path, LONG | sizes)
    options = {"kv": "turbo:dense_below=0,budget=64,rank=16", "max_model_len": 700, "dtype": "float32"}
    asking = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, return_selections=True)
    with LLM(str(tmp_path), **options) as llm:
        (output,) = llm.generate([prompt(0, 500)], asking)
    own = list(range(1, layers // 2, 2))
    for one in output.outputs[0].selections[1:]:
        assert one is not None and [group.layer for group in one.groups] == own
        assert all(sum(group.weights) == pytest.approx(1, abs=1e-3) for group in one.groups)


def test_rope_can_be_overridden(tmp_path: Path) -> None:
    build("gemma4", tmp_path)
    rope = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "factor": 2.0}
    config = load_config(tmp_path, hf_overrides={"rope_parameters": rope})
    assert (config.rope.scaling, config.rope.theta) == ("proportional", 5e5)
    assert (config.rope.proportion, config.rope.factor) == (0.5, 2.0)
    with pytest.raises(ValueError, match=r"rope type 'proportional' reads no width; it reads .*, factor"):
        load_config(tmp_path, hf_overrides={"rope_parameters": rope | {"width": 2}})


@pytest.mark.parametrize("kind", ["awq", "fp8, blocks", "int8"])
@pytest.mark.parametrize("name", ["gemma4-keys-are-values", "gemma4-shared-keys"])
def test_quantized_checkpoints(name: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "global_head_dim": 64}
    quantized, plain = (load_model(path) for path in write_quantized(tmp_path, kind, name, **sizes))
    assert isinstance(quantized.model.layers[5].attention.qkv, QuantizedLinear)
    assert_close(packed_logits(quantized.model, sequences()), packed_logits(plain.model, sequences()))


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_the_text_model_is_loaded_alone(model_type: str, tmp_path: Path) -> None:
    """From files with encoders, and with keys of layers that attend to others."""
    name = "gemma4_unified" if model_type == "gemma4_unified" else "gemma4-shared-keys"
    theirs = build(name, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": model_type, "text_config": text, "vision_config": {}, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    others = ["model.vision_tower.x.weight", "model.embed_vision.x", "model.audio_tower.y", "model.embed_audio.y"]
    if name == "gemma4-shared-keys":
        attention = "model.language_model.layers.7.self_attn"
        others += [f"{attention}.{kind}.weight" for kind in ("k_proj", "v_proj", "k_norm")]
    save_file(weights | {name: torch.ones(3) for name in others}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert 5 in loaded.config.eos_token_ids
    assert_same(packed_logits(loaded.model, sequences()), oracle_logits(theirs, sequences()))


def test_released_configs_and_those_of_transformers_5_are_alike(tmp_path: Path) -> None:
    build("gemma4-keys-are-values", tmp_path)
    config = load_config(tmp_path)
    assert config.shape.heads == Heads(4, 1, 32)
    assert config.layer_kinds[0].heads == Heads(4, 2, 16) and config.layer_kinds[2].heads is None
    released = {"global_head_dim": 32, "num_global_key_value_heads": 1, "per_layer_config": None}
    edit_json(tmp_path / "config.json", **released)
    assert load_config(tmp_path) == config
    edit_json(tmp_path / "config.json", attention_k_eq_v=False)
    assert load_config(tmp_path).shape.heads == Heads(4, 2, 32)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 is not a whole number from 0 to 1024"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 is not less than the 6 layers"),
        ({"num_kv_shared_layers": 4}, "layer 2 of full attention has no earlier layer of its kind with keys"),
        ({"use_double_wide_mlp": 1}, "use_double_wide_mlp=1 is not true or false"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping=0 is not a positive number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported, only 'vision'"),
        ({"enable_moe_block": True}, "num_experts is missing.*top_k_experts is missing"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "does not give every layer with full attention"),
        ({"per_layer_config": {"2": {"width": 2}, "5": {"width": 2}}}, "the same head_dim and num_key_value_heads"),
        ({"per_layer_config": None, "global_head_dim": 0}, "global_head_dim=0 is not a whole number from 1 to 4096"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list"),
        ({"sliding_window": 0}, "sliding_window=0 is not a positive number"),
        (
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 95},
            "vocab_size_per_layer_input=95 is less than vocab_size=96",
        ),
    ],
)
def test_configs_that_cannot_be_run(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    build("gemma4", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)


def test_plans_say_which_layers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--model", "gemma-4-e4b", "--context", "8192"]) == 0
    text = capsys.readouterr().out
    assert "42 layers, 8 query and 2 kv heads of 512" in text
    assert "35 layers with a window of 512: 8 query and 2 kv heads of 256" in text
    assert "18 layers attend to keys and values of other layers" in text


def test_reads_of_layers_that_reuse_keys_are_counted(tmp_path: Path) -> None:
    build("gemma4-shared-keys", tmp_path, LONG)
    loaded = load_model(tmp_path)
    cache = open_cache(loaded, preset("full"), 300, slots=1)
    assert [len(group.layout.layers) for group in cache.groups] == [2, 2]
    assert sum(group.layout.attending for group in cache.groups) == loaded.config.num_layers == 8
