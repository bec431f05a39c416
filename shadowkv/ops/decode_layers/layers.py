"""The arguments of ``decode_layers``: weights and exact pages of layers, and the new tokens.
``engine/execution/fused_layers.py`` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.recurrence import Spans


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
class Attention:
    """Attention of a layer (``layers.attention``), and its exact pages.

    Attributes:
        query_norm, key_norm: weights [d] of norms over the head dim d. None if the layer lacks the norm.
        k_pages, v_pages: [N, H, 64, d], views over all pages.
    """

    query_norm: Tensor | None
    key_norm: Tensor | None
    k_pages: Tensor
    v_pages: Tensor


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention of a layer (``layers.gated_delta_net``), and its states. It has H value heads, C channels and a
    convolution over W tokens.

    Attributes:
        convolution: [C, W], the weight of the oldest input first. The channels are queries, keys and values.
        log_rate, rate_bias: float32 [H]. A token whose input is r multiplies a head's state by
            exp(-exp(log_rate) softplus(r + rate_bias)).
        norm: [dv], weight of the norm over a value head's dimensions dv.
        inputs: float32 [R, C, W - 1], states of the convolution.
        matrices: float32 or bfloat16 [R, H, dk, dv], states of the delta rule.
    """

    convolution: Tensor
    log_rate: Tensor
    rate_bias: Tensor
    norm: Tensor
    inputs: Tensor
    matrices: Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer (``layers.decoder_layer``).

    Attributes:
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: weights [D] of norms, where D is the hidden size.
            None if the layer lacks the norm.
        mixer: attention or linear attention.
        inputs: the projection to the mixer's inputs. Attention has queries, keys and values. If it is gated, the rows
            of each query head are followed by those of its gate. Linear attention has queries, keys, values, output
            gates, then one number per value head that gives beta, and one that gives the decay.
        out, gate_up, down: projections. ``gate_up`` has the gate's rows first, then those of up. Gate and up have
            one row each per hidden unit of the MLP.
    """

    attention_norm: Tensor
    mixer: Attention | DeltaNet
    inputs: Projection
    out: Projection
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: Tensor | None


class Layers:
    """Consecutive layers, and their tensors in flat lists for the C++ op.

    Args:
        layers: at least one with attention. All layers with attention have the same shapes, and so have all layers
            with linear attention.
        eps: added to the mean square in every norm.
        rotary: RoPE of all layers with attention.
        gated: whether gates multiply the results of attention.
        tiled: which key head a value head of linear attention uses (``layers.spec.LinearAttention``).

    Attributes:
        vectors: norms and biases, 6 per layer. None stands for a norm or bias that a layer lacks.
        matrices: row blocks of all projections, plain or in the block format of a GGUF file.
        forms: the block format of each matrix, "" for a plain one.
        row_blocks: the number of row blocks of each projection. There are 4 projections per layer.
        attentions: whether each layer has attention, not linear attention.
        head_norms: norms of queries and keys, 2 per layer with attention.
        k_pages, v_pages: exact pages of each layer with attention.
        recurrences: weights of linear attention, 4 per layer.
        convolution_states, matrix_states: states of each layer with linear attention.
    """

    def __init__(
        self, layers: Sequence[Layer], eps: float, rotary: RotaryTables, gated: bool = False, tiled: bool = False
    ) -> None:
        self.layers, self.eps, self.rotary, self.gated, self.tiled = tuple(layers), eps, rotary, gated, tiled
        self.vectors: list[Tensor | None] = []
        for x in self.layers:
            self.vectors += (x.attention_norm, x.inputs.bias, x.out.bias)
            self.vectors += (x.post_attention_norm, x.mlp_norm, x.post_mlp_norm)
        projections = [projection for x in self.layers for projection in (x.inputs, x.out, x.gate_up, x.down)]
        self.row_blocks = [len(projection.row_blocks) for projection in projections]
        row_blocks = [block for projection in projections for block in projection.row_blocks]
        self.matrices = [block.tensors[0] if isinstance(block, QuantizedRows) else block for block in row_blocks]
        self.forms = [block.form.name if isinstance(block, QuantizedRows) else "" for block in row_blocks]
        self.attentions = [isinstance(x.mixer, Attention) for x in self.layers]
        attentions = [x.mixer for x in self.layers if isinstance(x.mixer, Attention)]
        self.head_norms = [norm for x in attentions for norm in (x.query_norm, x.key_norm)]
        self.k_pages, self.v_pages = [x.k_pages for x in attentions], [x.v_pages for x in attentions]
        delta_nets = [x.mixer for x in self.layers if isinstance(x.mixer, DeltaNet)]
        self.recurrences = [part for x in delta_nets for part in (x.convolution, x.log_rate, x.rate_bias, x.norm)]
        self.convolution_states, self.matrix_states = [x.inputs for x in delta_nets], [x.matrices for x in delta_nets]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def part(self, some: slice) -> Layers:
        """Some of the layers."""
        return Layers(self.layers[some], self.eps, self.rotary, self.gated, self.tiled)


@dataclass(frozen=True)
class NewTokens:
    """The newest token of each of B sequences, and the exact pages that it attends to.

    Attributes:
        positions: int64 [B].
        pages: int64 [B, E], ids of E exact pages per sequence.
        counts: int64 [B, E], number of valid tokens at the start of each page, including the new token. 0 skips the
            page.
        write_page, write_offset: int64 [B], where the new token is written: the page id, and the row in this page.
        states: the tokens as spans, and their rows in the states of linear attention. None if no layer has it.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
    states: Spans | None = None
