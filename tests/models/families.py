"""Tiny random models of every family, made by transformers: the oracle of the model tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 12, "tie_word_embeddings": True, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 8.0, 12.0, 16.0],
}
WINDOW = {"sliding_window": 9, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
GLM_EXPERTS = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 9,
    "rope_scaling": {**YARN, "truncate": False},
}

MINIMAX = {
    "model_type": "minimax_m2",
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "rotary_dim": 8,
}

MINIMAX_M3 = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "dense_intermediate_size": 80,
    "shared_intermediate_size": 48,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 128,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

QWEN4_EXP = {
    **{**QWEN3_5, "model_type": "qwen4_exp_text", "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "output_gate_type": "sigmoid"},
    **{"num_hidden_layers": 5, "hc_count": 4, "hc_lowrank": 12, "indexer_n_heads": 24, "indexer_kv_heads": 1},
    **{"indexer_head_dim": 16, "indexer_budget": 128, "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3]},
    **{"ple_embed_dim": 32, "heads_per_ngram": 4, "ngram_vocab_size_base": 50, "split_ngram_parts": 4},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

NEMOTRON_H = {
    "model_type": "nemotron_h",
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 32,
    "time_step_min": 1e-12,  # transformers limits time steps by it, in prompts alone
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mamba", "mlp"],
}
NEMOTRON_H_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
    **{"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5},
}

GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
GEMMA4_INPUTS = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96}
GEMMA4_SHARED = {  # transformers runs shared keys only with inputs of layers
    **{**GEMMA4_INPUTS, "num_hidden_layers": 8, "num_kv_shared_layers": 4, "use_double_wide_mlp": True},
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 2,
}
GEMMA4_SHARED["layer_types"][-2:] = ["sliding_attention", "full_attention"]
QWEN3_NEXT = {
    **{**QWEN3_5, "model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "linear_num_value_heads": 6},
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 5e5},
    "llama-bias-head-dim": {"model_type": "llama", "attention_bias": True, "head_dim": 16},
    "llama-3.1": {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    # Heads large enough for the ramp to lie between the frequencies.
    "llama-yarn": {"model_type": "llama", "head_dim": 32, "rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
    "llama-yarn-exact-ramp": {"model_type": "llama", "head_dim": 32, "rope_scaling": {**YARN, "truncate": False}},
    "llama-yarn-mscale": {"model_type": "llama", "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "llama-yarn-attention-factor": {"model_type": "llama", "rope_scaling": {**YARN, "attention_factor": 1.3}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "mistral-window": {"model_type": "mistral", "sliding_window": 10, "head_dim": 16},
    "phi3-window": {"model_type": "phi3", "sliding_window": 5},
    "qwen2-window": {**WINDOW, "model_type": "qwen2", "max_window_layers": 1},
    "qwen3-window": {
        **{**WINDOW, "model_type": "qwen3", "head_dim": 16},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3": {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 9},
    "gemma3-linear": {
        **{**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 6},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gemma4": GEMMA4,
    "gemma4-keys-are-values": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-shared-keys": {**GEMMA4, **GEMMA4_SHARED},
    "gemma4-layer-inputs": {**GEMMA4, **GEMMA4_INPUTS},
    "gemma4-experts": {**GEMMA4, **GEMMA4_EXPERTS},
    "gemma4-soft-cap": {**GEMMA4, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    "gemma4-same-heads": {**GEMMA4, "global_head_dim": 16, "attention_bias": True},
    "gemma4-all": {
        **{**GEMMA4, **GEMMA4_SHARED, **GEMMA4_EXPERTS},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    },
    "gemma4_unified": {
        **{**GEMMA4, "model_type": "gemma4_unified_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        **{"final_logit_softcapping": 3.0},
    },
    "qwen2": {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    "qwen2-tied-yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3"},
    "phi3-partial": {"model_type": "phi3", "head_dim": 16, "hidden_size": 64, "partial_rotary_factor": 0.5},
    "phi3-longrope": {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
    "glm": {"model_type": "glm", "head_dim": 16},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-some-dense": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "head_dim": 12, "shared_expert_intermediate_size": 48},
    "qwen2_moe-window": {
        **{**WINDOW, **EXPERTS, "model_type": "qwen2_moe", "head_dim": 12, "shared_expert_intermediate_size": 48},
        **{"max_window_layers": 1, "num_hidden_layers": 3},
    },
    "qwen3_moe-window": {**WINDOW, **EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**GLM_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_hidden_layers": 3},
    "glm4_moe-qk-norm": {**GLM_EXPERTS, "use_qk_norm": True, "norm_topk_prob": False, "n_shared_experts": 2},
    "gpt_oss": GPT_OSS,
    "gpt_oss-no-attention-bias": {**GPT_OSS, "attention_bias": False, "num_hidden_layers": 3},
    "qwen3_5": QWEN3_5,
    "qwen3_5-more-full": {
        **{**QWEN3_5, "num_hidden_layers": 5, "linear_num_value_heads": 2, "tie_word_embeddings": True},
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "qwen3_5_moe": {
        **{**QWEN3_5, "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    },
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next-some-dense": {
        **{**QWEN3_NEXT, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        **{"linear_num_value_heads": 4, "norm_topk_prob": False},
    },
    "qwen4_exp": QWEN4_EXP,
    "qwen4_exp-one-stream-more": {
        **{**QWEN4_EXP, "num_hidden_layers": 4, "hc_count": 5, "ple_layer_ids": [], "output_gate_type": None},
        **{"layer_types": ["indexed_attention", "linear_attention"] * 2, "norm_topk_prob": False},
        **{"indexer_compress_ratio": 8, "indexer_n_heads": 32},
    },
    "nemotron_h": NEMOTRON_H,
    "nemotron_h-experts": {
        **{
            **NEMOTRON_H,
            **NEMOTRON_H_EXPERTS,
            "n_groups": 3,
            "time_step_min": 1.5,
            "time_step_limit": [1.5, float("inf")],
        },
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "mlp", "mamba"],
    },
    "minimax_m2": MINIMAX,
    "minimax_m3": MINIMAX_M3,
    "minimax_m3-small-blocks": {
        **{**MINIMAX_M3, "index_block_size": 64, "index_topk_blocks": 3, "index_local_blocks": 2},
        **{"layer_types": ["minimax_m3_sparse"] * 3, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"index_n_heads": 3, "mlp_layer_types": ["sparse"] * 3},
    },
    "minimax_m2-all-rotates": {**MINIMAX, "rotary_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3},
    "glm4-no-bias": {"model_type": "glm4", "head_dim": 16, "attention_bias": False},
}


def build(name: str, directory: Path, sizes: Mapping[str, int] = MappingProxyType({}), **save: Any) -> torch.nn.Module:
    """Save the tiny model of a case, in other ``sizes``, to ``directory``; returns transformers' own, float32."""
    torch.manual_seed(sum(name.encode()))
    fields = {**TINY, **CASES[name], **sizes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager").float().eval()
    # transformers starts with zero biases and unit norms, which would hide a bias or a norm that is left out.
    with torch.no_grad():
        for name, buffer in learned_buffers(model):
            buffer.copy_(0.3 * torch.randn_like(buffer) + name.endswith("layer_scalar"))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15)
        if fields["model_type"].startswith("gemma4"):  # scores are not divided by the root of the head dim
            for name, parameter in model.named_parameters():
                if name.endswith("q_norm.weight"):
                    parameter.mul_(len(parameter) ** -0.5)
    model.save_pretrained(directory, safe_serialization=True, **save)
    if fields["model_type"] == "minimax_m3_vl_text":
        name_as_published(directory / "model.safetensors")
    write_tokenizer(directory)
    return model


