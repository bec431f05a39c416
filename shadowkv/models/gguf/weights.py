"""Weights of a GGUF file under Hugging Face's names, so that families and adapters apply to both kinds of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError
from shadowkv.models.checkpoints.reading import Reading
from shadowkv.models.checkpoints.stored_weight import Stored, dense
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.gguf.config import drafting_layers
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.ops.quantized.rows import Form, QuantizedRows

_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_RATE = re.compile(r"^blk\.(\d+)\.ssm_a$")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_WEIGHTS = {
    **{
        f"ffn_{name}_exps.{kind}": f"mlp.experts.{name}_proj{suffix}"
        for name in ("gate", "up", "down")
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    },
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Tensors that are not a module's ``weight`` or ``bias``: tensors of all experts, and vectors of routers and heads."""
_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_out": "linear_attn.out_proj",
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
_OF_ARCHITECTURES = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4moe": {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
    **dict.fromkeys(HYBRIDS, _LINEAR),
}
"""Modules that differ from ``_MODULES``, by architecture."""
_CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, by name; raises ModelFileError if two tensors have the same Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _weights(file):
        weight = _hf_name(name, file.architecture)
        if weight in shapes:
            raise ModelFileError(file.path, f"it has {weight} twice, once as {name}")
        shape = file.shape(name)
        shapes[weight] = (1, *shape) if _is_flat(weight, shape) else shape
        if weight.endswith(".conv1d.weight") and len(shape) == 2:
            shapes[weight] = (shape[0], 1, shape[1])
    return shapes


def gguf_forms(file: GGUFFile) -> dict[str, Form]:
    """Forms of the weights that stay quantized, by name."""
    forms = {name: file.form(name) for name in _weights(file)}
    return {_hf_name(name, file.architecture): form for name, form in forms.items() if form is not None}


def gguf_readings(file: GGUFFile, config: ModelConfig, *, pinned: bool = False) -> Iterator[Reading]:
    """All weights. A weight is read in its form, or in float32 if it has none. A weight with an unknown name keeps its
    name.

    The shapes must have been checked, since rows of ``llama`` files are reordered. Norms of ``gemma3`` and hybrids are
    converted to w, as in safetensors files; GGUF files have 1 + w.
    """

    def read(name: str) -> Stored:
        stored = file.stored(name, pinned=pinned)
        if file.architecture == "llama" and ".attn_q." in name:
            return _halves_from_pairs(stored, config.num_query_heads)
        if file.architecture == "llama" and ".attn_k." in name:
            return _halves_from_pairs(stored, config.num_kv_heads)
        added = file.architecture == "gemma3" or (file.architecture in HYBRIDS and ".ssm_norm." not in name)
        if added and name.endswith("norm.weight"):
            return dense(stored) - 1  # these files contain 1 + w
        if _RATE.match(name):
            return dense(stored).neg().log()  # these files contain -exp(A_log)
        if ".ssm_conv1d." in name:
            return dense(stored).unsqueeze(1)
        if isinstance(stored, Tensor) and _is_flat(_hf_name(name, file.architecture), stored.shape):
            return stored.unsqueeze(0)
        return stored

    return (
        Reading(_hf_name(name, file.architecture), file.nbytes(name), partial(read, name)) for name in _weights(file)
    )


def _weights(file: GGUFFile) -> list[str]:
    """Returns the names of the model's weights. Layers that draft tokens are left out for hybrids only; for other
    families, ``SeparateExperts`` leaves them out."""
    names = [name for name in file.names if name not in _CONFIG_TENSORS]
    if file.architecture not in HYBRIDS or not (drafting := drafting_layers(file)):
        return names
    layers = (file.get("{arch}.block_count", int) or 0) - drafting
    return [name for name in names if (of := re.match(r"blk\.(\d+)\.", name)) is None or int(of[1]) < layers]


def _is_flat(weight: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix of one row that the file stores as a vector."""
    return len(shape) == 1 and weight.endswith(".shared_expert_gate.weight")


def _hf_name(name: str, architecture: str) -> str:
    if (rate := _RATE.match(name)) is not None:
        return f"model.layers.{rate[1]}.linear_attn.A_log"
    match = _BLOCK.match(name)
    if match is None:
        return _TOP.get(name, name)
    layer, module, kind = match.groups()
    if (weight := _WEIGHTS.get(f"{module}.{kind}")) is not None:
        return f"model.layers.{layer}.{weight}"
    theirs = _OF_ARCHITECTURES.get(architecture, {}).get(module) or _MODULES.get(module)
    return name if theirs is None else f"model.layers.{layer}.{theirs}.{kind}"


def _halves_from_pairs(stored: Stored, heads: int) -> Stored:
    """Undoes the row order of ``llama`` files. Their RoPE rotates pairs of neighbouring rows; this engine's RoPE
    rotates pairs of rows that are half a head apart."""
    if isinstance(stored, QuantizedRows):
        return QuantizedRows(tuple(_in_halves(tensor, heads) for tensor in stored.tensors), stored.form)
    return _in_halves(stored, heads)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
