"""Decoder layers of a decode step in C++ (``csrc/cpu/decode_layers/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.decode_layers.layers import Layers, NewTokens
from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.linear_attention.reference import EPS

__all__ = ["decode_layers", "missing"]


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless_one_of(case.dtype, (torch.float32,))


def decode_layers(
    x: Tensor, attention_result: tuple[Tensor, Tensor] | None, layers: Layers, tokens: NewTokens, to_attention: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Same as the reference, in float32. If the call computes no attention, the returned queries, log-sum-exps and
    gates are arbitrary."""
    rotary, states = layers.rotary, tokens.states
    rows = (None, None) if states is None else (states.read, states.write)
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.shadowkv.decode_layers(
        x, *(attention_result or (None, None)), layers.vectors, layers.matrices, layers.forms, layers.row_blocks,
        layers.attentions, layers.head_norms, layers.k_pages, layers.v_pages, layers.recurrences,
        layers.convolution_states, layers.matrix_states, rotary.cos, rotary.sin, rotary.config.interleaved, layers.eps,
        EPS, layers.gated, layers.tiled, tokens.positions, tokens.pages, tokens.counts, tokens.write_page,
        tokens.write_offset, *rows, to_attention,
    )  # fmt: skip
    return result
