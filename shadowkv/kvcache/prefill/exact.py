"""Prompts that attend exactly, in a form that a CUDA graph can capture: all their numbers are on the device, in shapes
that many prompts share.

Prompts can follow cached tokens. Compressed cached tokens are rebuilt first. If a sequence is compressed, full pages
of its new tokens are compressed too, with the state of its last segment. If a sequence can be compressed later, an
index can learn from its last queries. Prompts for which a state must be fitted are not computed here.

Shapes: T new tokens, P compressed pages, H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.compression.pages import Compression
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import OBSERVED, CompressedTokens
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.sequence import CachedSequence, Tables
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.dense_attention.forms import Packed

MAX_PROMPTS = 15
"""Maximum number of prompts in one pass."""

MAX_CACHED = 16_384
"""Maximum number of cached tokens, in total, of the sequences whose prompts are in one pass."""

MAX_CACHED_SEGMENTS = MAX_PROMPTS + 1
"""Maximum number of segments, in total, of the sequences whose prompts are in one pass."""


class PromptNumbers(NamedTuple):
    """Numbers of the prompts' sequences in a group of layers, int64 [MAX_PROMPTS + 1] each. The last entry is padding.

    Attributes:
        slot: the sequence's row in the tables of pages.
        ring_pages: number of pages of the sequence's ring (the exact pages of its tail or window, which are reused in
            turn).
        static_pages: number of exact pages of the sequence's sink.
        before, after: number of the sequence's compressed tokens before and after the prompt.
        segment: slot of the sequence's last segment.
        state, first: state of this last segment, and position of its first token.
        learning: the state that learns from the prompt's last queries; the spare state if none does.
    """

    slot: Tensor
    ring_pages: Tensor
    static_pages: Tensor
    before: Tensor
    after: Tensor
    segment: Tensor
    state: Tensor
    first: Tensor
    learning: Tensor


class CachedSegments(NamedTuple):
    """Numbers of the sequences' cached segments, int64 [MAX_CACHED_SEGMENTS] each, sequence after sequence. Unused
    entries have 0 pages.

    Attributes:
        slot: the segment's row in the tables of compressed pages.
        state: the segment's state.
        first: position of the segment's first token.
        pages: number of the segment's pages.
    """

    slot: Tensor
    state: Tensor
    first: Tensor
    pages: Tensor


@dataclass
class CompressingPrompts:
    """What prompts read and write besides exact pages, if their sequences are compressed or can be compressed later.

    Attributes:
        cached: the compressed pages of all segments, in one table [1, P]. States and first positions are those of the
            segments.
        segment_of: int64 [P], the segment of each page; -1 for unused pages.
        rows: int64 [n, 64]. n pages are compressed in this pass. ``rows`` are the rows of their tokens in
            ``ExactPrompts.keys``.
        new: int64 [n, 64], rows of the same tokens among the T new tokens; -1 for tokens of the exact tail.
        states, first, pages: int64 [n], states of these pages, positions of their first tokens, and page ids. Unused
            pages are written to the padding page.
        learning: int64 [MAX_PROMPTS + 1], for each sequence, the state that learns from its last queries.
        queries: int64 [MAX_PROMPTS + 1, OBSERVED], rows of the sequences' last queries among the T new tokens. They are
            arbitrary for sequences from which no state learns.
        first_query: int64 [MAX_PROMPTS + 1], position of the first of these queries in its sequence.
    """

    cached: CompressedBatch
    segment_of: Tensor
    rows: Tensor
    new: Tensor
    states: Tensor
    first: Tensor
    pages: Tensor
    learning: Tensor
    queries: Tensor
    first_query: Tensor


@dataclass
class ExactPrompts:
    """New tokens of up to ``MAX_PROMPTS`` sequences, packed into T rows. Unused rows belong to one more sequence, the
    padding.

    Attributes:
        positions: int64 [T].
        write_page, write_offset: int64 [T], ids of exact pages, and rows in them. Tokens that are already outside the
            window at the end of the prompt, and tokens that are compressed, are written to the padding page.
        cu_seqlens: int32 [MAX_PROMPTS + 2], the first row of each sequence. The last sequences can be empty.
        cu_seqlens_k: int32 [MAX_PROMPTS + 2], the first row of each sequence in ``sources``: its cached tokens (only
            the newest if there is a window), then its new tokens.
        sources: int64 [K], places of the keys and values that each sequence attends to (``ops/copies``). K is T
            plus the maximum number of cached tokens. Places outside the pages are row numbers: the T new tokens have
            rows 0 to T - 1, and rebuilt tokens have the rows from T on.
        compressing: what prompts need in addition if their sequences are compressed or can be compressed later. None
            without such prompts, and in a group that does not compress.
        keys, values: [K, H, d], keys after RoPE and values of the current layer.
        attended: the last layer whose queries have attended; None if there was none.
    """

    positions: Tensor
    write_page: Tensor
    write_offset: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    sources: Tensor
    compressing: CompressingPrompts | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    attended: int | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of rows."""
        return len(self.positions)


