"""``LayerSpec``: the sizes and options of a decoder layer. ``projection`` makes a projection of the kind that the spec
asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from shadowkv.kvcache.policy.shape import Heads, Indexer, LayerKind, StateArray
from shadowkv.layers.group import Group
from shadowkv.layers.linear import FP8Linear, Linear
from shadowkv.layers.quantized_matrix import QuantizedLinear, RowBlock
from shadowkv.ops.choose_experts.routing import Routing


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces the MLP in some layers.

    Attributes:
        routing: how tokens choose experts.
        intermediate_size: inner width of an expert.
        shared_size: inner width of the shared expert, which all tokens use; 0 if there is none.
        shared_gate: whether the shared expert's output is multiplied by a gate: the sigmoid of a learned projection of
            the token's hidden state.
        biases: whether the router and both products of the routed experts have a bias.
        separate_norms: whether the router, the routed experts and the shared expert have norms of their own, and the
            router scales the weight of each expert (Gemma 4, ``MixtureOfNormedExperts``).
        held: the experts on this rank, as a range [first, stop); None for all.
    """

    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    separate_norms: bool = False
    held: tuple[int, int] | None = None

    @property
    def here(self) -> tuple[int, int]:
        """The experts on this rank, as a range [first, stop)."""
        return self.held or (0, self.routing.experts)

    @property
    def count(self) -> int:
        """Number of experts on this rank."""
        first, last = self.here
        return last - first


CONVOLUTION, RECURRENT = "convolution", "recurrent"
"""Names of the states of a layer with linear attention."""
N_GRAM_TOKENS, N_GRAM_INPUTS = "n_gram_tokens", "n_gram_inputs"
"""Names of the states of a layer with n-grams: its newest tokens, and the newest inputs of its convolution."""


