"""The model that vLLM runs (a config without weights), and the settings of vLLM's engines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""Llama-3.1-8B's shapes, with room for prompts of 249,856 tokens."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_DEEP_GEMM": "0",  # it compiles at run time, and a GPU machine may lack the tools
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""vLLM's model classes by ``model_type``."""

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
"""``quantization_config`` of a checkpoint with 4-bit weights. vLLM makes dummy weights of this form."""


def write_model(folder: Path, config: Path | None = None, quantization: str = "none") -> None:
    """Makes the folder that an engine loads, with the shapes of the file ``config``; None means Llama-3.1-8B's. Raises
    ValueError for a ``model_type`` that ``ARCHITECTURES`` does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = CONFIG
    if config is not None:
        given = json.loads(config.read_text(encoding="utf-8"))
        if given["model_type"] not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            raise ValueError(f"{config} has the model_type {given['model_type']!r}; {known} are known: ARCHITECTURES")
        shapes = given | {"architectures": [ARCHITECTURES[given["model_type"]]], "torch_dtype": "bfloat16"}
    if quantization == "gptq":
        shapes = shapes | {"quantization_config": GPTQ}
    (folder / "config.json").write_text(json.dumps(shapes), encoding="utf-8")


def write_tokenizer(folder: Path, vocab_size: int = CONFIG["vocab_size"], eos: int = CONFIG["eos_token_id"]) -> None:
    """Adds a tokenizer to a folder of ``write_model``. It is the tokenizer of our own dummy weights: every byte is a
    token, and other ids are printed as <id>. So a text has the same number of tokens with both servers."""
    # As in GPT-2's files, bytes that are not printable characters are written as the characters from 256 on.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    alphabet = {byte: chr(byte) for byte in printed} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)} | {f"<{token}>": token for token in range(256, vocab_size)}
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": eos, "content": f"<{eos}>", **options}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"<{eos}>", "model_max_length": 10**9}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def settings(folder: Path, kv: str, quantization: str, longest: int, decode: list[int]) -> dict[str, Any]:
    """Returns the arguments of ``LLM``. ``decode`` lists the batch sizes of an engine that only decodes and computes no
    prompts; it is empty for other engines."""
    chosen: dict[str, Any] = {
        "model": os.fspath(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": max(131072, longest),
        "max_num_seqs": 256,
        "disable_log_stats": True,
        "disable_cascade_attn": True,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8" if kv == "fp8" else "auto",
        "gpu_memory_utilization": 0.9,
    }
    if quantization == "fp8":  # converted from bfloat16 at load; other formats are in the config
        chosen["quantization"] = quantization
    if decode:
        from vllm.config import KVTransferConfig

        filler = {"fill_mean": 0.0, "fill_std": 0.0 if kv == "fp8" else 0.5}
        chosen |= {
            "gpu_memory_utilization": 0.97,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "compilation_config": {"cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 24, 32, *decode})},
            "kv_transfer_config": KVTransferConfig(
                kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config=filler
            ),
        }
    return chosen


def reuse_settings(kv: str, reuse: bool, longest: int, offload_gib: float | None, on_device: int) -> dict[str, Any]:
    """Returns the settings that measurements of reuse change. If ``offload_gib`` of host memory is given, the device
    has room for ``on_device`` tokens."""
    chosen: dict[str, Any] = {"enable_prefix_caching": reuse, "disable_log_stats": False}  # statistics count hits
    if offload_gib:
        chosen |= {
            "kv_offloading_size": offload_gib,
            "kv_offloading_backend": "native",
            "kv_cache_memory_bytes": on_device * token_bytes(kv),
            "max_model_len": longest,
        }
    return chosen


def token_bytes(kv: str) -> int:
    """Returns the bytes of a token's keys and values."""
    heads, size = CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    return 2 * CONFIG["num_hidden_layers"] * heads * size * (1 if kv == "fp8" else 2)
