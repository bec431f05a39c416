"""ModelConfig: everything about a model except its weights, in the same form for every source and family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shadowkv.kvcache.policy.shape import FULL, Heads, Indexer, LayerKind, ModelShape
from shadowkv.layers.spec import Experts, LinearAttention, NGrams, StateSpace, Streams
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.grouped_matmul.cuda import MAX_EXPERTS
from shadowkv.ops.grouped_matmul.cuda import MULTIPLE as EXPERTS_MULTIPLE
from shadowkv.ops.scaled_matmul.cuda import MULTIPLE
from shadowkv.wording import SettingsError, counted

MAX_POSITIONS = 1 << 30
DRAFT_WINDOW = 2048
"""Number of newest tokens that a draft head attends to. Its drafts need little context, and its cache stays small."""
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 16
"""Maximum number of experts in all layers together. It bounds the number of tensor names, and real models have far
fewer experts."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model.

    Attributes:
        architecture: family, the ``model_type`` of Hugging Face configs.
        intermediate_size: inner width of the MLP, in layers that have one.
        num_query_heads, num_kv_heads, head_dim: heads of layers whose kind does not have its own
            (``LayerKind.heads``).
        max_position: longest sequence, in tokens, that the model supports.
        experts: the experts of all layers except ``dense_layers`` and ``bare_layers``; None if no layer has experts.
        dense_layers: numbers of the layers with an MLP, in a model with experts.
        bare_layers: numbers of the layers with neither an MLP nor experts.
        draft_layers: number of layers in the files that draft tokens. They follow the other layers.
        draft_head: whether the first of these layers is part of the model (``DraftHead``). The weights of the others
            are not read.
        normed_draft_states: as in ``DraftHead``.
        layer_kinds: the kind of every layer; empty if all layers have full attention.
        linear: the linear attention or the state space model of the layers whose kind has a state; None if there are
            none.
        num_kv_shared_layers: how many of the last layers have no keys and values of their own. Each of them attends to
            the keys and values of the last layer of its kind before these layers.
        keys_are_values: whether keys, before their norm, are also the values, in layers with full attention.
        double_wide_mlp: whether the MLP, or the shared expert, is twice as wide in layers that reuse keys.
        hidden_size_per_layer_input: size of a token's input to a single layer (``PerLayerInputs``); 0 if layers have no
            such inputs.
        vocab_size_per_layer_input: number of rows of the table of these inputs.
        streams: as in ``LayerSpec``.
        n_grams: sizes of the n-gram embeddings of ``n_gram_layers``; None without them.
        n_gram_layers: numbers of the layers that add n-gram embeddings.
        output_scale: as in ``LayerSpec``.
        final_logit_softcapping: c, if each logit x is replaced by c tanh(x / c); None without a cap.
        activation: activation of the MLP, by its name in Hugging Face configs (``LayerSpec``).
        embedding_scale: factor of embedded tokens. The factor is rounded to the dtype of the weights.
        query_scale: factor of queries, in addition to attention's 1/sqrt(head_dim). It is multiplied into the weights
            of the queries' norm when they load.
        qkv_bias, attention_out_bias, qk_norm, value_norm, normed_heads, sinks, output_gate, post_norms: as in
            ``LayerSpec``.
        wide_norms: whether the weights of norms are float32 even if other weights are not. Families that add 1 to these
            weights need this, because a narrower dtype would round the sum.
        quantization: ``fp8`` if projections multiply weights and activations in fp8; None otherwise, however weights
            are stored.
        eos_token_ids: tokens that each end a generation.
        bos_token_id: token that starts a sequence, if the model has one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    activation: str = "silu"
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    normed_heads: tuple[int, int] | None = None
    sinks: bool = False
    output_gate: bool = False
    post_norms: bool = False
    wide_norms: bool = False
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    bare_layers: tuple[int, ...] = ()
    draft_layers: int = 0
    draft_head: bool = False
    normed_draft_states: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    linear: LinearAttention | StateSpace | None = None
    num_kv_shared_layers: int = 0
    keys_are_values: bool = False
    double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    streams: Streams | None = None
    n_grams: NGrams | None = None
    n_gram_layers: tuple[int, ...] = ()
    output_scale: bool = False
    final_logit_softcapping: float | None = None
    quantization: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        reasons = [
            f"{name}={getattr(self, name)} is not a positive number"
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_query_heads",
                "num_kv_heads",
                "head_dim",
                "rms_norm_eps",
                "max_position",
            )
            if not getattr(self, name) > 0
        ]
        heads = Heads(self.num_query_heads, self.num_kv_heads, self.head_dim)
        of_layers = ((kind.heads or heads, kind.rope or self.rope) for kind in self.layer_kinds if not kind.state)
        for own, rope in dict.fromkeys(((heads, self.rope), *of_layers)):
            reasons += _heads_reasons(own) + _rope_reasons(rope, own.head_dim)
        reasons += self._shared_reasons()
        if self.max_position > MAX_POSITIONS:
            reasons.append(f"max_position={self.max_position} is more than {MAX_POSITIONS}")
        outside = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            reasons.append(f"eos tokens {outside} are outside the vocabulary of {self.vocab_size}")
        if self.experts is not None:
            reasons += _wrong_experts(self.experts, self.hidden_size)
            if (experts := self.num_layers * self.experts.routing.experts) > MAX_EXPERTS_OF_ALL_LAYERS:
                reasons.append(f"{experts} experts in all layers are more than {MAX_EXPERTS_OF_ALL_LAYERS}")
        if self.quantization not in (None, "fp8"):
            reasons.append(f"quantization={self.quantization!r} is not fp8")
        if self.quantization == "fp8":
            widths = {
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size if self.has_mlps else 0,
                "num_query_heads x head_dim": self.num_query_heads * self.head_dim,
                "2 x num_kv_heads x head_dim": 2 * self.num_kv_heads * self.head_dim,
                "hidden_size_per_layer_input": self.hidden_size_per_layer_input,
                **({} if self.linear is None else self.linear.widths),
            }
            reasons += [
                f"fp8 weights need sizes that are multiples of {MULTIPLE}, and {name} is {width}"
                for name, width in widths.items()
                if width % MULTIPLE
            ]
        if reasons:
            raise ValueError(f"this {self.architecture} config cannot be used: {join_reasons(reasons)}")

    def _shared_reasons(self) -> list[str]:
        """Reasons why the last layers cannot attend to other layers' keys."""
        shared, own = self.num_kv_shared_layers, self.num_layers - self.num_kv_shared_layers
        if not shared:
            return []
        if not 0 <= shared < self.num_layers:
            return [f"num_kv_shared_layers={shared} is not less than the {self.num_layers} layers"]
        kinds = self.layer_kinds or (FULL,) * self.num_layers
        lacking = [
            f"layer {layer} of {kinds[layer]}"
            for layer in range(own, self.num_layers)
            if kinds[layer] not in kinds[:own]
        ]
        return [f"{lacking[0]} has no earlier layer of its kind with keys"] if lacking else []

    def heads_of(self, layer: int) -> Heads:
        """The heads of a layer."""
        own = self.layer_kinds[layer].heads if self.layer_kinds else None
        return self.shape.heads if own is None else own

    def reuses_keys(self, layer: int) -> bool:
        """Whether a layer attends to an earlier layer's keys and values."""
        return layer >= self.num_layers - self.num_kv_shared_layers

    def cached_as(self, layer: int) -> int:
        """The layer number under which the cache has the keys and values that a layer attends to, or its recurrent
        state."""
        if not self.reuses_keys(layer):
            return layer
        kinds, own = self.layer_kinds or (FULL,) * self.num_layers, self.num_layers - self.num_kv_shared_layers
        return max(other for other in range(own) if kinds[other] == kinds[layer])

    def has_keys_as_values(self, layer: int) -> bool:
        """Whether a layer's keys, before their norm, are also its values."""
        return self.keys_are_values and (not self.layer_kinds or self.layer_kinds[layer] == FULL)

    def widening_of(self, layer: int) -> int:
        """Factor by which the inner width of a layer's MLP or shared expert is larger than in other layers."""
        return 2 if self.double_wide_mlp and self.reuses_keys(layer) else 1

    def width_of(self, layer: int) -> int:
        """Inner width of a layer's MLP; 0 if the layer has none."""
        if layer in self.bare_layers or self.experts_of(layer) is not None:
            return 0
        return self.intermediate_size * self.widening_of(layer)

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None if it has none."""
        if self.experts is None or layer in (*self.dense_layers, *self.bare_layers):
            return None
        return replace(self.experts, shared_size=self.experts.shared_size * self.widening_of(layer))

    def linear_of(self, layer: int) -> LinearAttention | StateSpace | None:
        """The linear attention or the state space model of a layer; None if it has softmax attention."""
        return self.linear if self.layer_kinds and self.layer_kinds[layer].state else None

    def n_grams_of(self, layer: int) -> NGrams | None:
        """The n-gram embeddings of a layer; None if it has none."""
        if self.n_grams is None or layer not in self.n_gram_layers:
            return None
        return replace(self.n_grams, number=self.n_gram_layers.index(layer))

    @property
    def stream_size(self) -> int:
        """Dimensions of all residual streams together."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    def indexer_of(self, layer: int) -> Indexer | None:
        """The indexer of a layer; None if it has none."""
        return self.layer_kinds[layer].indexer if self.layer_kinds else None

    @property
    def of_draft_head(self) -> ModelConfig:
        """The draft head as a model of one layer. Its attention has a window of ``DRAFT_WINDOW`` tokens."""
        return replace(
            self,
            num_layers=1,
            layer_kinds=(LayerKind(DRAFT_WINDOW),),
            dense_layers=(),
            bare_layers=(),
            draft_layers=0,
            draft_head=False,
        )

    def with_linear(self, linear: LinearAttention | StateSpace) -> ModelConfig:
        """The config with other sizes of linear attention or of the state space model."""
        kinds = tuple(linear.kind if kind.state else kind for kind in self.layer_kinds)
        return replace(self, linear=linear, layer_kinds=kinds)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.experts_of(layer) is not None for layer in range(self.num_layers))

    @property
    def has_mlps(self) -> bool:
        """Whether any layer has an MLP of ``intermediate_size``."""
        return any(self.width_of(layer) for layer in range(self.num_layers))

    @property
    def shape(self) -> ModelShape:
        """The model's sizes as the cache needs them."""
        own, kinds = self.num_layers - self.num_kv_shared_layers, self.layer_kinds or (FULL,) * self.num_layers
        return ModelShape(
            own,
            self.num_query_heads,
            self.num_kv_heads,
            self.head_dim,
            self.layer_kinds[:own],
            self.qkv_bias,
            self.sinks,
            kinds[own:],
        )

    def with_limits(self, max_model_len: int | None, another_base: bool = False) -> ModelConfig:
        """Returns the config for sequences of up to ``max_model_len`` tokens; None means ``max_position``. Sliding
        windows of at least this length hide nothing and are removed.

        ``another_base`` says that the user has set another RoPE base than the files have. Then only the user knows how
        long sequences can be, and ``max_model_len`` replaces ``max_position``. Raises SettingsError if
        ``max_model_len`` exceeds what the model supports.
        """
        config = self
        if another_base and max_model_len is not None:
            config = replace(config, max_position=max_model_len)
        if max_model_len is not None and max_model_len > config.max_position:
            positions = counted(config.max_position, "position")
            raise SettingsError(
                f"max_model_len={max_model_len} is more than the {positions} that this "
                f"{config.architecture} model supports; to extend it, set a rope_scaling in hf_overrides, or the "
                "rope_theta that an adapter was trained with",
                ["max_model_len", "hf_overrides"],
            )
        longest = max_model_len or config.max_position
        kinds = tuple(
            kind if kind.rope or kind.heads or (kind.window or 0) < longest else FULL for kind in config.layer_kinds
        )
        return replace(config, layer_kinds=() if set(kinds) <= {FULL} else kinds)


