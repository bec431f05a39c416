"""MiniMax-M3 (arXiv:2606.13392), the text model: most layers were trained with an indexer, which chooses the blocks of
tokens that a query attends to.

Half of each head rotates. Norms multiply by 1 + w, in float32. Experts, the shared expert and the MLPs of the first
layers have gpt-oss's clamped gate. Image encoders in the files, and layers that draft tokens, are not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import FULL, Indexer, LayerKind
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.layers.spec import Experts
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import build_config
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import MAX_POSITIONS, ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets, head_norms, rows
from shadowkv.ops.activation_rows.reference import ALPHA, LIMIT
from shadowkv.ops.choose_experts.routing import Routing

SPARSE, FULL_ATTENTION = "minimax_m3_sparse", "full_attention"

_ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": LIMIT,
}
_ONLY_SPARSE = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
"""``_ONLY`` and ``_ONLY_SPARSE`` are fields that have the same value in all published configs. Only this value is
supported."""

_SPARSE_CONFIG = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' names of the indexer's sizes -> names in ``sparse_attention_config`` of published configs."""

_DEFAULTS = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16}
_DEFAULTS |= {"index_local_blocks": 1, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072}
"""transformers' defaults."""
MAX_SIZE = 1 << 20

FIELDS = (
    *("num_local_experts", "num_experts_per_tok", "routed_scaling_factor", "rotary_dim", "num_mtp_modules"),
    *("layer_types", "mlp_layer_types", "moe_layer_freq", "sparse_attention_config", *_DEFAULTS, *_ONLY),
)

