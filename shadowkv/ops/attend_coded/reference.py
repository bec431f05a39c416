"""Attention over all tokens in PyTorch.

Coded rows without a state are not rotated back. Instead, queries are multiplied by the codec's rotation, and the output
is rotated back once (TurboQuant, arXiv:2504.19874). For centred keys, the score of the mean key is added, which
TurboQuant does not do. Low-rank keys are rebuilt from latents. ``attend_selected.sources`` explains the letters in
shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.reference import halves
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import (
    CentredKeys,
    CodedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    heads_and_chunk,
)
from shadowkv.ops.page import PAGE
from shadowkv.ops.sequence_rows import SequenceRows

DECODED_AT_ONCE = 64
"""Pages of each row that are decoded at a time."""


def attend_coded(
    q: Tensor,
    keys: KeySource,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one RoPE-rotated query per row and head over the row's tokens from ``begin`` up to ``end``.

    Args:
        q: [B, H_q, d], for B rows and H_q query heads.
        keys: source of the keys, H heads; query head i reads kv head i // (H_q / H).
        values: source of the values.
        begin, end: int64 [B], multiples of the chunk size. ``end`` is at most 64 P, the tokens of P pages. A row whose
            ``end`` is not after its ``begin`` attends to no tokens.
        sequences: which rows belong to one sequence. These have the same ``begin`` and ``end``, and in ``keys`` and
            ``values`` the same pages and state. Another backend can then read the pages once for all of them. If it is
            None, each row is a sequence.

    Returns:
        out [B, H_q, d] in the dtype of ``q`` and its log-sum-exp, float32 [B, H_q]: 0 and -inf for a row that attends
        to no tokens.
    """
    dim = q.shape[2]
    if isinstance(keys, LatentKeys):
        keys = keys.decoded()
    heads = heads_and_chunk(keys)[0]
    grouped = q.float().unflatten(1, (heads, -1)) * dim**-0.5
    rotation = rotation_of(keys)
    asked = grouped if rotation is None else grouped @ rotation
    out = torch.zeros_like(grouped)
    lse = grouped.new_full(grouped.shape[:3], float("-inf"))
    for start in range(0, keys.pages.shape[1], DECODED_AT_ONCE):
        pages = slice(start, start + DECODED_AT_ONCE)
        rows, tokens = _rows(keys, pages), _rows(values, pages)
        place = torch.arange(start * PAGE, start * PAGE + rows.shape[2], device=q.device)
        there = ((place >= begin[:, None]) & (place < end[:, None]))[:, None, None]
        scores = asked @ rows.transpose(-1, -2)
        if isinstance(keys, CentredKeys):
            scores += mean_scores(grouped, keys, place)
        scores = scores.masked_fill(~there, float("-inf"))
        total = torch.logaddexp(lse, scores.logsumexp(-1))
        base = total.masked_fill(total == float("-inf"), 0).unsqueeze(-1)
        weights = (scores - base).exp()
        out = out * (lse.unsqueeze(-1) - base).exp() + weights @ tokens.masked_fill(~there.mT, 0)
        lse = total
    rotation = rotation_of(values)
    if rotation is not None:
        out = out @ rotation.T
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def mean_scores(q: Tensor, keys: CentredKeys, place: Tensor) -> Tensor:
    """Computes the products of queries and mean keys, q x RoPE(mean), [B, H, G, n], for G query heads per kv head. They
    are added to the scores of centred keys.

    A product is a sum over RoPE's frequencies. Each frequency has two factors that do not depend on the token. One is
    multiplied by the cosine of the token's angle, the other by the sine. Cosine and sine do not depend on the head.

    Args:
        q: [B, H, G, d], after RoPE.
        place: int64 [n], indices of tokens, counted from the first token of each row.
    """
    along, across, rest = rope_products(q, keys.mean[keys.states].unsqueeze(2).to(q.dtype), keys.rotary)
    # Tokens past a row's end may have positions that the tables do not have. These tokens are masked.
    positions = (keys.first[:, None] + place).clamp(max=len(keys.rotary.cos) - 1)
    cos, sin = (table[positions][:, None].to(q.dtype) for table in (keys.rotary.cos, keys.rotary.sin))
    return along @ cos.transpose(-1, -2) + across @ sin.transpose(-1, -2) + rest


def rope_products(q: Tensor, rows: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the product of ``q`` [..., d] and RoPE-rotated ``rows`` [..., d] into terms. RoPE rotates by an angle t
    per frequency.

    Returns the factors of cos t and those of sin t, [..., dim / 2] each, and a term [..., 1] that does not depend on t.
    """
    config = rotary.config
    (a, b), (c, e) = (halves(x[..., : config.dim], config) for x in (q, rows))
    rest = (q[..., config.dim :] * rows[..., config.dim :]).sum(-1, keepdim=True)
    return a * c + b * e, b * c - a * e, rest


def rotation_of(source: KeySource) -> Tensor | None:
    """Returns the codec's rotation, float32 [d, d], if rows are decoded without rotating them back; otherwise None.

    Rows of a codec with a state are rotated back, because the state may apply to rows before the rotation.
    """
    return source.rotation if isinstance(source, CodedRows) and not source.state else None


def _rows(source: KeySource, pages: slice) -> Tensor:
    """Decodes some pages to rows float32 [B, H, n, d]. The rows are not rotated back if ``rotation_of`` returns a
    rotation."""
    page_ids = source.pages[:, pages]
    if isinstance(source, LatentKeys):
        heads, chunk = heads_and_chunk(source)
        start, count = pages.start * PAGE // chunk, page_ids.shape[1] * PAGE // chunk
        chunks = torch.arange(start, start + count, device=page_ids.device)
        return gather_selected(source, chunks.expand(len(page_ids), heads, -1)).float()
    if isinstance(source, DenseRows):
        return source.rows[page_ids].float().transpose(1, 2).flatten(2, 4)
    codes = source.codes[page_ids].transpose(1, 2).flatten(2, 4)
    scale = source.scale[source.pages_of_scales[:, pages]].transpose(1, 2).flatten(2, 3)
    state = tuple(x[source.states][:, :, None] for x in source.state)
    kept = rotation_of(source)
    return source.codec.decode(codes, scale, source.rotation if kept is None else None, source.dim, state)
