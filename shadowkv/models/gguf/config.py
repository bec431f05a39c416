"""ModelConfig of a GGUF file. The file's metadata is converted to a Hugging Face config, which the families' modules
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import LinearAttention
from shadowkv.models.checkpoints.files import OTHER_MODEL, ModelFileError, join_reasons, naming, unsupported
from shadowkv.models.configs.config_json import wrong_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.overrides import overridden_config

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma3": "gemma3_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
}
"""Supported GGUF architectures -> ``model_type``. ``llama`` also covers Mistral, Yi and SmolLM2. If a
``llama`` file has experts, it is a Mixtral model."""

_LAYERS_OF_27B = 62

_FIELDS = {
    "hidden_size": "{arch}.embedding_length",
    "intermediate_size": "{arch}.feed_forward_length",
    "num_hidden_layers": "{arch}.block_count",
    "num_attention_heads": "{arch}.attention.head_count",
    "num_key_value_heads": "{arch}.attention.head_count_kv",
    "head_dim": "{arch}.attention.key_length",
    "rms_norm_eps": "{arch}.attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "{arch}.context_length",
    "original_max_position_embeddings": "{arch}.rope.scaling.original_context_length",
    "rope_theta": "{arch}.rope.freq_base",
    "sliding_window": "{arch}.attention.sliding_window",
    "rope_local_base_freq": "{arch}.rope.freq_base_swa",
    "final_logit_softcapping": "{arch}.final_logit_softcapping",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "num_experts": "{arch}.expert_count",
    "num_experts_per_tok": "{arch}.expert_used_count",
    "moe_intermediate_size": "{arch}.expert_feed_forward_length",
    "shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
    "n_shared_experts": "{arch}.expert_shared_count",
    "first_k_dense_replace": "{arch}.leading_dense_block_count",
    "num_nextn_predict_layers": "{arch}.nextn_predict_layers",
    "routed_scaling_factor": "{arch}.expert_weights_scale",
    "norm_topk_prob": "{arch}.expert_weights_norm",
    "n_group": "{arch}.expert_group_count",
    "topk_group": "{arch}.expert_group_used_count",
    "full_attention_interval": "{arch}.full_attention_interval",
    "linear_num_key_heads": "{arch}.ssm.group_count",
    "linear_num_value_heads": "{arch}.ssm.time_step_rank",
    "linear_key_head_dim": "{arch}.ssm.state_size",
    "linear_conv_kernel_dim": "{arch}.ssm.conv_kernel",
}
_LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim")
_STOPS = ("eos", "eot", "eom")


def config_from_gguf(
    file: GGUFFile, max_model_len: int | None = None, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Returns the ModelConfig of the file, with the user's overrides and limit. Raises ModelFileError if the model
    cannot be run. Raises SettingsError if it cannot be run with ``overrides``, or if ``max_model_len`` is too long."""
    if file.architecture not in ARCHITECTURES:
        reason = unsupported("GGUF architecture", file.architecture, ARCHITECTURES)
        raise ModelFileError(file.path, reason, OTHER_MODEL)
    hf: dict[str, Any] = {name: file.value(key) for name, key in _FIELDS.items()}
    hf = {name: value for name, value in hf.items() if value is not None}
    hf["vocab_size"] = file.shape("token_embd.weight")[0]
    wrong = wrong_fields(hf, {name: file.key(key) for name, key in _FIELDS.items()})
    if wrong:
        raise ModelFileError(file.path, join_reasons(wrong))
    hf["model_type"] = _model_type(file, hf)
    if hf["model_type"] == "qwen3_moe":
        hf["norm_topk_prob"] = True  # as in llama.cpp; files lack this field
    if hf["model_type"] == "glm4_moe":
        _complete_glm4_moe(file, hf)
    if hf["model_type"].startswith(("qwen3_5", "qwen3_next")):
        _complete_linear(file, hf)
    if hf["model_type"] == "gpt_oss":
        hf["attention_bias"] = "blk.0.attn_q.bias" in file.names
        hf["intermediate_size"] = hf.get("moe_intermediate_size", hf["intermediate_size"])
    hf["use_sliding_window"] = bool(hf.get("sliding_window"))
    hf["tie_word_embeddings"] = "output.weight" not in file.names
    stops = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in _STOPS]
    hf["eos_token_id"] = list(dict.fromkeys(stop for stop in stops if stop is not None))
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    rotating = file.get("{arch}.rope.dimension_count", int)
    if rotating is not None and not 0 < rotating <= head_dim:
        raise ModelFileError(
            file.path,
            f"{file.key('{arch}.rope.dimension_count')}={rotating} is not a number from 1 to head_dim={head_dim}",
        )
    if file.architecture == "gemma3":  # files lack this field, which is head_dim in all models except 27B
        hf["query_pre_attn_scalar"] = head_dim
        if hf["num_hidden_layers"] == _LAYERS_OF_27B:
            hf["query_pre_attn_scalar"] = hf["hidden_size"] // hf["num_attention_heads"]
    hf["partial_rotary_factor"] = 1.0 if rotating is None else rotating / head_dim
    with naming(file.path, OTHER_MODEL):
        hf["rope_scaling"] = _scaling(file)
    config = overridden_config(file.path, hf, max_model_len, overrides)
    linear = config.linear
    if not isinstance(linear, LinearAttention):
        return config
    if config.architecture == "qwen3_next":
        of_all = any(name.endswith(".ssm_in.weight") for name in file.names)  # older converters join qkvz
        config = config.with_linear(replace(linear, joined=("qkvz", "ba") if of_all else ("ba",)))
    else:
        config = config.with_linear(replace(linear, tiled=linear.value_heads > linear.key_heads))
    return config


