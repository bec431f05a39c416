"""``ModelShape``: the sizes of a model's attention, which are all that a KV cache knows of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a command's help shows presets, without PyTorch
    from shadowkv.ops.apply_rope.tables import RopeConfig


class StateArray(NamedTuple):
    """An array of a sequence's recurrent state in one layer.

    Attributes:
        sums: whether tokens are summed up in it. Its dtype can be chosen (``StateSettings``). Others are float32.
    """

    name: str
    shape: tuple[int, ...]
    sums: bool = False


@dataclass(frozen=True)
class LayerKind:
    """The kind of a layer: full attention, attention to a window, or a recurrent state.

    Attributes:
        window: number of newest tokens that a query attends to, its own included; None for all tokens.
        rope: the layer's own RoPE; None for the model's. Only layers with a window can have their own.
        state: arrays of one sequence's recurrent state, in layers that have one instead of attention; else empty.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    state: tuple[StateArray, ...] = ()

    def __str__(self) -> str:
        if self.state:
            return "a recurrent state"
        return "full attention" if self.window is None else f"a window of {self.window}"


FULL = LayerKind()


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the attention of a decoder, or of some of its layers. All layers have the same sizes.

    Attributes:
        num_layers: decoder layers, those with a recurrent state included.
        num_query_heads: query heads per layer.
        num_kv_heads: key-value heads per layer; divides ``num_query_heads``.
        head_dim: dimensions of one head.
        kinds: the kind of every layer; empty if all have full attention.
        key_bias: whether keys have a bias before RoPE, as in Qwen2. The bias can be far larger than the differences
            between keys.
        sinks: whether every softmax has one more position with a learned score, whose value is 0.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[LayerKind, ...] = ()
    key_bias: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.kinds and len(self.kinds) != self.num_layers:
            raise ValueError(f"kinds has {len(self.kinds)} layers, and must have num_layers={self.num_layers}")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads={self.num_query_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Dimensions of all kv heads of a layer joined (H * d)."""
        return self.num_kv_heads * self.head_dim


def share(count: int, rank: int, size: int, multiple: int = 1) -> tuple[int, int]:
    """Returns a rank's share of ``count`` items: first and last + 1. Shares are multiples of ``multiple``, except at
    the end, and their sizes differ by at most one multiple."""
    each, more = divmod(-(-count // multiple), size)
    start = rank * each + min(rank, more)
    return min(count, start * multiple), min(count, (start + each + (rank < more)) * multiple)
