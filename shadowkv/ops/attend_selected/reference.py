"""Attention over selected chunks in PyTorch. It gathers the chunks, rebuilds their keys, and attends (ShadowKV,
arXiv:2410.21465, algorithm 2). ``sources`` explains the letters in shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.reference import rope_by
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    CentredKeys,
    CodedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    ValueSource,
)


def attend_selected(
    q: Tensor,
    keys: KeySource,
    values: ValueSource,
    selected: Tensor,
    log_weight: Tensor | None = None,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one RoPE-rotated query per row and head over the tokens of its selected chunks.

    Args:
        q: [B, H_q, d], for B rows and H_q query heads.
        keys: source of the keys, H heads; query head i reads kv head i // (H_q / H).
        values: source of the values.
        selected: int64 [B, H, k], chunk numbers, then -1s if fewer than k chunks are selected.
        log_weight: float32 [B, H, k], the natural logarithm of the number of chunks that each selected chunk stands
            for. It is arbitrary where ``selected`` is -1. None means that each chunk stands for itself.
        most: int64 [B], an upper bound on the number of selected chunks of each row. Kernels use it to distribute the
            work among thread blocks. None means ``k``.

    Returns:
        out [B, H_q, d] in the dtype of ``q`` and its log-sum-exp, float32 [B, H_q]: 0 and -inf where no chunk is
        selected.
    """
    dim = q.shape[2]
    k, v = gather_selected(keys, selected).to(q.dtype), gather_selected(values, selected)
    chunk = v.shape[2] // max(selected.shape[2], 1)
    valid = (selected >= 0).repeat_interleave(chunk, dim=2)
    scores = (q.unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2)).float() * dim**-0.5
    if log_weight is not None:
        scores = scores + log_weight.repeat_interleave(chunk, dim=2).unsqueeze(2)
    scores = scores.masked_fill(~valid.unsqueeze(2), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp()
    out = weights.to(v.dtype) @ v.masked_fill(~valid.unsqueeze(-1), 0)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def gather_selected(source: KeySource | ValueSource, selected: Tensor) -> Tensor:
    """Gathers the tokens of selected chunks as plain rows: values, or keys after RoPE. Coded rows are decoded to
    float32, with their codec's rotation undone.

    Args:
        source: source of the rows.
        selected: int64 [B, H, k]; -1 yields an arbitrary row of the sequence, to be masked by the caller.

    Returns:
        [B, H, k * c, d] on the device of ``selected``.
    """
    selected = selected.clamp(min=0)
    match source:
        case DenseRows():
            return _rows(source.rows, source.pages, selected).flatten(2, 3)
        case LatentKeys():
            return _rebuild(source, selected)
        case CodedRows():
            return _decode(source, _rows(source.codes, source.pages, selected), selected)
        case BufferedRows():
            heads = torch.arange(selected.shape[1], device=selected.device)[:, None]
            rows = source.rows[source.slots[:, None, None], heads, source.entries.clamp(min=0)]
            if isinstance(source.source, CodedRows):
                return _decode(source.source, rows, selected)
            return rows.flatten(2, 3)


def _decode(source: CodedRows, codes: Tensor, selected: Tensor) -> Tensor:
    """Decodes codes [B, H, k, c, w] of the selected chunks to rows [B, H, k * c, d]."""
    scale = codes[..., :0]
    if source.scale.shape[-1]:
        scale = _rows(source.scale.unflatten(2, source.codes.shape[2:4]), source.pages_of_scales, selected)
    state = tuple(x[source.states][:, :, None] for x in source.state)
    rows = source.codec.decode(codes.flatten(2, 3), scale.flatten(2, 3), source.rotation, source.dim, state)
    if isinstance(source, CentredKeys):
        mean = source.mean[source.states].unsqueeze(2).to(rows.dtype)
        rows = rows + _with_rope(mean, source, selected, codes.shape[3])
    return rows


def _rebuild(keys: LatentKeys, selected: Tensor) -> Tensor:
    """Rebuilds the low-rank keys of selected chunks [B, H, k * c, d]: key = RoPE(latents x basis + mean)."""
    keys = keys.decoded()
    page_ids, chunks = _locate(keys.pages, selected, keys.latents.shape[1])
    widths = () if keys.widths is None else (keys.widths[keys.states][:, None, None],)
    stored = keys.latents[page_ids, chunks].flatten(2, 3)
    picked = keys.codec.decode(stored, keys.basis.shape[1], *widths)  # [B, H, k * c, r]
    rows = picked.to(keys.basis.dtype) @ keys.basis[keys.states].transpose(1, 2)
    if keys.mean is not None:
        rows = rows + keys.mean[keys.states].unsqueeze(2).to(rows.dtype)
    return _with_rope(rows, keys, selected, keys.latents.shape[2])


def _with_rope(rows: Tensor, keys: LatentKeys | CentredKeys, selected: Tensor, chunk: int) -> Tensor:
    """Rotates rows [B, H, k * c or 1, d] by RoPE to the positions of the selected chunks' tokens."""
    within = torch.arange(chunk, device=selected.device)
    positions = keys.first[:, None, None] + (selected.unsqueeze(-1) * chunk + within).flatten(2)
    # Tokens past a row's end may have positions that the tables do not have. These tokens are masked.
    positions = positions.clamp(max=len(keys.rotary.cos) - 1)
    return rope_by(rows, keys.rotary.cos[positions], keys.rotary.sin[positions], keys.rotary)


def _rows(pages_of: Tensor, pages: Tensor, selected: Tensor) -> Tensor:
    """Gathers [B, H, k, ...] from [N, H, C, ...]."""
    page_ids, chunks = _locate(pages, selected, pages_of.shape[2])
    heads = torch.arange(selected.shape[1], device=selected.device)[:, None]
    return pages_of[page_ids, heads, chunks]


def _locate(pages: Tensor, selected: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Returns the page id of each selected chunk and its number within this page, int64 [B, H, k] each."""
    page_ids = pages.gather(1, (selected // chunks).flatten(1)).view_as(selected)
    return page_ids, selected % chunks