def name_as_published(file: Path) -> None:
    """Gives weights of MiniMax-M3 the names of the published files, which transformers writes only for its multimodal
    model."""
    weights = dict[str, torch.Tensor]()
    for name, weight in load_file(file).items():
        name = f"language_model.{name}".replace(".self_attn.indexer.", ".self_attn.index_")
        name = re.sub(r"\.mlp\.(experts|gate|shared_experts)\.", r".block_sparse_moe.\1.", name)
        name = name.replace(".gate.e_score_", ".e_score_")
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(weight):
                for part, rows in zip(("w1", "w3"), expert.chunk(2), strict=True):
                    weights[f"{name.removesuffix('gate_up_proj')}{number}.{part}.weight"] = rows.clone()
        elif name.endswith("experts.down_proj"):
            weights |= {f"{name.removesuffix('down_proj')}{i}.w2.weight": x.clone() for i, x in enumerate(weight)}
        elif ".gate_up_proj." in name:
            for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                weights[name.replace("gate_up_proj", part)] = rows.clone()
        else:
            weights[name] = weight
    save_file(weights, file)


def learned_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What is learned, and no parameter of transformers: corrections of routers' scores, and scales of layers."""
    learned = ("e_score_correction_bias", "layer_scalar")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(learned)]


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json of single letters."""
    vocab = {chr(ord(" ") + index): index for index in range(90)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.save(str(directory / "tokenizer.json"))


def load_oracle(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model of files, of plain operations: its kernel for experts has no float64."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def oracle_logits(model: torch.nn.Module, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits [length, V], each sequence on its own."""
    return [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
