"""The Qwen4 preview (Qwen team, 2026), the text model: Qwen3.5's linear attention, gated attention to the tokens that
an indexer selects (QSA), experts, several residual streams, and n-gram embeddings.

The formulas are those of transformers' ``qwen4_exp``. Image encoders in the files, and layers that draft tokens, are
not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import Indexer, LayerKind, PooledHeads
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.layers.spec import Experts, LinearAttention, NGrams, Streams
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import are_token_ids
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import MAX_POSITIONS, ModelConfig
from shadowkv.models.families.hybrids import qwen3_5
from shadowkv.models.weight_names import Target, Targets, rows
from shadowkv.ops.choose_experts.routing import Routing

INDEXED = "indexed_attention"
"""The name that transformers' ``layer_types`` have for attention with an indexer. Published files call it full
attention."""

_INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_STREAMS = {"hc_count": 4, "hc_lowrank": 320}
_N_GRAMS = {
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
    "seed": 1234,
}
"""Fields of streams and of n-grams, with transformers' defaults."""
_LEAST = {"hc_count": 2, "ngram_size": 2, "ple_conv_kernel_size": 2, "seed": 0}
_MOST = {"hc_count": 64, "ngram_size": 16, "heads_per_ngram": 64, "ple_conv_kernel_size": 64}
MAX_SIZE = 1 << 27

FIELDS = (
    *qwen3_5.FIELDS,
    *(*_EXPERTS, *_INDEXER, *_STREAMS, *_N_GRAMS),
    *("norm_topk_prob", "ple_layer_ids", "ple_embed_dim"),
)

_COMPUTED = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")
"""Suffixes of the names of tensors that are computed from the config instead of read."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen4_exp`` config; raises ValueError if it cannot be run."""
    gate = hf.get("output_gate_type") or "silu"
    types = hf.get("layer_types")
    if isinstance(types, list):
        types = [qwen3_5.FULL_ATTENTION if kind == INDEXED else kind for kind in types]
    plain = {"intermediate_size": hf.get("moe_intermediate_size"), **hf, "layer_types": types, "output_gate_type": None}
    config = qwen3_5.config_from_hf(plain, max_model_len)
    fields = expert_fields(hf, *_EXPERTS)
    sizes = {name: fields.get(name, default) for name, default in (_STREAMS | _N_GRAMS).items()}
    sizes |= {name: hf.get(name) for name in _INDEXER}
    reasons = [
        f"{name}={size!r:.60} is not a whole number from {_LEAST.get(name, 1)} to {_MOST.get(name, MAX_SIZE)}"
        for name, size in sizes.items()
        if type(size) is not int or not _LEAST.get(name, 1) <= size <= _MOST.get(name, MAX_SIZE)
    ]
    if gate not in ("silu", "swish", "sigmoid"):
        reasons.append(f"output_gate_type={gate!r:.60} is not supported, only 'sigmoid' or 'silu'")
    _raise(reasons)
    linear = config.linear
    assert isinstance(linear, LinearAttention), "a model of this family has linear attention"
    shared, normalised = fields["shared_expert_intermediate_size"], fields.get("norm_topk_prob", True)
    routing = Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=normalised)
    config = replace(
        config,
        experts=Experts(routing, fields["moe_intermediate_size"], shared_size=shared, shared_gate=shared > 0),
        streams=Streams(sizes["hc_count"], sizes["hc_lowrank"]),
    )
    indexed = LayerKind(indexer=_indexer(sizes, config))
    config = replace(config, layer_kinds=tuple(kind if kind.state else indexed for kind in config.layer_kinds))
    linear = replace(linear, gate="sigmoid" if gate == "sigmoid" else "silu")
    if n_grams := _n_grams(hf, sizes, config):
        config = replace(config, n_grams=n_grams, n_gram_layers=tuple(sorted({one - 1 for one in hf["ple_layer_ids"]})))
        linear = replace(linear, further=n_grams.states(config.stream_size))
    return config.with_linear(linear)


