"""The buffer of fetched chunks in PyTorch: about two of three selected chunks were also selected in the previous step.

ShadowKV keeps the chunks of one step (arXiv:2410.21465); here an entry stays until it is the least recently used and
its place is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SYNCHRONISES = True
"""Missing chunks are determined on the host."""

SHORT_ROW = 1024
"""On a GPU, chunks of fewer bytes are limited by address translation rather than by the bus: chunks of 384 B are,
chunks of 2 KiB are not."""


@dataclass(frozen=True)
class ChunkBuffer:
    """Chunks of H kv heads in one layer and their numbers, all on one device; each slot is owned by one sequence.

    For every slot and head, ``owner`` and ``entry`` are inverse to each other, and ``used`` is 0 where ``owner`` is -1.
    In an empty slot ``entry`` and ``owner`` are -1, ``used`` and ``step`` are 0.

    Attributes:
        rows: [slots, H, M, c, w], the chunks; M up to 32767.
        owner: int32 [slots, H, M], number of the chunk in an entry, -1 for none.
        entry: int16 [slots, H, n], entry of a chunk by its number, -1 for none.
        used: int32 [slots, H, M], step in which an entry was last selected, counted from 1.
        step: int32 [slots, H], number of calls so far that selected anything.
        counters: int64 [2], chunks selected and chunks fetched, over all calls, slots and heads.
    """

    rows: Tensor
    owner: Tensor
    entry: Tensor
    used: Tensor
    step: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, slots: int, entries: int, chunks: int, like: Tensor) -> ChunkBuffer:
        """A buffer of ``entries`` per slot and head for sequences of at most ``chunks``, with rows like those of
        ``like``.

        Args:
            like: [N, H, C, c, w], the ``host`` of ``fetch_chunks``.
        """
        heads, device = like.shape[1], like.device
        return cls(
            like.new_zeros(slots, heads, entries, *like.shape[3:]),
            torch.full((slots, heads, entries), -1, dtype=torch.int32, device=device),
            torch.full((slots, heads, chunks), -1, dtype=torch.int16, device=device),
            torch.zeros(slots, heads, entries, dtype=torch.int32, device=device),
            torch.zeros(slots, heads, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )

    def reset(self, slot: int | slice) -> None:
        """Empties a slot for its next sequence. Fields may have more dimensions, e.g. layers, before that of slots."""
        self.owner[..., slot, :, :].fill_(-1)
        self.entry[..., slot, :, :].fill_(-1)
        self.used[..., slot, :, :].zero_()
        self.step[..., slot, :].zero_()


def fetch_chunks(
    host: Tensor,
    pages: Tensor,
    slots: Tensor,
    selected: Tensor,
    buffer: ChunkBuffer,
    stream: torch.cuda.Stream | None = None,
    overlapped: bool = False,
) -> Tensor:
    """Makes ``buffer.rows`` hold all selected chunks; chunks that it already holds are not read from ``host``.

    B sequences, H kv heads, C chunks of c tokens in a page, w elements per token and head. Fetched chunks replace
    entries that are not selected now, least recently used first, with ties broken arbitrarily; steps that lie more than
    65,000 back may count as equal. Chunks must not change while the buffer may hold them.

    Args:
        host: [N, H, C, c, w], indexed by page ids; readable by the device.
        pages: int64 [B, P].
        slots: int64 [B], rows of the buffer that the sequences own. Rows in which nothing is selected may repeat a
            slot, others may not.
        selected: int64 [B, H, k], distinct chunk numbers of a sequence, -1 for none; those come last. k <= M.
        buffer: updated in place.
        stream: on a GPU, the stream that copies the bytes, after all prior work of the current stream; readers must
            wait for it. Must be the same for every call with this buffer. None is the current stream.
        overlapped: on a GPU, whether other work that takes as long runs meanwhile, which copies of short chunks should
            not slow down.

    Returns:
        int64 [B, H, k], the entries that hold the selected chunks, -1 for none.
    """
    entries = torch.full_like(selected, -1)
    row, head = (selected >= 0).any(-1).nonzero(as_tuple=True)  # everything below is per pair of sequence and head
    slot, chosen = slots[row], selected[row, head]
    there = chosen >= 0
    step = buffer.step[slot, head] + 1
    buffer.step[slot, head] = step

    place = buffer.entry[slot, head].long().gather(-1, chosen.clamp(min=0)).masked_fill(~there, -1)
    missed = there & (place < 0)
    pair, column = (place >= 0).nonzero(as_tuple=True)
    buffer.used[slot[pair], head[pair], place[pair, column]] = step[pair]
    oldest = buffer.used[slot, head].argsort(-1)[:, : selected.shape[-1]]
    place = torch.where(missed, oldest.gather(-1, (missed.cumsum(-1) - 1).clamp(min=0)), place)
    entries[row, head] = place

    pair, column = missed.nonzero(as_tuple=True)
    at_slot, at_head, new, at = slot[pair], head[pair], chosen[pair, column], place[pair, column]
    old = buffer.owner[at_slot, at_head, at].long()
    evicted = old >= 0
    buffer.entry[at_slot[evicted], at_head[evicted], old[evicted]] = -1
    buffer.entry[at_slot, at_head, new] = at.to(torch.int16)
    buffer.owner[at_slot, at_head, at] = new.to(torch.int32)
    buffer.used[at_slot, at_head, at] = step[pair]
    page = pages[row[pair], new // host.shape[2]]
    buffer.rows[at_slot, at_head, at] = host[page, at_head, new % host.shape[2]]
    buffer.counters.add_(torch.stack([there.sum(), missed.sum()]))
    return entries
