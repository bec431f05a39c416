"""Weights of a GGUF file under Hugging Face's names, so that families and adapters apply to both."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.ops.quantised.rows import Form, QuantisedRows

_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
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
}
_CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name; raises ModelFileError if two tensors are the same weight."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in file.names:
        if name in _CONFIG_TENSORS:
            continue
        weight = _hf_name(name, file.architecture)
        if weight in shapes:
            raise ModelFileError(file.path, f"it has {weight} twice, as {name} too")
        shapes[weight] = file.shape(name)
    return shapes


def gguf_forms(file: GGUFFile) -> dict[str, Form]:
    """Forms of the weights that are read in blocks, by name."""
    forms = {name: file.form(name) for name in file.names}
    return {_hf_name(name, file.architecture): form for name, form in forms.items() if form is not None}


def stream_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Stored]]:
    """Name and weight, read one at a time, in blocks or as float32; unknown names pass unchanged.

    The shapes must have been checked: rows of ``llama`` files are reordered.
    """
    for name in file.names:
        if name in _CONFIG_TENSORS:
            continue
        stored = file.stored(name)
        if file.architecture == "llama" and ".attn_q." in name:
            stored = _halves_from_pairs(stored, config.num_query_heads)
        elif file.architecture == "llama" and ".attn_k." in name:
            stored = _halves_from_pairs(stored, config.num_kv_heads)
        yield _hf_name(name, file.architecture), stored


def _hf_name(name: str, architecture: str) -> str:
    match = _BLOCK.match(name)
    if match is None:
        return _TOP.get(name, name)
    layer, module, kind = match.groups()
    if module not in _MODULES:
        return name
    joined = architecture == "phi3" and module == "ffn_up"
    return f"model.layers.{layer}.{'mlp.gate_up_proj' if joined else _MODULES[module]}.{kind}"


def _halves_from_pairs(stored: Stored, heads: int) -> Stored:
    """Undoes the row order of ``llama`` files: they rotate neighbouring rows, this engine rows half a head apart."""
    if isinstance(stored, QuantisedRows):
        return QuantisedRows(tuple(_in_halves(tensor, heads) for tensor in stored.tensors), stored.form)
    return _in_halves(stored, heads)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
