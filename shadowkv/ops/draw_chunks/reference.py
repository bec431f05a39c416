"""Stratified draws of chunks in PyTorch, after what an index found (vAttention, arXiv:2510.05688).

Each of n equal runs of a row's chunks gives one, at a place that a hash says: the same in every process and batch.
Where it was found already or may not be selected it is dropped, not replaced: its run then has that much less left, and
a sum over the drawn, each weighted by its run's size, stays an unbiased estimate of that over all that were not found.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def draw_chunks(
    selected: Tensor,
    first: int,
    excluded: Tensor | None,
    pages: Tensor,
    num_chunks: Tensor,
    found: Tensor,
    drawn: Tensor,
    seeds: Tensor,
    layer: int,
) -> None:
    """Writes drawn chunks into ``selected`` from column ``found`` of each row on.

    Args:
        selected: int64 [B, H, k]; the first ``found`` of a row are the chunks found, ascending, -1s last. What comes
            after is overwritten: with the drawn ones, ascending, and -1s.
        first: chunks before this one are not drawn.
        excluded: bool [N, H, C], other chunks that may not be selected, views over all pages; None if there are none.
        pages: int64 [B, P].
        num_chunks: int64 [B], chunks of each row.
        found, drawn: int64 [B]; their sum is k at most where any are drawn. 0 drawn leaves a row as it is, and so does
            a head where fewer were found, so that -1s are last.
        seeds: int64 [B]; rows of the same seed and number of chunks draw from the same places.
        layer: other layers and heads draw from other places.
    """
    batch, heads, k = selected.shape
    device = selected.device
    number = torch.arange(k, device=device)
    head = torch.arange(heads, device=device)[:, None]
    state = mix(mix(seeds[:, None, None] * 0x9E3779B1 + (layer * heads + head)) + number * 0x85EBCA77)
    runs = drawn.clamp(min=1)[:, None, None]
    left = (num_chunks - first).clamp(min=0)[:, None, None]
    start, stop = (end * left // runs for end in (number, number + 1))
    chunk = first + start + (state * (stop - start) >> 32)  # [B, H, k]
    bad = ((number >= drawn[:, None, None]) | (left == 0)).repeat(1, heads, 1)
    if excluded is not None:
        chunks = excluded.shape[-1]
        names = pages.gather(1, (chunk // chunks).clamp(0, max(pages.shape[1] - 1, 0)).flatten(1)).view_as(chunk)
        bad |= excluded[names, head, chunk % chunks]
    before = torch.where(number < found[:, None, None], selected, -1)
    for row in range(batch):  # rows apart: all pairs of a batch would be many
        bad[row] |= (chunk[row].unsqueeze(-1) == before[row].unsqueeze(-2)).any(-1)
    last = torch.iinfo(torch.int64).max
    chunk = chunk.masked_fill(bad, last).sort(dim=-1).values
    place = (number - found[:, None, None]).clamp(min=0).expand(batch, heads, k)
    tail = chunk.gather(2, place)
    tail = tail.masked_fill(tail == last, -1)
    last_found = selected.gather(2, (found - 1).clamp(0, k - 1)[:, None, None].expand(-1, heads, 1))
    enough = (found == 0)[:, None, None] | (last_found >= 0)
    active = (drawn > 0)[:, None, None] & (number >= found[:, None, None]) & enough
    selected.copy_(torch.where(active, tail, selected))


def mix(x: Tensor) -> Tensor:
    """A hash of the low 32 bits of each number (Chris Wellons' lowbias32), int64 in [0, 2**32)."""
    x = x & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
