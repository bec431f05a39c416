"""``ModelShape``: the sizes of a model's attention, which are all that a KV cache knows of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a command's help shows presets, without PyTorch
    from torch import Tensor

    from shadowkv.ops.apply_rope.tables import RopeConfig


class StateArray(NamedTuple):
    """An array of a sequence's recurrent state in one layer.

    Attributes:
        sums: whether the array accumulates a sum over all tokens. The dtype of such arrays can be chosen
            (``StateSettings``). Other arrays are float32.
    """

    name: str
    shape: tuple[int, ...]
    sums: bool = False


class Heads(NamedTuple):
    """Sizes of a layer's attention.

    Attributes:
        num_query_heads: query heads.
        num_kv_heads: key-value heads; divides ``num_query_heads``.
        head_dim: dimensions of one head.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Dimensions of all kv heads joined (H * d)."""
        return self.num_kv_heads * self.head_dim


class PooledHeads(NamedTuple):
    """Sizes of an indexer whose blocks have one key each (``Indexer``).

    Attributes:
        heads: number of index queries of a token.
        dim: dimensions of index queries and keys, at most the head dim of attention. The cache stores rows as wide as
            the head dim, filled up with zeros.
    """

    heads: int
    dim: int


class IndexQueries(NamedTuple):
    """Index queries of T tokens with H heads of d dimensions, and what a pooled indexer needs to normalise keys of
    blocks.

    Attributes:
        queries: [T, H, d].
        key_norm: weight of the norm of blocks' keys, [d]; None if tokens' keys are normalised already.
        eps: added to the mean square in that norm.
    """

    queries: Tensor
    key_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Indexer:
    """How a layer that was trained with an indexer chooses what a query attends to: whole blocks of tokens.

    Without ``pooled``, the indexer has one query head for each kv head, and one key head, with the head dim of
    attention. A block's score for a kv head is the largest product of the index query with the index key of one of the
    block's tokens.

    With ``pooled``, a block has one key: the mean of its tokens' index keys, normalised and then rotated to the
    position of the block's first token. The products of the index queries with this key are clamped to at least 0, and
    their sum is the block's score. All kv heads attend to the same complete blocks, and to all tokens of a block that
    is not complete yet.

    Attributes:
        block_size: tokens of a block: a multiple of 64, or with ``pooled`` a divisor of 64.
        topk_blocks: number of blocks that a query attends to: the local ones, and as many of those with the largest
            scores as are left.
        local_blocks: number of newest blocks that are always attended to, including the query's own. 0 with ``pooled``.
        pooled: index heads and dimensions if each block has one key; None if blocks are scored by their tokens' keys.
    """

    block_size: int
    topk_blocks: int
    local_blocks: int
    pooled: PooledHeads | None = None

    @property
    def budget(self) -> int:
        """Maximum number of tokens that a query attends to."""
        return self.block_size * self.topk_blocks


@dataclass(frozen=True)
class LayerKind:
    """The kind of a layer: full attention, attention to a window or to what an indexer selects, or a recurrent state.

    Attributes:
        window: number of newest tokens that a query attends to, including the query's own; None for all tokens.
        rope: the layer's own RoPE; None for the model's. Only layers with a window can have their own.
        heads: the layer's own heads; None for the model's. Only layers with a window can have their own.
        state: arrays of one sequence's recurrent state; empty for layers with attention.
        indexer: the indexer that selects what a query attends to; None without one.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    heads: Heads | None = None
    state: tuple[StateArray, ...] = ()
    indexer: Indexer | None = None

    def __str__(self) -> str:
        if self.state:
            return "a recurrent state"
        if self.indexer is not None:
            return f"{self.indexer.topk_blocks} blocks of {self.indexer.block_size} chosen by an indexer"
        return "full attention" if self.window is None else f"a window of {self.window}"


FULL = LayerKind()


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the attention of a decoder, or of some of its layers. Layers have the same sizes, except those whose
    kind has its own (``LayerKind.heads``).

    Attributes:
        num_layers: layers that store something in a cache: keys and values, or a recurrent state.
        num_query_heads: query heads per layer.
        num_kv_heads: key-value heads per layer; divides ``num_query_heads``.
        head_dim: dimensions of one head.
        kinds: the kind of every layer; empty if all have full attention.
        key_bias: whether keys have a bias before RoPE, as in Qwen2. The bias can be far larger than the differences
            between keys.
        sinks: whether every softmax has one more position, with a learned score and the value 0.
        reused: kinds of the model's other layers, which attend to the keys and values of the last layer of their kind
            (``num_kv_shared_layers`` in configs). They store nothing.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[LayerKind, ...] = ()
    key_bias: bool = False
    sinks: bool = False
    reused: tuple[LayerKind, ...] = ()

    def __post_init__(self) -> None:
        if self.kinds and len(self.kinds) != self.num_layers:
            raise ValueError(f"kinds has {len(self.kinds)} layers, and must have num_layers={self.num_layers}")
        for heads in {self.heads, *(kind.heads for kind in self.kinds if kind.heads is not None)}:
            if heads.num_query_heads % heads.num_kv_heads:
                raise ValueError(
                    f"num_query_heads={heads.num_query_heads} is not a multiple of num_kv_heads={heads.num_kv_heads}"
                )

    @property
    def heads(self) -> Heads:
        """The heads of layers whose kind does not have its own."""
        return Heads(self.num_query_heads, self.num_kv_heads, self.head_dim)

    def scratch_of(self, kind: LayerKind) -> tuple[Heads, LayerKind | None]:
        """Returns an identifier of scratch memory: prefills of layers with equal identifiers share it. The identifier
        has the sizes of the layers' heads. If later layers reuse keys and values, it also has the kind, because the
        scratch memory then holds the keys and values of the kind's last layer, which layers of another kind must not
        overwrite."""
        return kind.heads or self.heads, kind if self.reused else None

    @property
    def of_scratch(self) -> list[ModelShape]:
        """The shapes of the layers that share scratch memory in prefills, one for each scratch memory."""
        kinds = [kind for kind in self.kinds or (FULL,) * self.num_layers if not kind.state]
        alike = [self.scratch_of(kind) for kind in kinds]
        return [self.of_layers(kinds[alike.index(one)], alike.count(one)) for one in dict.fromkeys(alike)]

    def of_layers(self, kind: LayerKind, count: int) -> ModelShape:
        """The shape of ``count`` layers of one kind."""
        heads = self.heads if kind.heads is None else kind.heads
        return replace(self, num_layers=count, kinds=(), **heads._asdict())

    @property
    def indexed(self) -> bool:
        """Whether any layer has an indexer."""
        return any(kind.indexer is not None for kind in self.kinds)

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(kind.state for kind in self.kinds)

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads.group

    @property
    def kv_dim(self) -> int:
        """Dimensions of all kv heads of a layer joined (H * d)."""
        return self.heads.kv_dim


def share(count: int, rank: int, size: int, multiple: int = 1) -> tuple[int, int]:
    """Returns a rank's share of ``count`` items: first and last + 1. Shares begin at multiples of ``multiple`` and,
    before the last one is cut off at ``count``, differ by at most one multiple."""
    each, more = divmod(-(-count // multiple), size)
    start = rank * each + min(rank, more)
    return min(count, start * multiple), min(count, (start + each + (rank < more)) * multiple)
