"""Attention over selected chunks in C++, read in their stored form (``csrc/cpu/attention/attend_selected.h``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    CentredKeys,
    CodedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    ValueSource,
)
from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.codec import LANES, CodecId, unknown_codecs
from shadowkv.ops.extension import cpu_missing as missing

__all__ = ["attend_selected", "missing", "supports"]

FLOATS = (torch.float32, torch.bfloat16)


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    return unless_one_of(case.dtype, FLOATS) + unknown_codecs(case.key_codec, case.value_codec, LANES)


def attend_selected(
    q: Tensor,
    keys: KeySource,
    values: ValueSource,
    selected: Tensor,
    log_weight: Tensor | None = None,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, but computed entirely in float32. Results are bitwise equal for any number of threads.

    Queries, dense rows, bases and means are float32 or bfloat16, and so are latents that are not quantized.

    Raises:
        IndexError: the selection uses a page, state, slot, entry, chunk or position that does not exist.
        RuntimeError: an unknown codec, other dtypes, shapes that do not fit, or chunks whose tokens are not
            contiguous.
    """
    return torch.ops.shadowkv.attend_selected(q, selected, log_weight, *_keys(keys), *_values(values))


def _keys(keys: KeySource) -> tuple[Any, ...]:
    """Returns the C++ op's arguments for keys: those of ``_rows``, then basis, mean, states, first positions and RoPE.
    These are None if the keys lack them. Latents are shared by all heads and are expanded to an axis of heads."""
    if not isinstance(keys, LatentKeys | CentredKeys):
        return *_rows(keys), *[None] * 6, False
    rope = keys.rotary.cos, keys.rotary.sin, keys.rotary.config.interleaved
    behind = keys.mean, keys.states, keys.first, *rope
    if isinstance(keys, CentredKeys):
        return *_rows(keys), None, *behind
    latents = keys.latents.unsqueeze(1).expand(-1, keys.basis.shape[2], -1, -1, -1)
    return keys.codec.id, latents, keys.pages, *[None] * 4, keys.basis, *behind


def _values(values: ValueSource) -> tuple[Any, ...]:
    """Returns the C++ op's arguments for values: those of ``_rows``, then the slots if values are in a buffer."""
    if not isinstance(values, BufferedRows):
        return *_rows(values), None
    codec, _, _, *coded = _rows(values.source)
    return codec, values.rows, values.entries, *coded, values.slots


def _rows(source: DenseRows | CodedRows) -> tuple[Any, ...]:
    """Returns the codec's id, the rows or codes and their pages; then the scales and their pages, the codec's rotation
    and its levels. For dense rows, the last four are None."""
    if isinstance(source, DenseRows):
        return CodecId.DENSE, source.rows, source.pages, *[None] * 4
    scale = source.scale.unflatten(2, source.codes.shape[2:4])
    levels = source.codec.code_levels(source.dim, source.codes.device)
    return source.codec.id, source.codes, source.pages, scale, source.pages_of_scales, source.rotation, levels
