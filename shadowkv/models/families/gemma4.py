"""Gemma 4 (Google, 2026), the text model: layers with a sliding window and layers with full attention have different
heads.

Full layers have fewer and larger heads. RoPE rotates a quarter of their pairs of dimensions. In larger models the keys
of full layers, before their norm, are also the values. In small models the last layers attend to the keys of earlier
ones, and each layer has an input of its own (``layers/per_layer_inputs.py``). 26B-A4B has experts beside the MLP of
every layer. Encoders of images and sound in the files are not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import Heads, LayerKind
from shadowkv.layers.spec import Experts
from shadowkv.models.checkpoints.files import is_number, join_reasons
from shadowkv.models.configs.config_json import LAYER_TYPES, ROPE_OBJECTS, SLIDING, build_config, wrong_fields
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.configs.rope import rope_from_hf
from shadowkv.models.weight_names import Target, Targets, decoder_targets, rows
from shadowkv.ops.choose_experts.routing import Routing

_OF_FULL_LAYERS = ("head_dim", "num_key_value_heads")
"""Fields that a layer can have in ``per_layer_config``."""

FIELDS = (
    *("attention_bias", "sliding_window", "layer_types", "rope_local_base_freq", "hidden_activation"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
    *("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
    *("final_logit_softcapping", "use_bidirectional_attention"),
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "rope_local_base_freq": 1e4,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "vocab_size_per_layer_input": 262144,
}
"""Transformers' defaults that ``gemma4`` and ``gemma4_unified`` share, in the form of ``plain_config``. Configs leave
out fields with these values."""

_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
"""RoPE of full layers, if a config has none."""

_INPUTS = "hidden_size_per_layer_input"
_SWITCHES = ("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block")
_COUNTS = {
    "global_head_dim": (1, 1 << 12),
    "num_global_key_value_heads": (1, 1 << 12),
    "num_kv_shared_layers": (0, 1 << 10),
    "hidden_size_per_layer_input": (0, 1 << 12),
    "vocab_size_per_layer_input": (1, 1 << 24),
}
"""Smallest and largest valid values of integer fields."""

_OTHERS = (
    *("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    "model.vision_embedder.",
)
_PREFIX = "model.language_model."
"""Prefix of the text model's weights in files with encoders, whose weights have a prefix in ``_OTHERS``."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``gemma4`` or ``gemma4_unified`` config, or of the config of such a model's text model. Raises
    ValueError if the model cannot be run."""
    given = {name: value for name, value in hf.items() if value is not None or name == _INPUTS}
    hf = {**_defaults(str(hf.get("model_type"))), **given}
    hf[_INPUTS] = hf[_INPUTS] or 0  # 0 and null both mean that there are no such inputs
    if not any(name in given for name in ROPE_OBJECTS):
        hf["rope_parameters"] = _ROPE
    reasons = [*wrong_fields(hf), *_wrong(hf)]
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    types = _layer_types(hf)
    local = {"rope_theta": hf["rope_local_base_freq"]}
    of_windows = Heads(hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"])
    full = {**hf, **_full_layers(hf, types)}
    heads = Heads(hf["num_attention_heads"], full["num_key_value_heads"], full["head_dim"])
    rope = rope_from_hf(local, of_windows.head_dim, max_model_len=max_model_len)
    bias = bool(hf.get("attention_bias", False))
    config = build_config(
        {**full, "hidden_act": hf.get("hidden_act", hf["hidden_activation"])},
        max_model_len=max_model_len,
        window=LayerKind(hf["sliding_window"], rope, None if of_windows == heads else of_windows),
        layer_types=types,
        default_theta=1e6,
        embedding_scale=hf["hidden_size"] ** 0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        wide_norms=True,
        output_scale=True,
        keys_are_values=hf["attention_k_eq_v"],
        double_wide_mlp=hf["use_double_wide_mlp"],
    )
    return replace(
        config,
        num_kv_shared_layers=hf["num_kv_shared_layers"],
        hidden_size_per_layer_input=hf["hidden_size_per_layer_input"],
        vocab_size_per_layer_input=hf["vocab_size_per_layer_input"],
        final_logit_softcapping=hf.get("final_logit_softcapping"),
        experts=_experts(hf) if hf["enable_moe_block"] else None,
    )


def _defaults(model_type: str) -> dict[str, Any]:
    """The values of fields that a config of this type leaves out."""
    if model_type.startswith("gemma4_unified"):
        return {
            **_DEFAULTS,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        }
    return {**_DEFAULTS, "hidden_size_per_layer_input": 256}


def _wrong(hf: dict[str, Any]) -> list[str]:
    """Reasons for invalid values of the fields that only this family reads."""
    reasons = [f"{name}={hf[name]!r:.60} is not true or false" for name in _SWITCHES if type(hf[name]) is not bool]
    for name, (least, most) in _COUNTS.items():
        value = hf.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            reasons.append(f"{name}={value!r:.60} is not a whole number from {least} to {most}")
    rows, tokens = hf["vocab_size_per_layer_input"], hf["vocab_size"]
    if not reasons and hf[_INPUTS] and type(tokens) is int and rows < tokens:
        reasons.append(f"vocab_size_per_layer_input={rows} is less than vocab_size={tokens}")
    cap = hf.get("final_logit_softcapping")
    if cap is not None and not is_number(cap, 0):
        reasons.append(f"final_logit_softcapping={cap!r:.60} is not a positive number")
    if hf.get("use_bidirectional_attention") not in (None, "vision"):
        bidirectional = hf["use_bidirectional_attention"]
        reasons.append(f"use_bidirectional_attention={bidirectional!r:.60} is not supported, only 'vision'")
    if not hf["sliding_window"]:
        reasons.append(f"sliding_window={hf['sliding_window']!r:.60} is not a positive number")
    return reasons


def _layer_types(hf: dict[str, Any]) -> list[str]:
    """The type of every layer. The last one has full attention, whatever the config says, as in transformers."""
    types, layers = hf.get("layer_types"), hf["num_hidden_layers"]
    if types is None:
        types = [LAYER_TYPES[bool((layer + 1) % 6)] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        names = " or ".join(LAYER_TYPES)
        raise ValueError(
            f"this config cannot be used: layer_types is not a list of {names} for each of {layers} layers"
        )
    return [*types[:-1], LAYER_TYPES[0]]


def _full_layers(hf: dict[str, Any], types: list[str]) -> dict[str, int]:
    """Returns the sizes of the full layers' heads, under the names of the fields that other layers have. Released
    configs have ``global_head_dim`` and ``num_global_key_value_heads``. transformers 5 also writes
    ``per_layer_config``, which has fields of single layers. Raises ValueError if full layers have different heads."""
    of_layers = hf.get("per_layer_config")
    if of_layers is None:
        own = hf.get("num_global_key_value_heads") if hf["attention_k_eq_v"] else None
        return {"head_dim": hf["global_head_dim"], "num_key_value_heads": own or hf["num_key_value_heads"]}
    full = [str(layer) for layer, kind in enumerate(types) if kind != SLIDING]
    if of_layers == {}:  # all layers have the same heads
        return {name: hf[name] for name in _OF_FULL_LAYERS}
    sizes = list(of_layers.values()) if isinstance(of_layers, dict) else []
    alike = bool(sizes) and sorted(of_layers) == sorted(full) and all(one == sizes[0] for one in sizes)
    known = (
        alike
        and isinstance(sizes[0], dict)
        and all(
            name in _OF_FULL_LAYERS and type(value) is int and 1 <= value <= 1 << 12 for name, value in sizes[0].items()
        )
    )
    if not known:
        fields = " and ".join(_OF_FULL_LAYERS)
        raise ValueError(
            f"this config cannot be used: per_layer_config={of_layers!r:.60} does not give every layer with full "
            f"attention, and no other, the same {fields}"
        )
    return {name: hf[name] for name in _OF_FULL_LAYERS} | sizes[0]


def _experts(hf: dict[str, Any]) -> Experts:
    """The experts of a layer, with the MLP as their shared expert; raises ValueError for invalid fields."""
    fields = expert_fields(
        {**hf, "num_experts_per_tok": hf.get("top_k_experts")}, "num_experts", "top_k_experts", "moe_intermediate_size"
    )
    routing = Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=True)
    return Experts(routing, fields["moe_intermediate_size"], shared_size=hf["intermediate_size"], separate_norms=True)


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    result, hidden = decoder_targets(config), config.hidden_size
    if size := config.hidden_size_per_layer_input:
        of_layers = config.num_layers * size
        ours = "per_layer_inputs"
        table = Target(f"{ours}.table", 0, config.vocab_size_per_layer_input)
        result["model.embed_tokens_per_layer.weight"] = table
        result |= rows("model.per_layer_model_projection", f"{ours}.projection", 0, of_layers)
        result |= rows("model.per_layer_projection_norm", f"{ours}.norm", 0, size)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        norms = {"post_attention": "post_attention", "pre_feedforward": "mlp", "post_feedforward": "post_mlp"}
        for name, norm in norms.items():
            result |= rows(f"{theirs}.{name}_layernorm", f"{ours}.{norm}_norm", 0, hidden)
        dim = config.heads_of(layer).head_dim
        query = rows(f"{theirs}.self_attn.q_norm", f"{ours}.attention.query_norm", 0, dim)
        # Gemma 4 does not scale attention scores, but the cache divides them by sqrt(dim). To undo this, the weights of
        # the query norm are multiplied by sqrt(dim).
        result |= {name: replace(target, scale=dim**0.5) for name, target in query.items()}
        if not config.reuses_keys(layer):
            result |= rows(f"{theirs}.self_attn.k_norm", f"{ours}.attention.key_norm", 0, dim)
        result[f"{theirs}.layer_scalar"] = Target(f"{ours}.scale", 0, 1)
        if size:
            result |= rows(f"{theirs}.per_layer_input_gate", f"{ours}.added_input.gate", 0, size)
            result |= rows(f"{theirs}.per_layer_projection", f"{ours}.added_input.out", 0, hidden)
            result |= rows(f"{theirs}.post_per_layer_input_norm", f"{ours}.added_input.norm", 0, hidden)
        if config.experts is not None:
            result |= _router(f"{theirs}", f"{ours}.mlp", config.experts.routing.experts, hidden)
    return result if config.experts is None else {_renamed(name): target for name, target in result.items()}


def _router(theirs: str, ours: str, experts: int, hidden: int) -> Targets:
    """Targets of the router's scales and of the experts' norms. The router's projection is not among them."""
    targets: Targets = {
        # The router normalises without a weight, then multiplies by its scale and 1/sqrt(hidden).
        f"{theirs}.router.scale": Target(f"{ours}.router_norm.weight", 0, hidden, scale=hidden**-0.5),
        f"{theirs}.router.per_expert_scale": Target(f"{ours}.expert_scale", 0, experts),
    }
    names = {"pre_feedforward_layernorm_2": "routed", "post_feedforward_layernorm_2": "routed_out"}
    for name, norm in {**names, "post_feedforward_layernorm_1": "shared_out"}.items():
        targets |= rows(f"{theirs}.{name}", f"{ours}.{norm}_norm", 0, hidden)
    return targets


def _renamed(name: str) -> str:
    """Returns the name that a weight of ``decoder_targets`` has in the files. In the files, routed experts are beside
    the MLP, and the MLP is the shared expert."""
    renamed = {".mlp.experts.": ".experts.", ".mlp.gate.": ".router.proj.", ".mlp.shared_expert.": ".mlp."}
    for ours, theirs in renamed.items():
        name = name.replace(ours, theirs)
    return name


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for weights of encoders."""
    if name.startswith(_OTHERS):
        return None
    return f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name
