"""Prompts that stay exact, in a form that a CUDA graph can capture: all their numbers are on the device, in shapes that
many prompts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence, Tables
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.dense_attention.forms import Packed

MAX_PROMPTS = 15
"""Maximum number of prompts in one pass."""

MAX_CACHED = 16_384
"""Maximum number of cached tokens, in total, of the sequences whose prompts are in one pass."""


@dataclass
class ExactPrompts:
    """New tokens of up to ``MAX_PROMPTS`` exact sequences, packed into T rows. Unused rows belong to one more sequence,
    the padding.

    Attributes:
        positions: int64 [T].
        write_page, write_offset: int64 [T], ids of exact pages, and rows in them. Tokens that leave a window at once
            are written to the padding page.
        cu_seqlens: int32 [MAX_PROMPTS + 2], the first row of each sequence. The last sequences can be empty.
        cu_seqlens_k: int32 [MAX_PROMPTS + 2], the first row of each sequence in ``sources``: its cached tokens (only
            the newest if there is a window), then its new tokens.
        sources: int64 [K], places of the keys and values that each sequence attends to (``ops/gather_context``). K is T
            plus the maximum number of cached tokens.
        keys, values: [K, H, d], keys after RoPE and values of the current layer.
    """

    positions: Tensor
    write_page: Tensor
    write_offset: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    sources: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of rows."""
        return len(self.positions)


def lengths_of(sequences: Sequence[CachedSequence], lengths: Sequence[int], rows: int) -> np.ndarray:
    """Numbers of new and of cached tokens, int64 [2, MAX_PROMPTS + 1], of sequences with ``lengths`` new tokens in
    ``rows`` rows. The last column is the padding. Raises ValueError if there are too many sequences or tokens."""
    left = rows - sum(lengths)
    if len(lengths) > MAX_PROMPTS or left < 0:
        reason = f"the limits are {MAX_PROMPTS} prompts and {rows} tokens"
        raise ValueError(f"{len(lengths)} prompts with {sum(lengths)} tokens do not fit: {reason}")
    numbers = np.zeros((2, MAX_PROMPTS + 1), np.int64)
    numbers[0, : len(lengths)], numbers[0, -1] = lengths, left
    numbers[1, : len(sequences)] = [sequence.length for sequence in sequences]
    if numbers[1].sum() > MAX_CACHED:
        raise ValueError(f"{numbers[1].sum()} cached tokens, more than {MAX_CACHED}")
    return numbers


def pages_of(sequences: Sequence[CachedSequence], tables: Tables) -> np.ndarray:
    """The sequences' slots and numbers of exact pages in a group of layers, int64 [2, MAX_PROMPTS + 1]."""
    slots = np.full(MAX_PROMPTS + 1, tables.padding_slot, np.int64)
    slots[: len(sequences)] = [sequence.slot for sequence in sequences]
    return np.stack((slots, np.maximum(1, tables.ring_pages[slots])))


def exact_prompts(lengths: Tensor, pages: Tensor, rows: int, tables: Tables, window: int | None) -> ExactPrompts:
    """The prompts in a group of layers, from ``lengths_of`` and ``pages_of`` on the device."""
    (new, cached), (slot, num_pages) = lengths, pages
    attended = cached if window is None else cached.clamp(max=window)
    starts, key_starts = _starts(new), _starts(new + attended)

    row = torch.arange(rows, device=lengths.device)
    sequence = torch.searchsorted(starts[1:], row, right=True)
    within = row - starts[sequence]
    padding = slot[sequence] == tables.padding_slot
    position = torch.where(padding, 0, cached[sequence] + within)  # RoPE tables have no positions for padding
    page = position // PAGE
    kept = page >= (-(-(cached + new) // PAGE) - num_pages)[sequence]  # what leaves the window at once is not stored
    page_id = tables.exact[slot[sequence], page % num_pages[sequence]].long()
    padding_page = tables.exact[tables.padding_slot, 0].long()

    most = MAX_CACHED if window is None else min(MAX_CACHED, MAX_PROMPTS * window)
    row = torch.arange(rows + most, device=lengths.device)
    sequence = torch.searchsorted(key_starts[1:], row, right=True).clamp(max=MAX_PROMPTS)
    within = row - key_starts[sequence] - attended[sequence]  # below 0: cached
    before = cached[sequence] + within
    source = tables.exact[slot[sequence], before // PAGE % num_pages[sequence]].long() * PAGE + before % PAGE
    token = (starts[sequence] + within).clamp(max=rows - 1)
    return ExactPrompts(
        positions=position,
        write_page=torch.where(kept, page_id, padding_page),
        write_offset=position % PAGE,
        cu_seqlens=starts.int(),
        cu_seqlens_k=key_starts.int(),
        sources=torch.where(within < 0, source, -1 - token),
    )


def _starts(lengths: Tensor) -> Tensor:
    """First rows of packed sequences with these lengths, and the end of the last one."""
    return pad(lengths.cumsum(0), (1, 0))


class ExactPrefill:
    """Storage and attention of these prompts in a group of layers (``batch.PartHandler``)."""

    def __init__(self, store: GroupStore) -> None:
        self.store, self.ops, self.window = store, store.ops, store.layout.window

    @property
    def captured(self) -> bool:
        """Whether a graph can capture its attention."""
        windowed = self.window is not None or self.store.layout.shape.sinks
        form = "windowed" if windowed else "packed"
        return f"dense_attention.{form}" not in self.ops.needing_lengths

    def append(self, layer: int, k: Tensor, v: Tensor, part: ExactPrompts, index_keys: Tensor | None = None) -> None:
        """Stores keys (before RoPE) and values [T, H, d]. First reads the cached tokens, because in the ring of a
        window the new ones overwrite them."""
        pages = self.store.k[layer], self.store.v[layer]
        part.keys = part.values = None  # frees those of the previous layer
        rope_keys = self.ops.apply_rope(k, part.positions, self.store.rotary)
        part.keys, part.values = self.ops.gather_context(rope_keys, v, *pages, part.sources, part.cu_seqlens_k[-1:])
        self.ops.append_tokens(k, v, part.positions, self.store.rotary, *pages, part.write_page, part.write_offset)
        if index_keys is not None:
            self.store.append_index_keys(layer, index_keys, part.positions, part.write_page, part.write_offset)

    def start(
        self,
        layer: int,
        q: Tensor,
        part: ExactPrompts,
        sinks: Tensor | None = None,
        index_queries: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Attends with queries [T, H_q, d] before RoPE. The returned function returns the result. Index queries select
        nothing, because a sequence that stays exact is not longer than what a query attends to."""
        assert part.keys is not None and part.values is not None, "the layer has not been appended"
        q = self.ops.apply_rope(q, part.positions, self.store.rotary)
        pack = Packed(part.cu_seqlens, None, part.cu_seqlens_k)
        out = self.ops.dense_attention(q, part.keys, part.values, pack, window=self.window, sinks=sinks)
        return lambda: out
