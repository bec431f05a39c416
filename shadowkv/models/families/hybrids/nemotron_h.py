"""Nemotron-H (NVIDIA, arXiv:2504.03624) and Nemotron 3: blocks with Mamba-2, attention, an MLP or a mixture of experts.

Each block of the files has one norm. A layer of ours is a block with Mamba-2 or attention, and the block with an MLP or
experts that follows it, if one does. Attention has no positions. MLPs and experts have no gate, and square ReLU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.layers.spec import Experts, StateSpace
from shadowkv.models.checkpoints.files import is_number, join_reasons
from shadowkv.models.configs.config_json import ROPE_OBJECTS, build_config
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Target, Targets, decoder_targets, rows
from shadowkv.ops.apply_rope.tables import no_rope
from shadowkv.ops.choose_experts.routing import Routing

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
"""Letters of ``hybrid_override_pattern``, one for each block."""
_NAMES = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
"""Names of blocks in ``layers_block_type``, which older and newer configs have instead."""

_SIZES = {"n_groups": 8, "mamba_num_heads": 128, "ssm_state_size": 128, "mamba_head_dim": 64, "conv_kernel": 4}
"""Fields of Mamba-2, with transformers' defaults."""
MAX_SIZE = 1 << 12

_ONLY = {
    "use_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "residual_in_fp32": False,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "sliding_window": None,
}
"""Fields of which only one value is supported. It is the default."""

