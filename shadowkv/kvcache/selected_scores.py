"""The scores of what a step selected, for display: recomputed in PyTorch for one row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.sequences.store import Store
from shadowkv.ops.attend_selected.reference import gather_selected


def selected_scores(
    store: Store, parts: Parts, layer: int, q: Tensor, batch: SealedBatch, selected: Selection, row: int
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens that a row's kv heads selected, and the scores by which each query head attends to them.

    Args:
        q: [R, H_q, d], after RoPE.

    Returns:
        positions int64 [H, n], -1 for none; scores float32 [H, H_q / H, n], -inf there.
    """
    rows, chunk = slice(row, row + 1), store.layout.spec.chunk
    one = replace(batch, sampling=None).part(rows)
    chunks = selected.chunks[rows]
    keys = gather_selected(parts.keys.source(store, layer, one), chunks)[0].float()  # [H, n, d]
    within = torch.arange(chunk, device=chunks.device)
    there = (chunks[0] >= 0).repeat_interleave(chunk, 1)
    positions = (chunks[0].unsqueeze(-1) * chunk + within).flatten(1) + one.first
    scores = q[row].float().unflatten(0, (len(keys), -1)) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
    if selected.log_weight is not None:
        scores = scores + selected.log_weight[row].repeat_interleave(chunk, 1).unsqueeze(1)
    return positions.masked_fill(~there, -1), scores.masked_fill(~there.unsqueeze(1), float("-inf"))