def has_room(sequences: Sequence[CachedSequence]) -> bool:
    """Whether one pass has room for prompts of all ``sequences`` in a group of layers: for their number, their cached
    tokens and their segments."""
    cached, segments = (sum(each) for each in ((x.length for x in sequences), (len(x.path) for x in sequences)))
    return len(sequences) <= MAX_PROMPTS and cached <= MAX_CACHED and segments <= MAX_CACHED_SEGMENTS


def lengths_of(sequences: Sequence[CachedSequence], lengths: Sequence[int], rows: int) -> np.ndarray:
    """Returns the numbers of new and of cached tokens of each sequence, int64 [2, MAX_PROMPTS + 1]. The last column is
    the padding. ``lengths`` are the numbers of new tokens, and ``rows`` is the number of rows that they are packed
    into. Raises ValueError if there are too many sequences or tokens."""
    left = rows - sum(lengths)
    if len(lengths) > MAX_PROMPTS or left < 0:
        reason = f"the limits are {MAX_PROMPTS} prompts and {rows} tokens"
        raise ValueError(f"{len(lengths)} prompts with {sum(lengths)} tokens do not fit: {reason}")
    numbers = np.zeros((2, MAX_PROMPTS + 1), np.int64)
    numbers[0, : len(lengths)], numbers[0, -1] = lengths, left
    numbers[1, : len(sequences)] = [sequence.length for sequence in sequences]
    if numbers[1].sum() > MAX_CACHED:
        raise ValueError(f"the sequences have {numbers[1].sum()} cached tokens, more than {MAX_CACHED}")
    return numbers


def numbers_of(
    sequences: Sequence[CachedSequence], lengths: Sequence[int], layout: GroupLayout, tables: Tables
) -> np.ndarray:
    """Returns ``PromptNumbers`` and ``CachedSegments`` of the sequences in a group of layers, packed into int64 [n].
    ``lengths`` are the sequences' numbers of new tokens. Raises ValueError if the sequences have too many segments."""
    spare_state = tables.state[tables.padding_segment_slot]
    padding = tables.padding_slot, 1, 0, 0, 0, tables.padding_segment_slot, spare_state, 0, spare_state
    numbers = np.repeat(np.array(padding)[:, None], MAX_PROMPTS + 1, axis=1)
    spare = tables.padding_segment_slot, spare_state, 0, 0
    segments = np.repeat(np.array(spare)[:, None], MAX_CACHED_SEGMENTS, axis=1)
    path = [segment for sequence in sequences for segment in sequence.path]
    if len(path) > MAX_CACHED_SEGMENTS:
        raise ValueError(f"the sequences have {len(path)} cached segments, more than {MAX_CACHED_SEGMENTS}")
    for column, (sequence, tokens) in enumerate(zip(sequences, lengths, strict=True)):
        slot = sequence.slot
        numbers[:3, column] = slot, max(1, tables.ring_pages[slot]), tables.static_pages[slot]
        if sequence.path:
            last = sequence.path[-1]
            length = sequence.length + tokens
            after = layout.growth.compressed(sequence.segment_state, length, length == sequence.capacity).tokens
            numbers[3:8, column] = sequence.compressed, after, last.slot, tables.state[last.slot], last.first
        elif sequence.state_reserve:
            numbers[8, column] = sequence.state_reserve[0]
    for column, segment in enumerate(path):
        segments[:, column] = segment.slot, tables.state[segment.slot], segment.first, len(segment.pages)
    return np.concatenate((numbers.ravel(), segments.ravel()))


