"""The fetch buffer in PyTorch. Selected chunks that are not in the buffer are copied from host memory.

About two of three selected chunks were also selected in the previous step. ShadowKV (arXiv:2410.21465) keeps the chunks
of one step. Here, a chunk stays until its entry is the least recently used one and is needed for another chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SYNCHRONISES = True
"""The host finds out which chunks are missing. To do so, it waits for the device."""

SHORT_ROW = 1024
"""Chunks of fewer bytes than this are short rows. The GPU's address translation, not the bus, limits how fast they are
copied. Chunks of 384 B are limited in this way, chunks of 2 KiB are not."""


@dataclass(frozen=True)
class ChunkBuffer:
    """The fetch buffer of H kv heads in one layer, on one device. Each slot belongs to one sequence.

    For every slot and head, ``owner`` maps entries to chunks and ``entry`` maps chunks to entries. ``used`` is 0 where
    ``owner`` is -1. In an empty slot ``entry`` and ``owner`` are -1, ``used`` and ``step`` are 0.

    Attributes:
        rows: [slots, H, M, c, w], the chunks; M up to 32767.
        owner: int32 [slots, H, M], number of the chunk in each entry, -1 for none.
        entry: int16 [slots, H, n], the entry that holds each of a sequence's n chunks, -1 for none.
        used: int32 [slots, H, M], step in which an entry was last selected. Steps count from 1.
        step: int32 [slots, H], number of calls so far that selected chunks.
        counters: int64 [2], selected chunks and fetched chunks, over all calls, slots and heads.
    """

    rows: Tensor
    owner: Tensor
    entry: Tensor
    used: Tensor
    step: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, slots: int, entries: int, chunks: int, like: Tensor) -> ChunkBuffer:
        """Makes an empty buffer with ``entries`` entries per slot and head, for sequences of at most ``chunks`` chunks.

        Args:
            like: [N, H, C, c, w], the ``host`` of ``fetch_chunks``. The rows get its dtype, device and sizes.
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
        """Empties a slot for its next sequence. Fields may have further dimensions before the dimension of slots, such
        as layers."""
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
    """Copies selected chunks that are missing in ``buffer`` from ``host`` into it.

    There are B sequences, H kv heads, C chunks of c tokens in a page, and w elements per token and head. Fetched chunks
    replace chunks that are not selected now, the least recently used first. Ties are broken arbitrarily. Chunks that
    were last used more than 65,000 steps ago may count as tied. Chunks in host memory must not change while the buffer
    may hold them.

    Args:
        host: [N, H, C, c, w], indexed by page ids; readable by the device.
        pages: int64 [B, P].
        slots: int64 [B], the slot of each sequence. Only rows without selected chunks may repeat a slot.
        selected: int64 [B, H, k], distinct chunk numbers of a sequence, then -1s. k is at most M, the number of entries
            per slot and head.
        buffer: updated in place.
        stream: on a GPU, the stream that copies, after all prior work of the current stream. Readers must wait for this
            stream. Every call with this buffer must use the same stream. None is the current stream.
        overlapped: on a GPU, whether other work of similar length runs at the same time. Copies of short rows then use
            fewer thread blocks.

    Returns:
        int64 [B, H, k], the entries that hold the selected chunks, -1 for none.
    """
    entries = torch.full_like(selected, -1)
    row, head = (selected >= 0).any(-1).nonzero(as_tuple=True)  # the first axis is now pairs of sequence and head
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