def _heads_reasons(heads: Heads) -> list[str]:
    """Reasons why a layer cannot have these heads."""
    query, kv, _ = heads
    return [] if kv <= 0 or not query % kv else [f"num_query_heads={query} is not a multiple of num_kv_heads={kv}"]


def _wrong_experts(experts: Experts, hidden_size: int) -> list[str]:
    """Reasons why a layer cannot have these experts."""
    routing = experts.routing
    of_groups, more = divmod(routing.experts, routing.groups) if routing.groups > 0 else (0, 1)
    reasons = [
        f"{name}={value} is not a number from {least} to {most}"
        for name, value, least, most in (
            ("number of experts", routing.experts, 1, MAX_EXPERTS),
            ("experts per token", routing.per_token, 1, routing.experts),
            ("groups of experts", routing.groups, 1, routing.experts),
            ("groups per token", routing.groups_per_token, 1, routing.groups),
        )
        if not least <= value <= most
    ]
    if routing.groups > 1 and (more or of_groups < 2):
        reasons.append(f"{routing.experts} experts cannot be divided into {routing.groups} equal groups of two or more")
    elif routing.per_token > routing.groups_per_token * of_groups:
        reasons.append(f"{routing.per_token} experts per token are more than {routing.groups_per_token} groups have")
    widths = {"hidden_size": hidden_size, "experts' intermediate_size": experts.intermediate_size}
    reasons += [
        f"experts need sizes that are multiples of {EXPERTS_MULTIPLE}, and {name} is {width}"
        for name, width in widths.items()
        if width <= 0 or width % EXPERTS_MULTIPLE
    ]
    return reasons


