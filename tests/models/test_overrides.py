"""Entries that the user passes replace those of a model's config, whichever file has it, and no other ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import packed_logits
from families import LONGROPE, TINY, YARN, build, oracle_logits
from gguf_files import write_model
from test_families import assert_same, sequences
from test_loading_errors import edit_config
from transformers import AutoConfig, AutoModelForCausalLM

from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.models import load_config, load_model
from shadowkv.models.configs.config_json import FIELDS
from shadowkv.models.registry import FAMILIES, family, fields_of
from shadowkv.wording import SettingsError

ORIGINAL = YARN["original_max_position_embeddings"]
SPELLINGS: dict[str, dict[str, Any]] = {
    "rope_type": {"rope_scaling": YARN},
    "type": {"rope_scaling": {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}}},
    "rope_parameters": {"rope_parameters": YARN},
}
"""As the cards of models and the documents of libraries write it."""


def with_rope(model: torch.nn.Module, **rope: Any) -> torch.nn.Module:
    """transformers' model with the same weights and another RoPE."""
    config = model.config.to_dict()
    config["rope_parameters"] = {"rope_theta": config["rope_parameters"]["rope_theta"], **rope}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("file", ["folder", "gguf"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_yarn_gives_the_logits_of_transformers(spelling: str, file: str, tmp_path: Path) -> None:
    model = build("qwen2", tmp_path, {"max_position_embeddings": ORIGINAL})
    path = tmp_path if file == "folder" else write_model(tmp_path / "model.gguf", model)
    assert load_config(path).max_position == ORIGINAL
    loaded = load_model(path, dtype=torch.float32, max_model_len=4 * ORIGINAL, hf_overrides=SPELLINGS[spelling])
    assert loaded.config.max_position == 4 * ORIGINAL
    texts = sequences((7, ORIGINAL - 1, 2 * ORIGINAL + 5, 4 * ORIGINAL))
    wanted = oracle_logits(with_rope(model, **YARN), texts)
    assert_same(packed_logits(loaded.model, texts), wanted)
    plain = oracle_logits(model, texts[:1])[0]
    assert (plain - wanted[0]).abs().max() > 1e-2, "YaRN changes nothing: the test would show nothing"


def test_yarn_of_qwen2_5_as_its_card_says() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overrides = {"max_position_embeddings": 32768, "rope_scaling": scaling}
    config = load_config("qwen2-7b", 131072, overrides)
    assert (config.max_position, config.rope.scaling, config.rope.theta) == (131072, "yarn", 1e6)
    with pytest.raises(SettingsError, match="max_model_len=131073 is more than the 131072 positions"):
        load_config("qwen2-7b", 131073, overrides)


@pytest.mark.parametrize("name", ["llama-3.1", "llama-yarn-mscale", "phi3-longrope", "glm"])
@pytest.mark.parametrize("rope", ["rope_scaling", "rope_parameters"])
def test_a_scaling_replaces_the_files_and_keeps_the_base(name: str, rope: str, tmp_path: Path) -> None:
    """The file has the base and the share that rotates in the new object; nothing else of it is left."""
    build(name, tmp_path)
    linear = load_config(tmp_path, hf_overrides={rope: {"rope_type": "linear", "factor": 2.0}})
    stated = load_config(tmp_path)
    assert linear.rope == replace(
        stated.rope,
        scaling="linear",
        factor=2.0,
        original_max_position=0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        attention_factor=None,
        factors=(),
    )
    plain = load_config(tmp_path, hf_overrides={rope: None})
    assert plain.rope == replace(linear.rope, scaling="none", factor=1.0)


def test_the_original_context_of_the_scaling_is_read(tmp_path: Path) -> None:
    """Phi-3 has one beside the object, which is read before the object's."""
    build("phi3-longrope", tmp_path)
    assert load_config(tmp_path).rope.original_max_position == 32
    yarn = load_config(tmp_path, hf_overrides={"rope_scaling": {**YARN, "original_max_position_embeddings": 64}})
    assert (yarn.rope.original_max_position, yarn.max_position) == (64, 256)


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_base_alone_leaves_the_scaling(form: str, tmp_path: Path) -> None:
    build("llama-3.1", tmp_path)
    if form == "old":
        rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
        edit_config(tmp_path, rope_parameters=..., rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    stated, other = load_config(tmp_path), load_config(tmp_path, 4096, {"rope_theta": 4e6})
    assert other == replace(stated, rope=replace(stated.rope, theta=4e6), max_position=4096)


def test_scalings_in_tensors_of_a_gguf_file_are_replaced(tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    file = write_model(tmp_path / "model.gguf", model, {"rope_freqs.weight": torch.full((6,), 8.0)})
    assert load_config(file).rope.factors == (8.0,) * 6
    changed = load_config(file, hf_overrides={"rope_scaling": YARN})
    assert changed.rope == load_config(tmp_path, hf_overrides={"rope_scaling": YARN}).rope


VALUES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 300,
    "original_max_position_embeddings": 33,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": True,
    "eos_token_id": [5, 6],
    "bos_token_id": 7,
    "rope_theta": 3e4,
    "partial_rotary_factor": 0.25,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_parameters": {"rope_type": "linear", "factor": 3.0},
    "attention_bias": True,
    "sliding_window": 9,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "layer_types": ["full_attention", "full_attention"],
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "qkv_bias": False,
    "use_qk_norm": True,
    "n_shared_experts": 3,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 1,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 5e3,
    "query_pre_attn_scalar": 9,
    "rotary_dim": 8,
    "num_mtp_modules": 1,
    "mtp_num_hidden_layers": 1,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 1,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "index_block_size": 64,
    "index_topk_blocks": 8,
    "index_local_blocks": 2,
    "mlp_layer_types": ["sparse", "sparse"],
    "moe_layer_freq": [1, 1],
    "sparse_attention_config": {"sparse_attention_freq": [1, 1]},
    "indexer_n_heads": 8,
    "indexer_head_dim": 8,
    "indexer_budget": 256,
    "indexer_compress_ratio": 8,
    "hc_count": 3,
    "hc_lowrank": 7,
    "ple_layer_ids": [],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 3,
    "ngram_size": 5,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 60,
    "make_ngram_vocab_size_divisible_by": 64,
    "split_ngram_parts": 2,
    "seed": 5,
    "n_groups": 4,
    "mamba_num_heads": 64,
    "ssm_state_size": 32,
    "mamba_head_dim": 16,
    "conv_kernel": 3,
    "time_step_limit": [0.001, 0.1],
    "layer_norm_epsilon": 1e-4,
    "moe_shared_expert_intermediate_size": 64,
    "hybrid_override_pattern": "M-*E",
}
"""Another value than the tiny models' of every field that some family reads."""

REFUSED = {
    "hidden_act": "relu",
    "hidden_activation": "gelu",
    "mlp_bias": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": True,
    "swiglu_alpha": 1.0,
    "swiglu_limit": 5.0,
    "qk_norm_type": "per_head",
    "scoring_func": "softmax",
    "use_routing_bias": False,
    "attn_type_list": [1, 0],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "use_gemma_norm": False,
    "attn_output_gate": False,
    "mamba_ssm_dtype": "bfloat16",
    "output_gate_type": "sigmoid",
    "indexer_kv_heads": 2,
    "use_bias": True,
    "mamba_proj_bias": True,
    "residual_in_fp32": True,
    "use_conv_bias": False,
    "mamba_hidden_act": "gelu",
    "mlp_hidden_act": "silu",
    "moe_latent_size": 32,
    "layers_block_type": ["mamba", "attention"],
}
"""Values that no family, or not this one, runs with."""

_BY_MINIMAX_M3 = {
    "use_qk_norm": False,
    "qk_norm_type": "per_layer",
    "n_shared_experts": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
}
_BY_QWEN4_EXP = {
    "output_gate_type": "relu",
    "layer_types": ["full_attention", "full_attention"],
    "full_attention_interval": 1,
}
REFUSED_BY: dict[str, dict[str, Any]] = {
    "minimax_m2": {"use_qk_norm": False, "shared_intermediate_size": 32},
    "minimax_m3_vl": _BY_MINIMAX_M3,
    "minimax_m3_vl_text": _BY_MINIMAX_M3,
    "nemotron_h": {"attention_bias": True, "sliding_window": 9, "num_hidden_layers": 3},
    "qwen4_exp": _BY_QWEN4_EXP,
    "qwen4_exp_text": _BY_QWEN4_EXP,
}
"""Of fields that others read."""

GEMMA4 = {
    "num_hidden_layers": 12,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "top_k_experts": 2,
}
"""With these, a gemma4 config reads all of its fields."""

READ_BY_GEMMA4 = {
    "num_hidden_layers": 13,
    "layer_types": ["full_attention"] * 12,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": False,
    "per_layer_config": {"5": {"head_dim": 64}, "11": {"head_dim": 64}},
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 128,
    "enable_moe_block": False,
    "top_k_experts": 3,
    "final_logit_softcapping": 30.0,
}
"""Other values of fields that only gemma4 reads, or reads otherwise."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_reads_the_fields_that_it_names(model_type: str, tmp_path: Path) -> None:
    config = {**TINY, "model_type": model_type, "sliding_window": 128, "attention_bias": False, "head_dim": 16}
    config |= {"tie_word_embeddings": False}
    if "full_attention_interval" in family(model_type).FIELDS:
        config |= {"full_attention_interval": 2, "partial_rotary_factor": 0.5}
    if "indexer_n_heads" in family(model_type).FIELDS:
        config |= {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 128}
        config |= {"indexer_compress_ratio": 4, "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 4}
        config |= {"ngram_vocab_size_base": 50, "eos_token_id": 2}
    if "index_n_heads" in family(model_type).FIELDS:
        config |= {"index_n_heads": 2, "index_head_dim": 16, "moe_layer_freq": [0, 1]}
        config |= {"sparse_attention_config": {"sparse_attention_freq": [0, 1]}}
    config |= {"use_sliding_window": True, "max_window_layers": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    if "experts" in str(family(model_type).FIELDS):
        counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
        config |= {**counts, "num_experts_per_tok": 2, "norm_topk_prob": False, "n_group": 4, "topk_group": 2}
        config |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    if "hybrid_override_pattern" in family(model_type).FIELDS:
        config |= {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*-", "sliding_window": None}
        config |= {"moe_shared_expert_intermediate_size": 32}
    own = READ_BY_GEMMA4 if FAMILIES[model_type] == "gemma4" else {}
    config |= GEMMA4 if own else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = load_config(tmp_path)
    refused = {name: value for name, value in (REFUSED | REFUSED_BY.get(model_type, {})).items() if name not in own}
    for name, value in (VALUES | refused | own).items():
        overrides = {name: value}
        if name not in fields_of(model_type):
            with pytest.raises(SettingsError, match=f"{model_type} models read no {name}; they read vocab_size, "):
                load_config(tmp_path, hf_overrides=overrides)
        elif name in refused:
            with pytest.raises(SettingsError, match=" is not supported"):
                load_config(tmp_path, hf_overrides=overrides)
        else:
            assert load_config(tmp_path, hf_overrides=overrides) != plain, name
    assert VALUES.keys() | REFUSED.keys() | own.keys() >= {*FIELDS, *family(model_type).FIELDS}


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"rope_scalin": YARN}, "qwen2 models read no rope_scalin; they read .*rope_scaling"),
        ({"attention_bias": True}, "qwen2 models read no attention_bias; they read "),
        ({"quantization_config": {}}, "qwen2 models read no quantization_config"),
        ({3: 4}, "qwen2 models read no 3; they read "),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not an object"),
        ({"rope_scaling": {**YARN, "faktor": 4}}, "rope type 'yarn' reads no faktor; it reads .*factor"),
        ({"rope_scaling": {"factor": 4}}, "rope type 'default' reads no factor; it reads rope_type"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope type 'dynamic' is not supported; supported: default, linear",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, r"factor=0\.5 is not a number from 1 on"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor='4' is not a number from 1 on"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' lacks factor"),
        ({"rope_scaling": LONGROPE, "head_dim": 16}, "6 numbers in short_factor, not one per frequency"),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN},
            "rope_scaling and rope_parameters are two names of one object",
        ),
        (
            {"rope_scaling": {**YARN, "rope_theta": 1e6}, "rope_theta": 1e5},
            "rope_theta occurs twice, in rope_scaling",
        ),
        ({"rope_theta": float("nan")}, "rope_theta=nan is not a number above 1"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_query_heads=4 is not a multiple of num_kv_heads=3"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(overrides: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = build("qwen2", tmp_path)
    for path in (tmp_path / "config.json", write_model(tmp_path / "model.gguf", model)):
        with pytest.raises(SettingsError, match=f"^hf_overrides on {path}: .*{words}") as caught:
            load_config(path if path.suffix == ".gguf" else tmp_path, hf_overrides=overrides)
        assert "\n" not in str(caught.value)
        assert caught.value.as_flags({}).startswith("--hf-overrides on ")


def test_the_first_layers_have_no_window_whoever_names_it(tmp_path: Path) -> None:
    build("qwen2", tmp_path)
    window = {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}
    assert load_config(tmp_path, hf_overrides=window).layer_kinds == ()  # it begins with layer 28
    for first, kinds in ((1, (FULL, LayerKind(64))), (0, (LayerKind(64),) * 2), (2, ())):
        assert load_config(tmp_path, hf_overrides={**window, "max_window_layers": first}).layer_kinds == kinds


def test_sizes_that_the_weights_do_not_have_are_refused(tmp_path: Path) -> None:
    build("qwen2", tmp_path)
    with pytest.raises(ValueError, match="missing: "):
        load_model(tmp_path, hf_overrides={"num_hidden_layers": 3})
