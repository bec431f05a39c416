"""The arguments of ``decode_layers``: weights and exact pages of layers, and the new tokens.
``engine/execution/fused_layers.py`` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.quantized.rows import QuantizedRows


@dataclass(frozen=True)
class Projection:
    """A linear layer, y = x Wᵀ + b.

    Attributes:
        row_blocks: W [N, K], split into consecutive blocks of rows [rows, K]. Each block is plain or quantized.
        bias: [N], or None.
    """

    row_blocks: tuple[Tensor | QuantizedRows, ...]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer (``layers.decoder_layer``), and its exact pages.

    Attributes:
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: weights [D] of norms, where D is the hidden size.
            None if the layer lacks the norm.
        qkv, out, gate_up, down: projections. ``gate_up`` has the gate's rows first, then those of up. Gate and up have
            one row each per hidden unit of the MLP.
        query_norm, key_norm: weights [d] of norms over the head dim d. None if the layer lacks the norm.
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
    """Consecutive layers, and their tensors in flat lists for the C++ op.

    Args:
        layers: at least one.
        eps: added to the mean square in every norm.
        rotary: RoPE of all layers.

    Attributes:
        vectors: norms and biases, 8 per layer. None stands for a norm or bias that a layer lacks.
        matrices: row blocks of all projections, plain or in the block format of a GGUF file.
        forms: the block format of each matrix, "" for a plain one.
        row_blocks: the number of row blocks of each projection. There are 4 projections per layer.
        k_pages, v_pages: exact pages of each layer.
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
        self.matrices = [block.tensors[0] if isinstance(block, QuantizedRows) else block for block in row_blocks]
        self.forms = [block.form.name if isinstance(block, QuantizedRows) else "" for block in row_blocks]
        self.k_pages, self.v_pages = [x.k_pages for x in self.layers], [x.v_pages for x in self.layers]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)


@dataclass(frozen=True)
class NewTokens:
    """The newest token of each of B sequences, and the exact pages that it attends to.

    Attributes:
        positions: int64 [B].
        pages: int64 [B, E], ids of E exact pages per sequence.
        counts: int64 [B, E], number of valid tokens at the start of each page, including the new token. 0 skips the
            page.
        write_page, write_offset: int64 [B], where the new token is written: the page id, and the row in this page.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