def _rope_reasons(rope: RopeConfig, head_dim: int) -> list[str]:
    """Reasons why a RoPE does not fit heads of ``head_dim``."""
    reasons = []
    if rope.head_dim != head_dim:
        reasons.append(f"RoPE's head_dim={rope.head_dim} is not the model's {head_dim}")
    if not 0 < rope.dim <= head_dim or rope.dim % 2:
        reasons.append(f"{rope.dim} rotating dimensions: must be an even number from 2 to head_dim={head_dim}")
    if rope.theta <= 0:
        reasons.append(f"rope theta={rope.theta} is not a positive number")
    if rope.scaling not in ("none", "longrope") and rope.factor <= 0:
        reasons.append(f"rope scaling factor={rope.factor} is not a positive number")
    if rope.scaling in ("llama3", "yarn") and rope.original_max_position <= 0:
        reasons.append(f"rope scaling {rope.scaling} needs original_max_position_embeddings")
    if rope.scaling == "longrope" and len(rope.factors) != rope.dim // 2:
        reasons.append(f"longrope has {len(rope.factors)} factors for {rope.dim // 2} frequencies")
    if rope.scaling == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        low, high = rope.low_freq_factor, rope.high_freq_factor
        reasons.append(f"low_freq_factor={low} is not between 0 and high_freq_factor={high}")
    if not reasons and not rope.is_finite:
        reasons.append(f"its RoPE has frequencies that are not finite: {rope}")
    return reasons