@dataclass(frozen=True)
class Streams:
    """The residual streams of a model with hyper-connections (``StreamMixer``).

    Attributes:
        count: S, the number of streams.
        rank: rank of the low-rank gate that mixes the streams.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class NGrams:
    """Sizes of the n-gram embeddings of a layer (``NGramInput``). The hash functions are those of the published code:
    an n-gram's token ids are multiplied by odd numbers from SplitMix64 and combined by XOR. The row of a table is
    the result modulo the table's number of rows, which is a prime number that no other table has.

    Attributes:
        width: how many numbers a token looks up in all tables together.
        longest: number of tokens of the longest n-grams. The shortest n-grams have two tokens.
        tables_each: number of tables for the n-grams of one length.
        kernel: kernel size of the convolution, whose dilation is ``longest`` tokens.
        least_rows: lower bound of the tables' numbers of rows. Each table gets the next prime from this number on.
        multiple: the number of rows of all tables together is padded to a multiple of this number.
        parts: number of tensors into which checkpoint files split the rows of all tables together.
        seed, vocab_size: determine the multipliers.
        eos_token_id: token that ends a text. N-grams do not reach back beyond it.
        number: number of this layer among the layers with n-grams.
    """

    width: int
    longest: int
    tables_each: int
    kernel: int
    least_rows: int
    multiple: int
    parts: int
    seed: int
    vocab_size: int
    eos_token_id: int
    number: int = 0

    @property
    def tables(self) -> int:
        """Number of tables."""
        return (self.longest - 1) * self.tables_each

    @cached_property
    def primes(self) -> list[int]:
        """Number of rows of each of the layer's tables."""
        primes, candidate = list[int](), self.least_rows
        while len(primes) < (self.number + 1) * self.tables:
            if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
                primes.append(candidate)
            candidate += 1
        return primes[-self.tables :]

    @property
    def rows(self) -> int:
        """Number of rows of all tables together, with padding."""
        return -(-sum(self.primes) // self.multiple) * self.multiple

    @property
    def multipliers(self) -> list[int]:
        """The multiplier of each token of an n-gram, newest first."""
        half = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        base = self.seed + 10007 * self.number
        return [2 * (_splitmix64(base + _GAMMA * (back + 1)) % half) + 1 for back in range(self.longest)]

    def states(self, channels: int) -> tuple[StateArray, ...]:
        """The arrays of a sequence's state in a layer with n-grams. ``channels`` is the number of dimensions of all
        streams together."""
        inputs = StateArray(N_GRAM_INPUTS, (channels, (self.kernel - 1) * self.longest))
        return StateArray(N_GRAM_TOKENS, (1, self.longest - 1)), inputs


_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    """Returns the number that SplitMix64 (Steele, Lea, Flood 2014) generates from the state ``value``."""
    mask = (1 << 64) - 1
    value = ((value & mask) + _GAMMA) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@dataclass(frozen=True)
class LinearAttention:
    """The linear attention that replaces attention in some layers (``GatedDeltaNet``).

    Attributes:
        key_heads: heads of queries and keys; divides ``value_heads``.
        value_heads: heads of values.
        key_dim, value_dim: dimensions of a head.
        kernel: width of the convolution, in tokens.
        tiled: whether value heads use the key heads in turn, as in GGUF files: value head n uses key head
            n mod ``key_heads``. Otherwise, neighbouring value heads use the same key head.
        joined: input projections that checkpoint files have in one tensor, key head by key head: ``qkvz`` for queries,
            keys, values and output gates, ``ba`` for the state's gates, or both.
        gate: activation of the output gate, ``silu`` or ``sigmoid``.
        further: further arrays in the layers' state (``NGrams.states``).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiled: bool = False
    joined: tuple[str, ...] = ()
    gate: str = "silu"
    further: tuple[StateArray, ...] = ()

    @property
    def shares(self) -> tuple[int, str]:
        """How many equal parts the layer can be divided into, and the name of what they are."""
        return self.key_heads, "key head"

    def part(self, shares: int) -> LinearAttention:
        """The sizes of a rank that has some of the ``shares``."""
        return replace(self, key_heads=shares, value_heads=shares * self.value_heads // self.key_heads)

    @property
    def widths(self) -> dict[str, int]:
        """Names of sizes of the layer's products, with the sizes."""
        return {"keys of linear attention": self.keys, "values of linear attention": self.values}

    @property
    def keys(self) -> int:
        """Number of dimensions of all key heads together, and also of all query heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of dimensions of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def kind(self) -> LayerKind:
        """The layers' kind, which says what a cache keeps for each sequence."""
        matrix = self.value_heads, self.key_dim, self.value_dim
        inputs = StateArray(CONVOLUTION, (self.channels, self.kernel - 1))
        return LayerKind(state=(inputs, StateArray(RECURRENT, matrix, sums=True), *self.further))


@dataclass(frozen=True)
class StateSpace:
    """The state space model that replaces attention in some layers (``Mamba2``).

    Attributes:
        groups: groups of heads. The heads of a group share what goes into their states (B) and what reads them (C).
        heads: heads of all groups; a multiple of ``groups``.
        state_dim: N, dimensions of B and C.
        head_dim: P, dimensions of a head.
        kernel: width of the convolution, in tokens.
        time_limits: the least and the largest time step.
    """

    groups: int
    heads: int
    state_dim: int
    head_dim: int
    kernel: int
    time_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def shares(self) -> tuple[int, str]:
        """As ``LinearAttention.shares``."""
        return self.groups, "group"

    def part(self, shares: int) -> StateSpace:
        """As ``LinearAttention.part``."""
        return replace(self, groups=shares, heads=shares * self.heads // self.groups)

    @property
    def widths(self) -> dict[str, int]:
        """As ``LinearAttention.widths``."""
        return {"inputs of Mamba-2": self.values, "outputs of Mamba-2's first projection": self.projected}

    @property
    def keys(self) -> int:
        """Number of dimensions of B in all groups together, and also of C."""
        return self.groups * self.state_dim

    @property
    def values(self) -> int:
        """Number of dimensions of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: the heads' inputs, B and C."""
        return self.values + 2 * self.keys

    @property
    def projected(self) -> int:
        """Outputs of the first projection: output gates, the convolution's inputs and time steps."""
        return self.values + self.channels + self.heads

    @property
    def kind(self) -> LayerKind:
        """As ``LinearAttention.kind``."""
        inputs = StateArray(CONVOLUTION, (self.channels, self.kernel - 1))
        return LayerKind(state=(inputs, StateArray(RECURRENT, (self.heads, self.state_dim, self.head_dim), sums=True)))


PLACES = {
    "device": "on the device",
    "host": "in host memory, read by rows",
    "files": "in the files, read by rows",
}
"""Places of tables, and how descriptions name them."""


class TableForm(NamedTuple):
    """How tables of n-gram embeddings are stored (``RowTable``).

    Attributes:
        place: ``device``; ``host`` for host memory, which a GPU reads through its address; ``files`` for files that are
            mapped into the memory of a CPU.
        dtype: dtype of the stored numbers, such as float8_e4m3fn; None for the dtype of activations. Rows are converted
            to the dtype of activations when they are read.
    """

    place: Literal["device", "host", "files"] = "device"
    dtype: torch.dtype | None = None


ON_DEVICE = TableForm()
"""On the device, in the dtype of activations."""


@dataclass(frozen=True)
class LayerSpec:
    """The spec of one decoder layer. Layers of a model differ only in the attributes up to ``row_blocks``.

    Attributes:
        heads: heads and head dimensions.
        cached_as: the layer number under which the cache has what this layer reads: the keys and values that it attends
            to, or its recurrent state.
        reuses_keys: whether the layer attends to an earlier layer's keys and values, and has none of its own.
        keys_are_values: whether keys, before their norm, are also the values.
        intermediate_size: I, width of the MLP; 0 if the layer has neither an MLP nor experts.
        experts: the mixture of experts that replaces the MLP; None for an MLP.
        linear: the linear attention or the state space model that replaces attention; None for attention.
        indexer: the indexer that selects what a query attends to; None without one.
        n_grams: the n-gram embeddings that the layer adds to all streams; None without them.
        row_blocks: the row blocks of each weight that stays quantized as in the checkpoint, by the weight's name within
            the layer.
        hidden_size: D, width of the residual stream.
        rms_norm_eps: added to the mean square in every RMSNorm.
        activation: activation of the MLP, one that the op ``gated_activation`` supports. The name is the one in
            Hugging Face configs, if they have one.
        qkv_bias: whether the query, key and value projections have a bias.
        out_bias: whether the attention's output projection has a bias.
        qk_norm: whether each head's queries and keys are RMS-normalised before RoPE.
        normed_heads: the numbers of query and kv heads of all ranks together, if all heads of a token are normalised
            together. None if each head is normalised by itself, or not at all.
        sinks: whether every softmax has one more position (gpt-oss). The position has a learned score for each query
            head, and its value is 0.
        output_gate: whether each head's output is multiplied by the sigmoid of a second query projection. A head's rows
            of this projection follow the rows of its query.
        post_norms: whether the outputs of attention and MLP are normalised before they are added to the residual
            stream.
        value_norm: whether each head's values are divided by their root mean square.
        per_layer_input_size: P, the size of a token's per-layer input (``PerLayerInputs``); 0 if there is none.
        streams: the residual streams, if there are several (``HyperConnectedLayer``); None for one.
        tables: how tables of n-gram embeddings are stored.
        output_scale: whether the residual stream after the layer is multiplied by a learned number.
        quantization: ``fp8`` if projections multiply 8-bit floats; else None.
        dtype: dtype of activations and of unquantized weights.
        norm_dtype: dtype of the norms' weights: ``dtype``, or float32.
        device: device of all weights. ``meta`` allocates nothing, which is enough to count parameters.
        group: the ranks whose outputs are summed. All sizes in this spec are those of this rank's part.
    """

    heads: Heads
    cached_as: int
    reuses_keys: bool
    keys_are_values: bool
    intermediate_size: int
    experts: Experts | None
    linear: LinearAttention | StateSpace | None
    indexer: Indexer | None
    n_grams: NGrams | None
    row_blocks: Mapping[str, tuple[RowBlock, ...]]
    hidden_size: int
    rms_norm_eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    normed_heads: tuple[int, int] | None
    sinks: bool
    output_gate: bool
    post_norms: bool
    value_norm: bool
    per_layer_input_size: int
    streams: Streams | None
    tables: TableForm
    output_scale: bool
    quantization: str | None
    dtype: torch.dtype
    norm_dtype: torch.dtype
    device: torch.device
    group: Group


Projection = Linear | FP8Linear | QuantizedLinear


def projection(
    spec: LayerSpec,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    borders: tuple[int, ...] = (),
) -> Projection:
    """Makes a projection. It is quantized if the spec says so.

    Args:
        name: the projection's name within the layer.
        borders: some ranges of outputs are also computed alone. These are the indices of their first outputs.
    """
    dtype, device = spec.dtype, spec.device
    if spec.quantization == "fp8":
        return FP8Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    if row_blocks := spec.row_blocks.get(f"{name}.weight"):
        return QuantizedLinear(
            in_features, out_features, row_blocks, bias=bias, dtype=dtype, device=device, borders=borders
        )
    return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
