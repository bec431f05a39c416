"""Decoder layers of a decode step in PyTorch, computed by the references of other ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.activation_rows.reference import gated_activation, rms_norm
from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.copies.reference import append_tokens
from shadowkv.ops.decode_layers.layers import Layer, Layers, NewTokens, Projection
from shadowkv.ops.paged_attention.reference import paged_attention
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.reference import quantized_matmul

SYNCHRONISES = True
"""The reference of ``paged_attention`` makes the host wait for the device."""


def decode_layers(
    x: Tensor, attended: Tensor | None, layers: Layers, tokens: NewTokens, to_attention: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes a decode step through consecutive layers with attention to exact pages. The new tokens' keys and values
    are written to these pages.

    Args:
        x: [B, D], the residual stream of at least one sequence. It is not changed.
        attended: [B, H_q, d], the result of the first layer's attention. The computation then starts after this
            attention. With None, it starts before the first layer.
        layers: the layers, and their tensors.
        tokens: the new tokens, and the exact pages that they attend to.
        to_attention: whether to stop after the last layer's attention, instead of after the last layer.

    Returns:
        The residual stream [B, D]. Then three tensors of the last attention that was computed: the queries after RoPE
        [B, H_q, d], the result [B, H_q, d] and the log-sum-exp, float32 [B, H_q].
    """
    q = x.new_empty(0)
    lse = q.float()
    for number, layer in enumerate(layers):
        if number or attended is None:
            q, attended, lse = _attend(x, layer, layers, tokens)
        assert attended is not None, "attention is either given or computed"
        if to_attention and number + 1 == len(layers.layers):
            break
        x = x + _normed(_project(attended.flatten(1), layer.out), layer.post_attention_norm, layers.eps)
        hidden = gated_activation(_project(rms_norm(x, layer.mlp_norm, layers.eps), layer.gate_up), "silu")
        x = x + _normed(_project(hidden, layer.down), layer.post_mlp_norm, layers.eps)
    assert attended is not None, "there is at least one layer"
    return x, q, attended, lse


def _attend(x: Tensor, layer: Layer, layers: Layers, tokens: NewTokens) -> tuple[Tensor, Tensor, Tensor]:
    qkv = _project(rms_norm(x, layer.attention_norm, layers.eps), layer.qkv)
    heads, dim = layer.k_pages.shape[1], layer.k_pages.shape[3]
    q, k, v = qkv.unflatten(1, (-1, dim)).split((qkv.shape[1] // dim - 2 * heads, heads, heads), 1)
    q, k = _normed(q, layer.query_norm, layers.eps), _normed(k, layer.key_norm, layers.eps)
    pages, places = (layer.k_pages, layer.v_pages), (tokens.write_page, tokens.write_offset)
    append_tokens(k, v, tokens.positions, layers.rotary, *pages, *places)
    q = apply_rope(q, tokens.positions, layers.rotary)
    return q, *paged_attention(q, *pages, tokens.pages, tokens.counts)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def _project(x: Tensor, by: Projection) -> Tensor:
    parts = [
        quantized_matmul(x, block) if isinstance(block, QuantizedRows) else F.linear(x, block)
        for block in by.row_blocks
    ]
    product = torch.cat(parts, -1)
    return product if by.bias is None else product + by.bias
