"""Copies of keys and values in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.page import PAGE


def append_block(
    k: Tensor, v: Tensor, positions: Tensor, rotary: RotaryTables, keys: Tensor, rope_keys: Tensor, values: Tensor
) -> None:
    """Copies the keys, the RoPE-rotated keys and the values of a prompt block of n tokens.

    Args:
        k, v: [n, H, d], keys before RoPE, and values.
        positions: int64 [n].
        keys, rope_keys, values: [n, H, d], written: ``k``, ``k`` after RoPE, and ``v``.
    """
    keys.copy_(k)
    rope_keys.copy_(apply_rope(k, positions, rotary))
    values.copy_(v)


def append_tokens(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: RotaryTables,
    k_pages: Tensor,
    v_pages: Tensor,
    write_page: Tensor,
    write_offset: Tensor,
) -> None:
    """Writes one token's RoPE-rotated key and value per sequence to row ``write_offset`` of page ``write_page``.

    Args:
        k, v: [B, H, d], keys before RoPE, and values.
        positions, write_page, write_offset: int64 [B].
        k_pages, v_pages: [N, H, 64, d], views over all pages.
    """
    k_pages[write_page, :, write_offset] = apply_rope(k, positions, rotary)
    v_pages[write_page, :, write_offset] = v


def gather_context(
    rope_keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, sources: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values of the K tokens that packed sequences attend to, cached and new ones, [K, H, d]
    each.

    Args:
        rope_keys, values: [T, H, d], keys (after RoPE) and values of the T new tokens.
        k_pages, v_pages: [N, H, 64, d], views over all exact pages.
        sources: int64 [K], where each row comes from: ``64 * page + offset`` for a cached token, ``-1 - t`` for new
            token t.
        count: int32 [1], number of rows that are needed, at most K. Later rows of the result are arbitrary.
    """
    new = sources < 0
    page, offset = sources.clamp(min=0) // PAGE, sources.clamp(min=0) % PAGE
    token = (-1 - sources).clamp(min=0)
    keys, gathered = (
        torch.where(new[:, None, None], own[token], pages[page, :, offset])
        for own, pages in ((rope_keys, k_pages), (values, v_pages))
    )
    return keys, gathered


def write_rows(rows: Tensor, field: Tensor, pages: Tensor, across_bus: bool) -> None:
    """Writes n full pages in each of L layers.

    Args:
        rows: [L, n, 64, H, x].
        field: [L, N, H, C, c, x] of the same dtype, views over all pages, each of C chunks of c tokens, C c = 64.
            Pinned host memory is passed as a tensor of the device that writes it.
        pages: int64 [n], page ids, at which rows are written.
        across_bus: whether ``field`` is in host memory, behind a bus that a few thread blocks saturate.
    """
    field[:, pages] = rows.transpose(2, 3).unflatten(3, field.shape[3:5])