def _raise(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")


def _indexer(sizes: dict[str, int], config: ModelConfig) -> Indexer:
    """The indexer of these sizes; raises ValueError for unsupported sizes."""
    heads, keys, dim, budget, block = (sizes[name] for name in _INDEXER)
    reasons = []
    if keys != 1:
        reasons.append(f"indexer_kv_heads={keys} is not supported, only 1")
    if not config.rope.dim <= dim <= config.head_dim:
        reasons.append(
            f"indexer_head_dim={dim} is not between the {config.rope.dim} rotating dimensions and "
            f"head_dim={config.head_dim}"
        )
    if PAGE % block or block > 16:
        reasons.append(f"indexer_compress_ratio={block} is not supported, only 1, 2, 4, 8 or 16")
    if budget % block or not 2 * PAGE <= budget <= MAX_POSITIONS:
        reasons.append(
            f"indexer_budget={budget} is not a multiple of indexer_compress_ratio={block} from {2 * PAGE} on"
        )
    _raise(reasons)
    return Indexer(block, budget // block, 0, PooledHeads(heads, dim))


def _n_grams(hf: dict[str, Any], sizes: dict[str, int], config: ModelConfig) -> NGrams | None:
    """The n-gram embeddings; None without them. Raises ValueError for invalid fields."""
    layers = hf.get("ple_layer_ids") or []
    if not layers:
        return None
    tables, width = (sizes["ngram_size"] - 1) * sizes["heads_per_ngram"], hf.get("ple_embed_dim") or config.hidden_size
    # The last layer is left out: tokens that need no attention there go through ``HyperConnectedLayer.append``, which
    # adds no n-grams.
    linear = [layer + 1 for layer, kind in enumerate(config.layer_kinds[:-1]) if kind.state]
    reasons = []
    if not isinstance(layers, list) or not all(type(layer) is int and layer in linear for layer in layers):
        reasons.append(
            f"ple_layer_ids={layers!r:.60} is not supported, only a list of layers with linear attention, counted from "
            f"1, before the last of {config.num_layers} layers"
        )
    if type(width) is not int or not 1 <= width <= MAX_SIZE or width % tables:
        reasons.append(f"ple_embed_dim={width!r:.60} is not a positive multiple of the {tables} tables")
    eos = hf.get("eos_token_id")
    if eos is None or eos == [] or not are_token_ids(eos):
        reasons.append("eos_token_id, at which n-grams end, is missing or invalid")
    _raise(reasons)
    assert eos is not None
    return NGrams(
        width=width,
        longest=sizes["ngram_size"],
        tables_each=sizes["heads_per_ngram"],
        kernel=sizes["ple_conv_kernel_size"],
        least_rows=sizes["ngram_vocab_size_base"],
        multiple=sizes["make_ngram_vocab_size_divisible_by"],
        parts=sizes["split_ngram_parts"],
        seed=sizes["seed"],
        vocab_size=config.vocab_size,
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    gone = ("model.norm.weight", ".input_layernorm.weight", ".post_attention_layernorm.weight")
    result = {name: target for name, target in qwen3_5.targets(config).items() if not name.endswith(gone)}
    result |= _mixer("model.hyper_connection_mixer", "norm", config)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, module in (("attn", "attention_mixer"), ("mlp", "mlp_mixer")):
            injected = f"{theirs}.{name}_hyper_connection"
            result |= _mixer(injected, f"{ours}.{module}", config)
            assert config.streams is not None
            result |= rows(f"{injected}.block_inject_weight", f"{ours}.{module}.injection", 0, config.streams.count)
        if (indexer := config.indexer_of(layer)) is not None and indexer.pooled is not None:
            heads, dim = indexer.pooled
            index, attention = f"{theirs}.self_attn.indexer", f"{ours}.attention.indexer"
            result |= rows(f"{index}.index_qk_proj", f"{attention}.query_key", 0, (heads + 1) * dim)
            result |= _norm(f"{index}.q_layernorm", f"{attention}.query_norm", dim)
            result |= _norm(f"{index}.k_layernorm", f"{attention}.key_norm", dim)
        if (n_grams := config.n_grams_of(layer)) is not None:
            result |= _of_n_grams(n_grams, f"{theirs}.ple", f"{ours}.n_grams", config)
    return result


def _norm(theirs: str, ours: str, size: int) -> Targets:
    return {f"{theirs}.weight": Target(f"{ours}.weight", 0, size, offset=1.0)}


def _mixer(theirs: str, ours: str, config: ModelConfig) -> Targets:
    """Targets of the weights of a ``StreamMixer``, without its injection."""
    assert config.streams is not None, "a model of this family has several streams"
    return {
        **_norm(f"{theirs}.hc_norm", f"{ours}.norm", config.stream_size),
        **rows(f"{theirs}.input_mix_weight_down", f"{ours}.down", 0, config.streams.rank),
        **rows(f"{theirs}.input_mix_weight_up", f"{ours}.up", 0, config.stream_size),
    }


def _of_n_grams(n_grams: NGrams, theirs: str, ours: str, config: ModelConfig) -> Targets:
    """Targets of n-gram embeddings. Files split the table into parts with the same number of rows."""
    joined, size = config.stream_size, -(-n_grams.rows // n_grams.parts)
    result = {
        f"{theirs}.ple_embedding.ngram_embedding.shard_{number}.weight": Target(
            f"{ours}.table.weight", start, min(start + size, n_grams.rows)
        )
        for number, start in enumerate(range(0, n_grams.rows, size))
    }
    result |= rows(f"{theirs}.key_proj", f"{ours}.key", 0, joined)
    result |= rows(f"{theirs}.value_proj", f"{ours}.value", 0, config.hidden_size)
    for name, norm in (("key", "key_norm"), ("query", "query_norm"), ("conv", "value_norm")):
        result |= _norm(f"{theirs}.norm_{name}", f"{ours}.{norm}", joined)
    result[f"{theirs}.conv1d.weight"] = Target(f"{ours}.convolution", 0, joined)
    return result


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for other weights, and for tensors that are computed from the
    config."""
    return None if name.endswith(_COMPUTED) else qwen3_5.text_weight(name)
