"""Decoder layers of a decode step in C++ (``csrc/cpu/decode_layers/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.decode_layers.layers import Layers, NewTokens
from shadowkv.ops.extension import cpu_missing as missing

__all__ = ["decode_layers", "missing"]


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless_one_of(case.dtype, (torch.float32,))


def decode_layers(
    x: Tensor, attended: Tensor | None, layers: Layers, tokens: NewTokens, to_attention: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as the reference, in float32. If the call computes no attention, the returned queries and log-sum-exps are
    arbitrary."""
    rotary = layers.rotary
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.shadowkv.decode_layers(
        x, attended, layers.vectors, layers.matrices, layers.forms, layers.row_blocks, layers.k_pages, layers.v_pages,
        rotary.cos, rotary.sin, rotary.config.interleaved, layers.eps, tokens.positions, tokens.pages, tokens.counts,
        tokens.write_page, tokens.write_offset, to_attention,
    )  # fmt: skip
    return result
