"""What decoder layers compute with, as ``decode_layers`` takes it: weights, pages, and where new tokens are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.quantised.rows import QuantisedRows


@dataclass(frozen=True)
class Projection:
    """y = x Wᵀ + b.

    Attributes:
        row_blocks: of W [N, K], in order, plain numbers [rows, K] or quantised ones.
        bias: [N]; None for none.
    """

    row_blocks: tuple[Tensor | QuantisedRows, ...]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """A decoder layer (``layers.decoder_layer``), and its exact pages.

    Attributes:
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: weights [D] of norms; None where there is none.
        qkv, out, gate_up, down: its projections; gate and up have I rows each.
        query_norm, key_norm: weights [d]; None where there is none.
        k_pages, v_pages: [N, H, 64, d], views over all pages.
    """

    attention_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Projection
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: Tensor | None
    k_pages: Tensor
    v_pages: Tensor


class Layers:
    """Layers one after the other.

    Args:
        layers: at least one.
        eps: added to the mean square in every norm.
        rotary: of all of them.

    Attributes:
        vectors, matrices, forms, row_blocks, k_pages, v_pages: the same in lists, as kernels take them: of each layer 8
            norms and biases or None, and of each of its 4 projections the row blocks, which are floats, with the form
            "", or in a GGUF file's blocks, and their number.
    """

    def __init__(self, layers: Sequence[Layer], eps: float, rotary: RotaryTables) -> None:
        self.layers, self.eps, self.rotary = tuple(layers), eps, rotary
        self.vectors: list[Tensor | None] = []
        for x in self.layers:
            self.vectors += (x.attention_norm, x.qkv.bias, x.query_norm, x.key_norm, x.out.bias)
            self.vectors += (x.post_attention_norm, x.mlp_norm, x.post_mlp_norm)
        projections = [projection for x in self.layers for projection in (x.qkv, x.out, x.gate_up, x.down)]
        self.row_blocks = [len(projection.row_blocks) for projection in projections]
        row_blocks = [block for projection in projections for block in projection.row_blocks]
        self.matrices = [block.tensors[0] if isinstance(block, QuantisedRows) else block for block in row_blocks]
        self.forms = [block.form.name if isinstance(block, QuantisedRows) else "" for block in row_blocks]
        self.k_pages, self.v_pages = [x.k_pages for x in self.layers], [x.v_pages for x in self.layers]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)


@dataclass(frozen=True)
class NewTokens:
    """The newest token of each of B sequences, and the exact pages that it attends to.

    Attributes:
        positions: int64 [B].
        pages: int64 [B, E], ids of exact pages.
        counts: int64 [B, E], valid tokens at the start of each page, the new one included; 0 skips it.
        write_page, write_offset: int64 [B], the page and the row there that take the new token.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
