"""Decoder layers of a decode step in PyTorch, computed by the references of other ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.activation_rows.reference import gated_activation, rms_norm
from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.copies.reference import append_tokens
from shadowkv.ops.decode_layers.layers import Attention, DeltaNet, Layer, Layers, NewTokens, Projection
from shadowkv.ops.linear_attention.reference import causal_convolution, gated_delta_rule
from shadowkv.ops.paged_attention.reference import paged_attention
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.reference import quantized_matmul

SYNCHRONISES = True
"""The reference of ``paged_attention`` makes the host wait for the device."""


def decode_layers(
    x: Tensor, attention_result: tuple[Tensor, Tensor] | None, layers: Layers, tokens: NewTokens, to_attention: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes a decode step through consecutive layers with attention to exact pages. The new tokens' keys and values
    are written to these pages, and their states to the rows of states.

    Args:
        x: [B, D], the residual stream of at least one sequence. It is not changed.
        attention_result: the result of the first layer's attention [B, H_q, d], and its gate as this function returns
            it. The computation then starts after this attention. With None, it starts before the first layer.
        layers: the layers, and their tensors.
        tokens: the new tokens, and the exact pages that they attend to.
        to_attention: whether to stop after the last layer's attention, instead of after the last layer.

    Returns:
        The residual stream [B, D]. Then four tensors of the last attention that was computed: the queries after RoPE
        [B, H_q, d], the result before the gate [B, H_q, d], the log-sum-exp, float32 [B, H_q], and the gate before the
        sigmoid [B, H_q, d], or [B, 0, d] if attention is not gated.
    """
    q = x.new_empty(0)
    attended, lse, gate = q, q.float(), q
    for number, layer in enumerate(layers):
        if isinstance(layer.mixer, DeltaNet):
            mixed = _recur(_inputs(x, layer, layers), layer.mixer, layers, tokens)
        else:
            if number or attention_result is None:
                q, attended, lse, gate = _attend(_inputs(x, layer, layers), layer.mixer, layers, tokens)
            else:
                attended, gate = attention_result
            if to_attention and number + 1 == len(layers.layers):
                break
            mixed = attended * gate.sigmoid() if layers.gated else attended
        x = x + _normed(_project(mixed.flatten(1), layer.out), layer.post_attention_norm, layers.eps)
        hidden = gated_activation(_project(rms_norm(x, layer.mlp_norm, layers.eps), layer.gate_up), "silu")
        x = x + _normed(_project(hidden, layer.down), layer.post_mlp_norm, layers.eps)
    return x, q, attended, lse, gate


def _inputs(x: Tensor, layer: Layer, layers: Layers) -> Tensor:
    return _project(rms_norm(x, layer.attention_norm, layers.eps), layer.inputs)


def _attend(qkv: Tensor, layer: Attention, layers: Layers, tokens: NewTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, dim = layer.k_pages.shape[1], layer.k_pages.shape[3]
    q, k, v = qkv.unflatten(1, (-1, dim)).split((qkv.shape[1] // dim - 2 * heads, heads, heads), 1)
    gate = q[:, :0]
    if layers.gated:
        q, gate = q[:, ::2], q[:, 1::2]
    q, k = _normed(q, layer.query_norm, layers.eps), _normed(k, layer.key_norm, layers.eps)
    pages, places = (layer.k_pages, layer.v_pages), (tokens.write_page, tokens.write_offset)
    append_tokens(k, v, tokens.positions, layers.rotary, *pages, *places)
    q = apply_rope(q, tokens.positions, layers.rotary)
    return q, *paged_attention(q, *pages, tokens.pages, tokens.counts), gate


def _recur(inputs: Tensor, layer: DeltaNet, layers: Layers, tokens: NewTokens) -> Tensor:
    assert tokens.states is not None, "linear attention has states"
    (channels, _), (heads, key_dim, value_dim) = layer.convolution.shape, layer.matrices.shape[1:]
    values = heads * value_dim
    keys = (channels - values) // 2
    qkv, z, beta, rate = inputs.split((channels, values, heads, heads), dim=-1)
    log_decay = -layer.log_rate.exp() * F.softplus(rate.float() + layer.rate_bias)
    mixed = causal_convolution(qkv, layer.convolution, layer.inputs, tokens.states)
    q, k, v = mixed.split((keys, keys, values), dim=-1)
    q, k = (part.unflatten(-1, (-1, key_dim)) for part in (q, k))
    if layers.tiled:
        q, k = (part.repeat(1, heads * key_dim // keys, 1) for part in (q, k))
    v = v.unflatten(-1, (heads, value_dim))
    out = gated_delta_rule(q, k, v, log_decay, beta.float().sigmoid(), layer.matrices, tokens.states)
    return rms_norm(out, layer.norm, layers.eps) * F.silu(z.unflatten(-1, (heads, value_dim)))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def _project(x: Tensor, by: Projection) -> Tensor:
    parts = [
        quantized_matmul(x, block) if isinstance(block, QuantizedRows) else F.linear(x, block)
        for block in by.row_blocks
    ]
    product = torch.cat(parts, -1)
    return product if by.bias is None else product + by.bias
