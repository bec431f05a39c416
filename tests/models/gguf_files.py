"""GGUF files written for the tests: a tiny transformers model or a tokeniser in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    **{
        f"mlp.{shared}.{theirs}_proj": f"ffn_{theirs}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for theirs in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
OF_HYBRIDS = TENSORS | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
OF_GEMMA3 = TENSORS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def paired_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows half a head apart become neighbours, as the converter stores q and k of ``llama``."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_model(
    path: Path,
    model: Any,
    extra: dict[str, torch.Tensor] | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
    plain: bool = False,
    joined: bool = False,
    **fields: Any,
) -> Path:
    """Write a transformers model; ``extra`` tensors and metadata ``fields`` (``rope.scaling.type=…``) come on top.

    ``kinds`` are types of quantized tensors by the last part of their name in the file; ``plain`` writes the numbers
    that those stand for; ``joined`` leaves the input projection of Qwen3-Next's linear attention in one piece, as older
    files have it.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    rotating = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * rotating))
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    fields = expert_fields(config) | linear_fields(config) | fields
    for key, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[
            type(value)
        ]
        add(f"{arch}.{key}", value)
    add_letters(writer, config.vocab_size)
    tied = config.tie_word_embeddings
    tensors = with_apart_halves(model.state_dict())
    if arch == "qwen3next" and not joined:
        tensors = with_apart_inputs(tensors, config)
    for name, tensor in {**tensors, **(extra or {})}.items():
        if tied and name == "lm_head.weight":
            continue
        if arch == "llama" and ".q_proj." in name:
            tensor = paired_rows(tensor, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = paired_rows(tensor, config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in HYBRIDS:
            name, tensor = of_hybrid(name, tensor, 1 if arch == "qwen3next" else config.linear_num_key_heads, config)
        name = gguf_name(name, {"gemma3": OF_GEMMA3, **dict.fromkeys(HYBRIDS, OF_HYBRIDS)}.get(arch, TENSORS))
        if arch in ("glm4moe", "gpt-oss"):
            name = name.replace(".ffn_norm.", ".post_attention_norm.")
        kind = kinds.get(name.split(".")[-2]) if name.endswith(".weight") else None
        if kind is None:
            writer.add_tensor(name, tensor.contiguous().numpy())
            continue
        blocks, form = quantized(tensor.contiguous().numpy(), kind), gguf.GGMLQuantizationType[kind]
        if plain:
            writer.add_tensor(name, dequantize(blocks, form))
        else:
            writer.add_tensor(name, blocks, raw_dtype=form)
    return finish(writer)


def quantized(tensor: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Blocks of a matrix; those of formats that the library does not write have codes of their own."""
    form = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return quantize(tensor, form)
    values, size = gguf.GGML_QUANT_SIZES[form]
    blocks = np.random.default_rng(0).integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // values, size), np.uint8)
    # Numbers of about 0.15, as those of the models.
    scales = {"Q4_K": (0, (4e-4, 3e-3)), "Q5_K": (0, (2e-4, 3e-3)), "Q6_K": (208, (1e-4,))}
    start, sizes = scales[kind]
    blocks[..., start : start + 2 * len(sizes)] = np.array(sizes, np.float16).view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def with_apart_halves(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gate and the up projections of experts as tensors of their own; of gpt-oss, whose have biases, not
    transposed."""
    apart = {}
    for name, tensor in tensors.items():
        interleaved = f"{name.removesuffix('_bias')}_bias" in tensors
        if interleaved and tensor.ndim == 3:
            tensor = tensor.transpose(1, 2)
        if ".experts.gate_up_proj" in name:
            gate, up = (tensor[:, ::2], tensor[:, 1::2]) if interleaved else tensor.chunk(2, 1)
            apart |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            apart[name] = tensor
    return apart


def expert_fields(config: Any) -> dict[str, Any]:
    """Metadata of experts, as the converter writes it."""
    if (experts := getattr(config, "num_local_experts", getattr(config, "num_experts", None))) is None:
        return {}
    fields: dict[str, Any] = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if config.model_type == "gpt_oss":
        fields["expert_feed_forward_length"] = config.intermediate_size
    elif config.model_type != "mixtral":
        fields["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        fields["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "glm4_moe":
        fields |= {
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_gating_func": 2,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    return fields


def linear_fields(config: Any) -> dict[str, Any]:
    """Metadata of linear attention, as the converter writes it."""
    if not hasattr(config, "linear_num_value_heads"):
        return {}
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
    }


def with_apart_inputs(tensors: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The joined input projections of linear attention as two tensors, without the order by key heads."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    of_values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    apart = {}
    for name, tensor in tensors.items():
        if not name.endswith(".in_proj_qkvz.weight"):
            apart[name] = tensor
            continue
        parts = tensor.unflatten(0, (heads, -1)).split((size, size, of_values, of_values), dim=1)
        *qkv, z = (part.flatten(0, 1) for part in parts)
        apart |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
    return apart


def of_hybrid(name: str, tensor: torch.Tensor, keys: int, config: Any) -> tuple[str, torch.Tensor]:
    """A tensor as the converter writes it. With more than one of ``keys``, value heads that share a key head are not
    neighbours any more."""
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim

    def tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.unflatten(0, (keys, heads // keys, size)).transpose(0, 1).reshape(rows.shape)

    of_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, tensor + 1
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = torch.cat((tensor[:of_keys], tiled(tensor[of_keys:], size)))
        return name, tensor.squeeze(1)
    if name.endswith("in_proj_z.weight"):
        return name, tiled(tensor, size)
    if name.endswith("linear_attn.out_proj.weight"):
        return name, tiled(tensor.T, size).T
    if name.endswith(("in_proj_b.weight", "in_proj_a.weight")):
        return name, tiled(tensor, 1)
    if name.endswith("A_log"):
        return f"blk.{name.split('.')[2]}.ssm_a", -tiled(tensor, 1).exp()
    if name.endswith("dt_bias"):
        return f"blk.{name.split('.')[2]}.ssm_dt.bias", tiled(tensor, 1)
    return name, tensor


def gguf_name(name: str, tensors: Mapping[str, str] = MappingProxyType(TENSORS)) -> str:
    if ".mlp.experts." in name:
        _, _, layer, _, _, projection = name.split(".")
        module, _, bias = projection.partition("_proj")
        return f"blk.{layer}.ffn_{module}_exps.{'bias' if bias else 'weight'}"
    if name.endswith(".self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if name.endswith(".e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{tensors[rest]}.{kind}"
    return name


def add_letters(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of single characters, so that the file has a tokeniser."""
    tokens = [chr(ord("!") + index) for index in range(min(size, 90))]
    tokens[-1] = "ab"
    tokens += [f"[{index}]" for index in range(len(tokens), size)]
    write_vocabulary(writer, "gpt2", tokens, pre="gpt-2", merges=["a b"])


def write_vocabulary(
    writer: gguf.GGUFWriter,
    model: str,
    tokens: list[str],
    *,
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    types: list[int] | None = None,
    template: str | None = None,
    space_prefix: bool = True,
) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_add_space_prefix(space_prefix)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_tokenizer(path: Path, arch: str, model: str, tokens: list[str], **vocabulary: Any) -> Path:
    """A file with a tokeniser and no tensors."""
    writer = gguf.GGUFWriter(path, arch)
    write_vocabulary(writer, model, tokens, **vocabulary)
    return finish(writer)


def finish(writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)
