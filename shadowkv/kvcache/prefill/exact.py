"""New prompts that stay exact, in the form that a CUDA graph can hold: all about them is on the device, in shapes that
many prompts have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence, Tables
from shadowkv.kvcache.sequences.store import GroupStore

MAX_PROMPTS = 15
"""New prompts in such a pass."""


@dataclass
class ExactPrompts:
    """Tokens of up to ``MAX_PROMPTS`` new sequences that all stay exact, packed, in T rows: those that are left over
    belong to one more sequence, which is nobody's.

    Attributes:
        positions: int64 [T].
        write_page, write_offset: int64 [T], names of exact pages, and rows there; those of tokens that are not kept are
            nobody's.
        cu_seqlens: int32 [MAX_PROMPTS + 2], where each sequence begins; the last ones may be empty.
        keys, values: [T, H, d] after and without RoPE, of the layer at work.
    """

    positions: Tensor
    write_page: Tensor
    write_offset: Tensor
    cu_seqlens: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)


def starts_of(lengths: Sequence[int], rows: int) -> np.ndarray:
    """``ExactPrompts.cu_seqlens`` of prompts of these lengths in that many rows."""
    if len(lengths) > MAX_PROMPTS or sum(lengths) > rows:
        raise ValueError(f"{len(lengths)} prompts of {sum(lengths)} tokens, more than {MAX_PROMPTS} of {rows}")
    starts = np.full(MAX_PROMPTS + 2, rows, np.int64)
    starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return starts


def numbers_of(sequences: Sequence[CachedSequence], tables: Tables) -> np.ndarray:
    """What a group of layers needs of the sequences: slots and pages, int64 [2, MAX_PROMPTS + 1]."""
    slots = np.full(MAX_PROMPTS + 1, tables.padding_slot, np.int64)
    slots[: len(sequences)] = [sequence.slot for sequence in sequences]
    return np.stack((slots, np.maximum(1, tables.ring_pages[slots])))


def exact_prompts(starts: Tensor, numbers: Tensor, rows: int, tables: Tables) -> ExactPrompts:
    """Prompts as a group of layers sees them, from ``starts_of`` and ``numbers_of`` on the device."""
    row = torch.arange(rows, device=starts.device)
    sequence = torch.searchsorted(starts[1:], row, right=True)
    position, length = row - starts[sequence], (starts[1:] - starts[:-1])[sequence]
    slot, pages = (of_each[sequence] for of_each in numbers)
    position = torch.where(slot == tables.padding_slot, 0, position)  # nobody's may be more than tables of RoPE have
    page = position // PAGE
    kept = page >= -(-length // PAGE) - pages  # what leaves the window at once is not stored
    names = tables.exact[slot, page % pages].long()
    nobody = tables.exact[tables.padding_slot, 0].long()
    return ExactPrompts(position, torch.where(kept, names, nobody), position % PAGE, starts.int())


class ExactPrefill:
    """What a group of layers does with such prompts (``batch.PartHandler``)."""

    def __init__(self, store: GroupStore) -> None:
        self.store, self.ops, self.window = store, store.ops, store.layout.window

    @property
    def captured(self) -> bool:
        """Whether its attention can be captured in a graph."""
        windowed = self.window is not None or self.store.layout.shape.sinks
        op = "causal_window_attention" if windowed else "ragged_attention"
        return op not in self.ops.needing_lengths

    def append(self, layer: int, k: Tensor, v: Tensor, part: ExactPrompts) -> None:
        """Stores keys (before RoPE) and values [T, H, d] where they remain."""
        pages = self.store.k[layer], self.store.v[layer]
        where = part.write_page, part.write_offset
        self.ops.append_tokens(k, v, part.positions, self.store.rotary, *pages, *where)
        part.keys, part.values = self.ops.apply_rope(k, part.positions, self.store.rotary), v.contiguous()

    def start(self, layer: int, q: Tensor, part: ExactPrompts, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Attends at once, with queries [T, H_q, d] before RoPE; the returned function has the result."""
        assert part.keys is not None and part.values is not None, "the layer has not been appended"
        q = self.ops.apply_rope(q, part.positions, self.store.rotary)
        out: Tensor
        if self.window is None and sinks is None:
            out = self.ops.ragged_attention(q, part.keys, part.values, part.cu_seqlens, None)
        else:
            window = self.window or part.num_tokens
            out = self.ops.causal_window_attention(q, part.keys, part.values, window, sinks, part.cu_seqlens, None)
        return lambda: out