_OTHERS = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "mtp.")
_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}
_INDEXER = {
    **{f".self_attn.index_{name}.": f".self_attn.indexer.{name}." for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
    ".block_sparse_moe.e_score_": ".block_sparse_moe.gate.e_score_",
}
"""Parts of published names -> the corresponding parts of transformers' names."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``minimax_m3_vl`` config; raises ValueError if it cannot be run."""
    fields = expert_fields(hf, "num_local_experts", "num_experts_per_tok")
    sparse = fields.get("sparse_attention_config", {})
    if not isinstance(sparse, dict):
        raise ValueError(f"this config cannot be used: sparse_attention_config={sparse!r:.60} is not an object")
    reasons = [
        f"{name}={group[name]!r:.60} is not supported, only {value!r}"
        for group, only in ((fields, _ONLY), (sparse, _ONLY_SPARSE))
        for name, value in only.items()
        if group.get(name) not in (None, value)
    ]
    sizes = {name: fields.get(name, default) for name, default in _DEFAULTS.items()}
    sizes |= {name: sparse[theirs] for name, theirs in _SPARSE_CONFIG.items() if sparse.get(theirs) is not None}
    if fields.get("hidden_act", "silu") not in ("silu", "swigluoai"):
        reasons.append(f"hidden_act={fields['hidden_act']!r:.60} is not supported, only 'swigluoai'")
    reasons += [
        f"{name}={size!r:.60} is not a whole number from 1 to {MAX_SIZE}"
        for name, size in sizes.items()
        if type(size) is not int or not 1 <= size <= MAX_SIZE
    ]
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    head_dim = fields.get("head_dim", 128)
    # transformers ignores ``rotary_dim``. Published configs also have ``partial_rotary_factor``, which says the same.
    config = build_config(
        {"vocab_size": 200064, **hf, "head_dim": head_dim, "hidden_act": "silu"},
        max_model_len=max_model_len,
        default_theta=5e6,
        default_partial=fields.get("rotary_dim", head_dim) / head_dim if type(head_dim) is int else 1.0,
        qk_norm=True,
        wide_norms=True,
    )
    count = config.num_layers
    indexed = _switches({**sparse, **fields}, ("layer_types", SPARSE, FULL_ATTENTION), "sparse_attention_freq", count)
    with_experts = _switches(fields, ("mlp_layer_types", "sparse", "dense"), "moe_layer_freq", count)
    kinds = (FULL,) * count
    if indexed is not None and any(indexed):
        indexer = _indexer(sizes, config)
        kinds = tuple(LayerKind(indexer=indexer) if has else FULL for has in indexed)
    routing = Routing(
        fields["num_local_experts"],
        fields["num_experts_per_tok"],
        scores="sigmoid",
        scale=float(fields.get("routed_scaling_factor", 2.0)),
        corrected=True,
    )
    return replace(
        config,
        activation="clamped_silu",
        intermediate_size=sizes["dense_intermediate_size"],
        experts=Experts(routing, config.intermediate_size, shared_size=sizes["shared_intermediate_size"]),
        dense_layers=tuple(layer for layer, has in enumerate(with_experts or ()) if not has),
        layer_kinds=() if set(kinds) == {FULL} else kinds,
        draft_layers=fields.get("num_mtp_modules", 0),
    )


def _switches(fields: dict[str, Any], names: tuple[str, str, str], freq: str, count: int) -> list[bool] | None:
    """Reads which of ``count`` layers have a feature, such as experts. Returns None if neither field is there; raises
    ValueError for other values.

    Args:
        names: the field that transformers writes, its value for layers with the feature, and its value for others.
        freq: the field that published configs have instead. Its value is 1 for layers with the feature, 0 for others.
    """
    field, *values = names if fields.get(names[0]) is not None else (freq, 1, 0)
    given = fields.get(field)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != count or not all(value in values for value in given):
        words = (
            f"{field}={str(given)[:60]} is not supported, only {values[0]} or {values[1]} for each of {count} layers"
        )
        raise ValueError(f"this config cannot be used: {words}")
    return [value == values[0] for value in given]


def _indexer(sizes: dict[str, int], config: ModelConfig) -> Indexer:
    """The indexer of these sizes; raises ValueError for unsupported sizes."""
    heads, dim, block = (sizes[name] for name in ("index_n_heads", "index_head_dim", "index_block_size"))
    topk, local = sizes["index_topk_blocks"], sizes["index_local_blocks"]
    reasons = []
    if heads != config.num_kv_heads:
        reasons.append(f"index_n_heads={heads} is not supported, only num_key_value_heads={config.num_kv_heads}")
    if dim != config.head_dim:
        reasons.append(f"index_head_dim={dim} is not supported, only head_dim={config.head_dim}")
    if block % PAGE or block * topk > MAX_POSITIONS:
        reasons.append(f"index_block_size={block} is not a multiple of {PAGE} up to {MAX_POSITIONS // topk}")
    if local > topk:
        reasons.append(f"index_local_blocks={local} is more than index_topk_blocks={topk}")
    if block * topk < 2 * PAGE:
        reasons.append(f"index_topk_blocks={topk} of {block} tokens are fewer than {2 * PAGE} tokens")
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    return Indexer(block, topk, local)


def targets(config: ModelConfig) -> Targets:
    """Names in the files, as ``text_weight`` returns them -> parameters."""
    result = decoder_targets(config, shared_expert="shared_experts") | head_norms(config)
    dim = config.head_dim
    for layer in range(config.num_layers):
        if config.indexer_of(layer) is None:
            continue
        ours, theirs = f"layers.{layer}.attention.indexer", f"model.layers.{layer}.self_attn.indexer"
        result |= rows(f"{theirs}.q_proj", f"{ours}.query", 0, config.num_kv_heads * dim)
        result |= rows(f"{theirs}.k_proj", f"{ours}.key", 0, dim)
        result |= rows(f"{theirs}.q_norm", f"{ours}.query_norm", 0, dim)
        result |= rows(f"{theirs}.k_norm", f"{ours}.key_norm", 0, dim)
    return {
        name: replace(target, offset=1.0) if name.endswith("norm.weight") else target for name, target in result.items()
    }


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for weights of the image encoder and of layers that draft
    tokens."""
    if name.removeprefix("model.").startswith(_OTHERS):
        return None
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            name = f"{ours}{name.removeprefix(theirs)}"
            break
    for theirs, ours in _INDEXER.items():
        name = name.replace(theirs, ours)
    return name