FIELDS = (
    *_SIZES,
    *_ONLY,
    *("hybrid_override_pattern", "layers_block_type", "time_step_limit", "layer_norm_epsilon"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)

UNREAD = (
    *("hidden_act", "rms_norm_eps", "original_max_position_embeddings"),
    *("rope_theta", "partial_rotary_factor", *ROPE_OBJECTS),
)

_OTHERS = "mtp."
_PREFIX = "backbone."


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``nemotron_h`` config; raises ValueError if it cannot be run."""
    pattern = _pattern(hf)
    layers, bare, dense = list[str](), list[int](), list[int]()
    for block, following in zip(pattern, (*pattern[1:], ""), strict=True):
        if block not in (MAMBA, ATTENTION):
            continue
        if following == MLP:
            dense.append(len(layers))
        elif following != EXPERTS:
            bare.append(len(layers))
        layers.append(block)
    epsilon = hf.get("layer_norm_epsilon")
    own = {
        "head_dim": 128,
        **{name: value for name, value in hf.items() if name not in UNREAD},
        "num_hidden_layers": len(layers),
        "rms_norm_eps": 1e-5 if epsilon is None else epsilon,
    }
    config = build_config(own, max_model_len=max_model_len)
    sizes = _sizes(hf)
    return replace(
        config,
        rope=no_rope(config.head_dim),
        activation="relu2",
        layer_kinds=tuple(sizes.kind if block == MAMBA else FULL for block in layers),
        linear=sizes,
        bare_layers=tuple(bare),
        dense_layers=tuple(dense),
        experts=_experts(hf) if EXPERTS in pattern else None,
    )


def _pattern(hf: dict[str, Any]) -> str:
    """The letter of every block; raises ValueError."""
    listed, pattern = hf.get("layers_block_type"), hf.get("hybrid_override_pattern")
    reasons = []
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(block, str) and block in _NAMES for block in listed):
            reasons.append(f"layers_block_type={listed!r:.60} is not a list of {', '.join(_NAMES)}")
        elif pattern not in (None, named := "".join(_NAMES[block] for block in listed)):
            reasons.append(f"hybrid_override_pattern={pattern!r:.60} is not supported beside another layers_block_type")
        else:
            pattern = named
    if not reasons and (not isinstance(pattern, str) or set(pattern) - {*_NAMES.values()}):
        reasons.append(f"hybrid_override_pattern={pattern!r:.60} is not a text of the letters M, *, - and E")
    if reasons or not isinstance(pattern, str):
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    if hf.get("num_hidden_layers") not in (None, len(pattern)):
        stated = f"num_hidden_layers={hf['num_hidden_layers']!r:.60}"
        reasons.append(f"{stated} is not supported: the config lists {len(pattern)} blocks")
    reasons += [
        f"block {number} has an MLP or experts, and no block with Mamba-2 or attention precedes it"
        for number, (before, block) in enumerate(pairwise(" " + pattern))
        if block in (MLP, EXPERTS) and before not in (MAMBA, ATTENTION)
    ][:1]
    missing = [words for letter, words in ((MAMBA, "Mamba-2"), (ATTENTION, "attention")) if letter not in pattern]
    reasons += [f"no block has {words}" for words in missing]
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    return pattern


def _sizes(hf: dict[str, Any]) -> StateSpace:
    """The sizes of Mamba-2. Raises ValueError, also for values of other fields that are not supported."""
    sizes = {name: default if hf.get(name) is None else hf[name] for name, default in _SIZES.items()}
    reasons = [
        f"{name}={size!r:.60} is not a whole number from 1 to {MAX_SIZE}"
        for name, size in sizes.items()
        if type(size) is not int or not 1 <= size <= MAX_SIZE
    ]
    if not reasons and sizes["mamba_num_heads"] % sizes["n_groups"]:
        reasons.append("mamba_num_heads={mamba_num_heads} is not a multiple of n_groups={n_groups}".format(**sizes))
    if not reasons and sizes["conv_kernel"] < 2:
        reasons.append("conv_kernel=1 is less than 2")
    reasons += [
        f"{name}={hf[name]!r:.60} is not supported, only {value!r}"
        for name, value in _ONLY.items()
        if hf.get(name) not in (None, value)
    ]
    limits = _time_limits(hf.get("time_step_limit"))
    if limits is None:
        reasons.append(f"time_step_limit={hf['time_step_limit']!r:.60} is not a list of a least and a largest number")
    if reasons or limits is None:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    groups, heads, state_dim, head_dim, kernel = sizes.values()
    return StateSpace(groups, heads, state_dim, head_dim, kernel, limits)


def _time_limits(given: Any) -> tuple[float, float] | None:
    """The least and the largest time step; None if they are invalid."""
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, list) or len(given) != 2:
        return None
    # transformers 5 writes numbers that are not finite as objects
    least, most = (math.inf if one == {"__float__": "Infinity"} else one for one in given)
    if not is_number(least, -1) or not is_number(most, 0, math.inf) or not 0 <= least <= most:
        return None
    return float(least), float(most)


def _experts(hf: dict[str, Any]) -> Experts:
    shared = "moe_shared_expert_intermediate_size"
    fields = expert_fields(hf, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", shared)
    routing = Routing(
        fields["n_routed_experts"],
        fields["num_experts_per_tok"],
        scores="sigmoid",
        normalised=fields.get("norm_topk_prob", True),
        scale=float(fields.get("routed_scaling_factor", 1.0)),
        groups=fields.get("n_group", 1),
        groups_per_token=fields.get("topk_group", 1),
        corrected=True,
    )
    return Experts(routing, fields["moe_intermediate_size"], shared_size=fields[shared])


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    sizes = config.linear
    assert isinstance(sizes, StateSpace), "a model of this family has Mamba-2"
    modules, blocks, result = {"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"}, 0, Targets()
    for layer in range(config.num_layers):
        own, mixer = f"model.layers.{layer}", f"model.layers.{blocks}"
        blocks += 1
        modules |= {f"{own}.self_attn": f"{mixer}.mixer", f"{own}.input_layernorm": f"{mixer}.norm"}
        if layer not in config.bare_layers:
            mlp = f"model.layers.{blocks}"
            blocks += 1
            modules |= {f"{own}.mlp": f"{mlp}.mixer", f"{own}.post_attention_layernorm": f"{mlp}.norm"}
        if config.linear_of(layer) is None:
            continue
        ours, theirs = f"layers.{layer}.linear_attention", f"{mixer}.mixer"
        result |= rows(f"{theirs}.in_proj", f"{ours}.zxbcdt", 0, sizes.projected)
        result |= rows(f"{theirs}.out_proj", f"{ours}.out", 0, config.hidden_size)
        result |= rows(f"{theirs}.norm", f"{ours}.norm", 0, sizes.values)
        result[f"{theirs}.conv1d.weight"] = Target(f"{ours}.convolution", 0, sizes.channels)
        result[f"{theirs}.conv1d.bias"] = Target(f"{ours}.convolution_bias", 0, sizes.channels)
        for name, parameter in (("A_log", "log_rate"), ("dt_bias", "time_bias"), ("D", "skip")):
            result[f"{theirs}.{name}"] = Target(f"{ours}.{parameter}", 0, sizes.heads)
    for name, target in decoder_targets(config, shared_expert="shared_experts").items():
        parts = name.split(".")
        depth = 4 if name.startswith("model.layers.") else 2
        module, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        result[f"{modules[module]}.{rest}" if module in modules else name] = target
    return result


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for weights of layers that draft tokens."""
    if name.startswith(_OTHERS):
        return None
    return f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name
