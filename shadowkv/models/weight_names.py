"""Maps names of weights in a family's files to rows of the decoder's joined parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shadowkv.layers.spec import Experts
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.ops.activation_rows.reference import inputs_of


@dataclass(frozen=True)
class Target:
    """Where a weight goes: into rows ``start`` to ``stop`` of a decoder's parameter. The file's numbers plus ``offset``
    are multiplied by ``scale``.

    Attributes:
        further: more ranges of the parameter's rows, for the weight's rows after the first ``stop - start``. A weight
            that joins several projections has them.
    """

    parameter: str
    start: int
    stop: int
    offset: float = 0.0
    scale: float = 1.0
    further: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the parameter's rows, in the order of the weight's rows."""
        return ((self.start, self.stop), *self.further)

    @property
    def num_rows(self) -> int:
        """Number of the weight's rows."""
        return sum(stop - start for start, stop in self.spans)


Targets = dict[str, Target]


def decoder_targets(
    config: ModelConfig,
    *,
    joined_qkv: bool = False,
    joined_gate_up: bool = False,
    shared_expert: str = "shared_expert",
    router: str = "gate",
) -> Targets:
    """Maps Hugging Face's names to targets, for the parts that all families share. Linear attention is not among them.

    Args:
        config: the model.
        joined_qkv: whether the files hold q, k and v as one ``qkv_proj``.
        joined_gate_up: whether the files hold gate and up as one ``gate_up_proj``.
        shared_expert: name of the expert that takes every token.
        router: name of the module that chooses experts.
    """
    hidden = config.hidden_size
    targets = {
        "model.embed_tokens.weight": Target("embedding", 0, config.vocab_size),
        "model.norm.weight": Target("norm.weight", 0, hidden),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = Target("head", 0, config.vocab_size)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, qkv = f"{theirs}.self_attn", f"{ours}.attention.qkv"
        heads = config.heads_of(layer)
        q, kv = heads.num_query_heads * heads.head_dim * (2 if config.output_gate else 1), heads.kv_dim
        if joined_qkv:
            targets |= rows(f"{attention}.qkv_proj", qkv, 0, q + 2 * kv, config.qkv_bias)
        elif config.linear_of(layer) is None:
            targets |= rows(f"{attention}.q_proj", qkv, 0, q, config.qkv_bias)
            if not config.reuses_keys(layer):
                targets |= rows(f"{attention}.k_proj", qkv, q, q + kv, config.qkv_bias)
            if not config.reuses_keys(layer) and not config.has_keys_as_values(layer):
                targets |= rows(f"{attention}.v_proj", qkv, q + kv, q + 2 * kv, config.qkv_bias)
        if config.linear_of(layer) is None:
            targets |= rows(f"{attention}.o_proj", f"{ours}.attention.out", 0, hidden, config.attention_out_bias)
        targets |= rows(f"{theirs}.input_layernorm", f"{ours}.attention_norm", 0, hidden)
        experts, size, gated = config.experts_of(layer), config.width_of(layer), inputs_of(config.activation) == 2
        if experts is not None:
            targets |= _experts(f"{theirs}.mlp", f"{ours}.mlp", hidden, experts, gated, shared_expert, router)
        elif size:
            targets |= _mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, size, gated, joined_gate_up=joined_gate_up)
        if layer not in config.bare_layers:
            targets |= rows(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", 0, hidden)
    return targets


def head_norms(config: ModelConfig) -> Targets:
    """Targets of the norms of queries and keys, if the model has them."""
    targets: Targets = {}
    heads = config.normed_heads or ((1, 1) if config.qk_norm else ())
    with_attention = (layer for layer in range(config.num_layers) if config.linear_of(layer) is None)
    for layer in with_attention if heads else ():
        for theirs, ours, together in zip(("q_norm", "k_norm"), ("query_norm", "key_norm"), heads, strict=True):
            module = f"layers.{layer}.attention.{ours}"
            targets |= rows(f"model.layers.{layer}.self_attn.{theirs}", module, 0, together * config.head_dim)
    return targets


@dataclass(frozen=True)
class DraftHeadNames:
    """Names of a draft head's weights in a family's files. ``{}`` stands for the number of the model's layers.

    Attributes:
        layer: the decoder layer.
        embedding_norm, hidden_norm, projection, norm: the modules of ``DraftHead``.
        copies: modules that are copies of the model's tables, and are not read.
        norm_offset: number that is added to the weights of the three norms above (``Target``).
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, ...] = ()
    norm_offset: float = 0.0

    def prefixes(self, config: ModelConfig) -> tuple[str, ...]:
        """Prefixes of the names of the head's weights."""
        names = self.layer, self.embedding_norm, self.hidden_norm, self.projection, self.norm
        return tuple(f"{name.format(config.num_layers)}." for name in names)

    def copied(self, config: ModelConfig) -> tuple[str, ...]:
        """Prefixes of the names of ``copies``."""
        return tuple(f"{name.format(config.num_layers)}." for name in self.copies)


def draft_head_targets(
    config: ModelConfig, targets: Callable[[ModelConfig], Targets], names: DraftHeadNames
) -> Targets:
    """Returns the targets of a draft head; none if ``config`` has no head. ``targets`` is the family's function of that
    name."""
    if not config.draft_head:
        return {}
    layers, hidden = config.num_layers, config.hidden_size
    theirs, result = (
        names.layer.format(layers),
        rows(names.projection.format(layers), "draft_head.projection", 0, hidden),
    )
    for name, target in targets(config.of_draft_head).items():
        if name.startswith("model.layers.0."):
            ours = replace(target, parameter=f"draft_head.{target.parameter}")
            result[f"{theirs}.{name.removeprefix('model.layers.0.')}"] = ours
    norms = {"embedding_norm": names.embedding_norm, "hidden_norm": names.hidden_norm, "norm": names.norm}
    for module, name in norms.items():
        target = Target(f"draft_head.{module}.weight", 0, hidden, names.norm_offset)
        result[f"{name.format(layers)}.weight"] = target
    return result


def rows(theirs: str, ours: str, start: int, stop: int, bias: bool = False) -> Targets:
    """Targets of one module: its weight, and its bias if it has one."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{theirs}.{kind}": Target(f"{ours}.{kind}", start, stop) for kind in kinds}


def _mlp(
    theirs: str,
    ours: str,
    hidden: int,
    size: int,
    gated: bool,
    number: int = 0,
    joined_gate_up: bool = False,
    bias: bool = False,
) -> Targets:
    """Returns the targets of an MLP, with or without a gate. If parameters hold the rows of several MLPs, this MLP is
    the ``number``-th of them."""
    first = (2 if gated else 1) * number * size
    down = rows(f"{theirs}.down_proj", f"{ours}.down", number * hidden, (number + 1) * hidden, bias)
    if joined_gate_up:
        return rows(f"{theirs}.gate_up_proj", f"{ours}.gate_up", first, first + 2 * size) | down
    if not gated:
        return rows(f"{theirs}.up_proj", f"{ours}.gate_up", first, first + size, bias) | down
    gate = rows(f"{theirs}.gate_proj", f"{ours}.gate_up", first, first + size, bias)
    return gate | rows(f"{theirs}.up_proj", f"{ours}.gate_up", first + size, first + 2 * size, bias) | down


def _experts(theirs: str, ours: str, hidden: int, experts: Experts, gated: bool, shared: str, router: str) -> Targets:
    """Targets of a mixture of experts, with separate names for all experts (``checkpoints.experts``)."""
    count = experts.routing.experts
    targets = rows(f"{theirs}.{router}", f"{ours}.router.logits", 0, count, experts.biases)
    if experts.routing.corrected:
        correction = f"{theirs}.{router}.e_score_correction_bias"
        targets[correction] = Target(f"{ours}.router.correction_bias", 0, count)
    for expert in range(count):
        mlp = f"{theirs}.experts.{expert}"
        targets |= _mlp(mlp, f"{ours}.experts", hidden, experts.intermediate_size, gated, expert, bias=experts.biases)
    if experts.shared_size:
        targets |= _mlp(f"{theirs}.{shared}", f"{ours}.shared", hidden, experts.shared_size, gated)
    if experts.shared_gate:
        targets |= rows(f"{theirs}.{shared}_gate", f"{ours}.shared_gate", 0, 1)
    return targets
