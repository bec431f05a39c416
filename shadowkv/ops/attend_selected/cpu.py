"""Attention over selected chunks in C++, read from the form they are stored in: ``csrc/cpu/attend_selected.h``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.attend_selected import reference
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    QuantisedRows,
    ValueSource,
)
from shadowkv.ops.extension import load_cpu as available

__all__ = ["attend_selected", "available"]

FLOATS = (torch.float32, torch.bfloat16)


def attend_selected(
    q: Tensor, keys: KeySource, values: ValueSource, selected: Tensor, log_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference, but all of it in float32. Results are the same bits on any number of threads.

    Queries, dense rows, bases and means are float32 or bfloat16, latents those or int8; the reference does the rest.

    Raises:
        IndexError: a page, slot, entry or chunk that does not exist, of what is selected.
        RuntimeError: shapes that do not fit, or chunks whose tokens do not lie together.
    """
    if not _supported(q, keys, values):
        return reference.attend_selected(q, keys, values, selected, log_weight)
    return torch.ops.shadowkv.attend_selected(q, selected, log_weight, *_key_arguments(keys), *_value_arguments(values))


def _supported(q: Tensor, keys: KeySource, values: ValueSource) -> bool:
    floats = [q.dtype]
    match keys:
        case DenseRows():
            floats.append(keys.rows.dtype)
        case LatentKeys():
            floats.append(keys.basis.dtype)
            if keys.latents.dtype != torch.int8:
                floats.append(keys.latents.dtype)
            if keys.mean is not None:
                floats.append(keys.mean.dtype)
    stored = values.source if isinstance(values, BufferedRows) else values
    if isinstance(stored, DenseRows):
        floats.append(stored.rows.dtype)
    return all(dtype in FLOATS for dtype in floats)


def _key_arguments(keys: KeySource) -> tuple[Any, ...]:
    """Rows of every head and their pages; basis, mean, slots and rotation of latents."""
    match keys:
        case DenseRows():
            return keys.rows, keys.pages, None, None, None, None, None, False
        case LatentKeys():
            heads, rotary = keys.basis.shape[2], keys.rotary
            latents = keys.latents.unsqueeze(1).expand(-1, heads, -1, -1, -1)
            turns = rotary.cos, rotary.sin, rotary.config.interleaved
            return latents, keys.pages, keys.basis, keys.mean, keys.slots, *turns


def _value_arguments(values: ValueSource) -> tuple[Any, ...]:
    """Rows or codes, their pages or entries, slots of a buffer; scale, its pages and rotation of codes."""
    match values:
        case DenseRows():
            return values.rows, values.pages, None, None, None, None
        case QuantisedRows():
            scale = values.scale.unflatten(2, values.codes.shape[2:4]).unsqueeze(-1)
            scale_pages = values.pages if values.scale_pages is None else values.scale_pages
            return values.codes, values.pages, None, scale, scale_pages, values.rotation
        case BufferedRows():
            _, _, _, *coded = _value_arguments(values.source)
            return values.rows, values.entries, values.slots, *coded