def split_numbers(numbers: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Splits packed numbers int64 [n] into those of ``lengths_of``, int64 [2, MAX_PROMPTS + 1], and of ``numbers_of``,
    int64 [groups, m]."""
    lengths, of_groups = numbers.tensor_split((2 * (MAX_PROMPTS + 1),))
    return lengths.view(2, -1), of_groups.view(groups, -1)


def exact_prompts(
    lengths: Tensor, numbers: Tensor, rows: int, compressing: bool, layout: GroupLayout, tables: Tables
) -> ExactPrompts:
    """Makes the ``ExactPrompts`` of a group of layers, from ``lengths_of`` and ``numbers_of`` on the device.

    Args:
        rows: T.
        compressing: whether sequences can be compressed in this group, or a state can learn from their queries.
    """
    (new, cached), window = lengths, layout.window
    count = len(PromptNumbers._fields) * (MAX_PROMPTS + 1)
    of_sequence = PromptNumbers(*numbers[:count].view(-1, MAX_PROMPTS + 1))
    slot, num_pages, static, before, after = of_sequence[:5]
    attended = cached if window is None else cached.clamp(max=window)
    starts, key_starts = _starts(new), _starts(new + attended)

    row = torch.arange(rows, device=lengths.device)
    sequence = torch.searchsorted(starts[1:], row, right=True)
    within = row - starts[sequence]
    padding = slot[sequence] == tables.padding_slot
    position = torch.where(padding, 0, cached[sequence] + within)  # RoPE tables have no positions for padding
    page = position // PAGE
    # Tokens that are already outside the window at the end of the prompt, and tokens that are compressed, are written
    # to the padding page.
    kept = page >= (-(-(cached + new) // PAGE) - num_pages)[sequence]
    kept &= position >= after[sequence]
    page_id = tables.exact[slot[sequence], static[sequence] + page % num_pages[sequence]].long()
    padding_page = tables.exact[tables.padding_slot, 0].long()

    most = MAX_CACHED if window is None else min(MAX_CACHED, MAX_PROMPTS * window)
    row = torch.arange(rows + most, device=lengths.device)
    sequence = torch.searchsorted(key_starts[1:], row, right=True).clamp(max=MAX_PROMPTS)
    within = row - key_starts[sequence] - attended[sequence]  # below 0 for cached tokens
    at = cached[sequence] + within
    column = static[sequence] + at // PAGE % num_pages[sequence]
    source = (starts[sequence] + within).clamp(max=rows - 1)
    if compressing:
        is_compressed = at < before[sequence]
        is_sink = is_compressed & (at < layout.spec.static_tokens)
        column = torch.where(is_sink, at // PAGE, column)
        # The pages of a sequence's segments follow one another.
        rebuilt = rows + (before.cumsum(0) - before)[sequence] + at
        source = torch.where(is_compressed, rebuilt, source)
        within = torch.where(is_compressed & ~is_sink, 0, within)
    exact = tables.exact[slot[sequence], column].long() * PAGE + at % PAGE
    more = None
    if compressing:
        segments = CachedSegments(*numbers[count:].view(-1, MAX_CACHED_SEGMENTS))
        more = _compressing(of_sequence, segments, cached, starts, key_starts, rows, tables)
    return ExactPrompts(
        positions=position,
        write_page=torch.where(kept, page_id, padding_page),
        write_offset=position % PAGE,
        cu_seqlens=starts.int(),
        cu_seqlens_k=key_starts.int(),
        sources=torch.where(within < 0, exact, -1 - source),
        compressing=more,
    )


def _compressing(
    numbers: PromptNumbers,
    segments: CachedSegments,
    cached: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    rows: int,
    tables: Tables,
) -> CompressingPrompts:
    """Makes ``CompressingPrompts``. ``starts`` and ``key_starts`` are the sequences' first rows among the new tokens,
    and among the keys."""
    begun, number = _starts(segments.pages), torch.arange(MAX_CACHED // PAGE, device=cached.device)
    segment = torch.searchsorted(begun[1:], number, right=True)
    used = segment < MAX_CACHED_SEGMENTS
    at = segment.clamp(max=MAX_CACHED_SEGMENTS - 1)
    column = torch.where(used, number - begun[at], 0)
    pages = tables.pages[segments.slot[at], column].long()[None]
    batch = CompressedBatch(
        slots=segments.slot,
        states=segments.state,
        # ``rebuild_rows`` expects the position that page 0 of the table would have.
        first=segments.first - PAGE * begun[:-1],
        pages=pages,
        value_pages=pages,
        num_pages=segments.pages,
        num_chunks=segments.pages,
        budget=segments.pages,
        max_budget=0,
    )

    begun = _starts((numbers.after - numbers.before) // PAGE)
    # An exact tail adds at most one page to the pages that the new tokens fill (``KVCache.can_capture``).
    number = torch.arange(rows // PAGE + MAX_PROMPTS, device=cached.device)
    sequence = torch.searchsorted(begun[1:], number, right=True)
    written = sequence <= MAX_PROMPTS
    sequence = sequence.clamp(max=MAX_PROMPTS)
    first = torch.where(written, numbers.before[sequence] + PAGE * (number - begun[sequence]), 0)
    own = torch.where(written, numbers.segment[sequence], tables.padding_segment_slot)
    column = torch.where(written, first - numbers.first[sequence], 0) // PAGE
    position = first[:, None] + torch.arange(PAGE, device=cached.device)
    new = position - cached[sequence][:, None]
    is_new = written[:, None] & (new >= 0)
    ends = starts[1:]
    last = ends[:, None] - OBSERVED + torch.arange(OBSERVED, device=cached.device)
    return CompressingPrompts(
        cached=batch,
        segment_of=torch.where(used, segment, -1),
        rows=torch.where(written[:, None], key_starts[sequence][:, None] + position, 0),
        new=torch.where(is_new, starts[sequence][:, None] + new, -1),
        states=torch.where(written, numbers.state[sequence], numbers.state[-1]),
        first=first,
        pages=tables.pages[own, column].long(),
        learning=numbers.learning,
        queries=last.clamp(min=0),
        first_query=(cached + ends - starts[:-1] - OBSERVED).clamp(min=0),
    )


def _starts(lengths: Tensor) -> Tensor:
    """Returns the first rows of packed sequences with these lengths, and the row after the last sequence."""
    return pad(lengths.cumsum(0), (1, 0))


class ExactPrefill:
    """Storage and attention of ``ExactPrompts`` in a group of layers (``batch.PartHandler``)."""

    def __init__(self, store: GroupStore, compression: Compression) -> None:
        self.store, self.ops, self.window = store, store.ops, store.layout.window
        self.compression, self.parts = compression, store.layout.parts

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can capture the attention."""
        windowed = self.window is not None or self.store.layout.shape.sinks
        form = "windowed" if windowed else "packed"
        return f"dense_attention.{form}" not in self.ops.needing_lengths

    def append(self, layer: int, k: Tensor, v: Tensor, part: ExactPrompts, index_keys: Tensor | None = None) -> None:
        """Stores keys (before RoPE) and values [T, H, d]. First reads the cached tokens, because new tokens overwrite
        cached ones in a ring."""
        pages = self.store.k[layer], self.store.v[layer]
        part.keys = part.values = None  # frees the previous layer's keys and values
        tokens = self.ops.apply_rope(k, part.positions, self.store.rotary), v
        if part.compressing is not None:
            tokens = self._with_rebuilt(layer, *tokens, part.compressing)
        part.keys, part.values = self.ops.gather_context(*tokens, *pages, part.sources, part.cu_seqlens_k[-1:])
        if part.compressing is not None:
            self._compress(layer, k, part.keys, part.values, part.compressing)
        self.ops.append_tokens(k, v, part.positions, self.store.rotary, *pages, part.write_page, part.write_offset)
        if index_keys is not None:
            self.store.append_index_keys(layer, index_keys, part.positions, part.write_page, part.write_offset)

    def start(
        self,
        layer: int,
        q: Tensor,
        part: ExactPrompts,
        sinks: Tensor | None = None,
        index_queries: IndexQueries | None = None,
    ) -> Callable[[], Tensor]:
        """Attends with queries [T, H_q, d] before RoPE. The returned function returns the result. ``index_queries`` are
        not used: with an indexer, these sequences are exact and so short that a query attends to all tokens."""
        assert part.keys is not None and part.values is not None, "the layer has not been appended"
        q = self.ops.apply_rope(q, part.positions, self.store.rotary)
        if part.compressing is not None and part.attended != layer:  # false for later layers that reuse this one's keys
            part.attended = layer
            of_last, learning = q[part.compressing.queries][None], part.compressing.learning
            for one in self.parts:
                one.observe(self.store, slice(layer, layer + 1), learning, of_last, part.compressing.first_query)
        pack = Packed(part.cu_seqlens, None, part.cu_seqlens_k)
        out = self.ops.dense_attention(q, part.keys, part.values, pack, window=self.window, sinks=sinks)
        return lambda: out

    def _with_rebuilt(
        self, layer: int, rope_keys: Tensor, values: Tensor, part: CompressingPrompts
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values [T + 64 P, H, d]: the T new tokens, and behind them all tokens of the P compressed
        pages."""
        sources = (one.source(self.store, layer, part.cached) for one in (self.parts.keys, self.parts.values))
        both = []
        for new, source in zip((rope_keys, values), sources, strict=True):
            joined = new.new_empty(len(new) + PAGE * len(part.segment_of), *new.shape[1:])
            joined[: len(new)] = new
            self.ops.rebuild_rows(source, 0, joined[len(new) :].transpose(0, 1), False, part.segment_of)
            both.append(joined)
        return both[0], both[1]

    def _compress(self, layer: int, k: Tensor, rope_keys: Tensor, values: Tensor, part: CompressingPrompts) -> None:
        """Compresses full pages of tokens. ``k`` [T, H, d] are the new tokens' keys before RoPE; ``rope_keys`` and
        ``values`` [K, H, d] have all tokens."""
        of_pages, own = rope_keys[part.rows], values[part.rows]
        positions = part.first[:, None] + torch.arange(PAGE, device=k.device)
        keys = self.ops.apply_rope(of_pages, positions, self.store.rotary, inverse=True)
        keys = torch.where((part.new >= 0)[..., None, None], k[part.new.clamp(min=0)], keys)
        where = slice(layer, layer + 1), part.states, part.first, part.pages, part.pages
        self.compression.write(CompressedTokens(*where, keys[None], of_pages[None], own[None]))
