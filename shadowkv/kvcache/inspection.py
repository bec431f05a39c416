"""Reads stored keys, values and attention scores from a cache, in PyTorch. Evaluations, benchmarks and
``engine/selections.py`` use it.

Shapes: B or R rows of a batch, E exact pages and P compressed pages of a row, C chunks per page, n tokens, H kv heads,
H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.ops.attend_selected.reference import gather_selected


def decode_part(cache: KVCache, sequences: Sequence[CachedSequence], group: int = 0) -> DecodeBatch:
    """Plans the next step of ``sequences``. Returns its decode batch in a group of layers."""
    (part,) = cache.decode_batch(cache.plan_decode(sequences)).groups[group]
    assert isinstance(part, DecodeBatch)
    return part


def rotated_queries(cache: KVCache, q: Tensor, batch: DecodeBatch) -> Tensor:
    """Applies RoPE to queries [B, H_q, d] of a decode step."""
    return cache.groups[0].decode.apply_rope(q, batch)


def exact_keys(cache: KVCache, layer: int, pages: Tensor) -> Tensor:
    """Returns the RoPE-rotated keys [H, E * 64, d] of the exact pages whose ids are ``pages``, int64 [E]: one row of
    ``DecodeBatch.pages``."""
    group, at = cache.place(layer)
    return group.store.k[at][pages].transpose(0, 1).flatten(1, 2)


def exact_values(cache: KVCache, layer: int, pages: Tensor) -> Tensor:
    """Returns the values [H, E * 64, d] of the exact pages with ids ``pages`` int64 [E]."""
    group, at = cache.place(layer)
    return group.store.v[at][pages].transpose(0, 1).flatten(1, 2)


def compressed_rows(cache: KVCache, layer: int, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
    """Rebuilds RoPE-rotated keys and values [H, P * 64, d] of the compressed pages of a batch with one row."""
    group, at = cache.place(layer)
    shape = group.layout.shape.num_kv_heads, batch.pages.shape[1] * PAGE, group.layout.shape.head_dim
    keys, values = torch.empty(2, *shape, dtype=cache.dtype, device=cache.device)
    cache.ops.rebuild_rows(group.layout.parts.keys.source(group.store, at, batch), 0, keys, False)
    values_source = group.layout.parts.values.source(group.store, at, batch)
    cache.ops.rebuild_rows(values_source, 0, values, group.layout.spec.place == "host")
    return keys, values


def exact_elsewhere(cache: KVCache, layer: int, batch: CompressedBatch) -> Tensor:
    """Returns bool [R, H, P * C]: True for the chunks of a batch's compressed pages that cannot be selected, because
    exact pages have them too (sink or outliers)."""
    group, at = cache.place(layer)
    return group.store.excluded(at, batch.pages, batch.first)


def selected_scores(
    cache: KVCache, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection, row: int
) -> tuple[Tensor, Tensor]:
    """Returns positions and scores of the tokens that one row of a batch selected. ``batch`` and ``selected`` are
    arguments of a selection hook.

    Args:
        q: [R, H_q, d], after RoPE.

    Returns:
        Positions int64 [H, n], and scores float32 [H, H_q / H, n]. Unused entries have position -1 and score -inf.
    """
    group, at = cache.place(layer)
    rows, chunk = slice(row, row + 1), group.layout.spec.chunk
    of_row = replace(batch, sampling=None).part(rows)
    chunks = selected.chunks[rows]
    keys = gather_selected(group.layout.parts.keys.source(group.store, at, of_row), chunks)[0]  # [H, n, d]
    within = torch.arange(chunk, device=chunks.device)
    is_token = (chunks[0] >= 0).repeat_interleave(chunk, 1)
    positions = (chunks[0].unsqueeze(-1) * chunk + within).flatten(1) + of_row.first
    scores = _scores(q[row], keys)
    if selected.log_weight is not None:
        scores = scores + selected.log_weight[row].repeat_interleave(chunk, 1).unsqueeze(1)
    return positions.masked_fill(~is_token, -1), scores.masked_fill(~is_token.unsqueeze(1), float("-inf"))


def exact_scores(cache: KVCache, layer: int, q: Tensor, pages: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Returns positions and scores, as ``selected_scores`` does, of the tokens ``first`` to ``end`` of a dense
    sequence.

    Args:
        q: [H_q, d] of the sequence's row, after RoPE.
        pages: int64 [E], ids of the sequence's exact pages, from its first page on.
    """
    keys = exact_keys(cache, layer, pages[: -(-end // PAGE)])[:, first:end]
    positions = torch.arange(first, end, device=q.device).expand(len(keys), -1)
    return positions, _scores(q, keys)


def coded_scores(
    cache: KVCache, layer: int, q: Tensor, batch: CompressedBatch, row: int, first: int
) -> tuple[Tensor, Tensor]:
    """Returns positions and scores, as ``selected_scores`` does, of a row's compressed tokens from position ``first``
    on. It is for policies that attend to all tokens.

    Args:
        q: [H_q, d] of the row, after RoPE.
    """
    group, at = cache.place(layer)
    of_row = replace(batch, sampling=None, span=None).part(slice(row, row + 1))
    shape = group.layout.shape.num_kv_heads, of_row.pages.shape[1] * PAGE, group.layout.shape.head_dim
    keys = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    cache.ops.rebuild_rows(group.layout.parts.keys.source(group.store, at, of_row), 0, keys, False)
    place = torch.arange(keys.shape[1], device=q.device)
    positions = place + of_row.first
    is_token = (place < of_row.num_pages * PAGE) & (positions >= first)
    positions = positions.masked_fill(~is_token, -1).expand(len(keys), -1)
    return positions, _scores(q, keys).masked_fill(~is_token, float("-inf"))


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Returns the scores of queries [H_q, d] and keys [H, n, d], float32 [H, H_q / H, n]."""
    return q.float().unflatten(0, (len(keys), -1)) @ keys.float().transpose(1, 2) * q.shape[-1] ** -0.5


def diagnostics(cache: KVCache, sequence: CachedSequence) -> dict[str, Tensor]:
    """Returns how well a compressed sequence's states fit: the diagnostics of the policy's parts by name, float32
    [layers] each.

    The number for a layer of the first group is the minimum over the sequence's segments. The result is empty if the
    sequence is dense. The part that declares a name documents its meaning.
    """
    group = cache.groups[0]
    names = group.layout.parts.diagnostics
    if not (names and sequence.path):
        return {}
    cache.pools.await_layers(sequence)
    states = [segment.state for segment in sequence.path]
    return {name: group.store.state[name][:, states, 0].amin(1) for name in names}