def _model_type(file: GGUFFile, hf: dict[str, Any]) -> str:
    if file.architecture == "llama" and hf.get("num_experts"):
        return "mixtral"
    return ARCHITECTURES[file.architecture]


def _complete_glm4_moe(file: GGUFFile, hf: dict[str, Any]) -> None:
    """Adds fields that only the tensors show, and subtracts layers that draft tokens from the number of layers."""
    hf["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.names
    hf["attention_bias"] = "blk.0.attn_q.bias" in file.names
    drafting = hf.get("num_nextn_predict_layers", 0)
    if type(drafting) is int and 0 <= drafting < hf["num_hidden_layers"]:
        hf["num_hidden_layers"] -= drafting


def _complete_linear(file: GGUFFile, hf: dict[str, Any]) -> None:
    """Adds the size of a value head, and subtracts layers that draft tokens from the number of layers. Raises
    ModelFileError for missing or invalid fields."""
    needed = ["ssm.inner_size", *(_FIELDS[name].removeprefix("{arch}.") for name in _LINEAR)]
    if missing := [file.key(f"{{arch}}.{name}") for name in needed if file.value(f"{{arch}}.{name}") is None]:
        raise ModelFileError(file.path, f"it has no {', '.join(missing)}", OTHER_MODEL)
    heads, size = (file.get(f"{{arch}}.ssm.{name}", int) or 0 for name in ("time_step_rank", "inner_size"))
    if heads < 1 or size < 1 or size % heads:
        inner, rank = (file.key(f"{{arch}}.ssm.{name}") for name in ("inner_size", "time_step_rank"))
        raise ModelFileError(file.path, f"{inner}={size} is not a positive multiple of {rank}={heads}")
    hf["linear_value_head_dim"] = size // heads
    hf["num_hidden_layers"] -= drafting_layers(file)


def drafting_layers(file: GGUFFile) -> int:
    """Returns the number of layers that draft tokens. They are the file's last layers, and are not loaded. Raises
    ModelFileError for an invalid number."""
    drafting = file.get("{arch}.nextn_predict_layers", int) or 0
    if not 0 <= drafting < (layers := file.get("{arch}.block_count", int) or 0):
        key = file.key("{arch}.nextn_predict_layers")
        raise ModelFileError(file.path, f"{key}={drafting} is not a number from 0 to {layers - 1}")
    return drafting


def _scaling(file: GGUFFile) -> dict[str, Any]:
    if "rope_freqs.weight" in file.names:
        # Files store Llama 3.1's scaling as one divisor per frequency, which is LongRoPE's form.
        factors = file.tensor("rope_freqs.weight").flatten().tolist()
        return {"rope_type": "longrope", "long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
    if "rope_factors_long.weight" in file.names:
        return {
            "rope_type": "longrope",
            "long_factor": file.tensor("rope_factors_long.weight").flatten().tolist(),
            "short_factor": file.tensor("rope_factors_short.weight").flatten().tolist(),
            "attention_factor": file.value("{arch}.rope.scaling.attn_factor"),
        }
    kind = file.value("{arch}.rope.scaling.type")
    return {
        "rope_type": "default" if kind in (None, "none") else kind,
        "factor": file.value("{arch}.rope.scaling.factor"),
        "beta_fast": file.value("{arch}.rope.scaling.yarn_beta_fast"),
        "beta_slow": file.value("{arch}.rope.scaling.yarn_beta_slow"),
        "truncate": file.architecture != "gpt-oss",  # files lack this field
    }
