"""Plans of rounded shapes: few graphs serve many steps. Padding names the padding slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shadowkv.kvcache.decode.batch import DecodePlan, SegmentNumbers, SequenceNumbers
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.sequences.sequence import Tables

FEWEST_PAGES = 8
"""Minimum width of a page table."""


def round_up(count: int) -> int:
    """The next of 1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 …: at most a quarter more than ``count``."""
    step = max(1, 2 ** (count.bit_length() - 3))
    return -(-count // step) * step


def padding_numbers(tables: Tables) -> tuple[SequenceNumbers, SegmentNumbers]:
    """Numbers of a row that pads a batch: a sequence whose ring has one page, and its segment, which is empty."""
    slot = tables.padding_segment_slot
    return SequenceNumbers(tables.padding_slot, 0, 0, 1, 0), SegmentNumbers(slot, tables.state[slot], 0, 0, 0, 0, 0, 0)


def rounded(plan: DecodePlan, max_batch: int, spec: KVSpec, tables: Tables) -> DecodePlan:
    """``plan`` rounded up for a batch of up to ``max_batch`` sequences, or more where it has more."""
    count, rows, most = plan.shape[:3]
    batch = max(min(round_up(count), max_batch), count)
    exact = min(round_up(max(plan.exact_pages, FEWEST_PAGES)), tables.exact.shape[1])
    sealed = plan.sealed_pages and min(round_up(max(plan.sealed_pages, FEWEST_PAGES)), tables.pages.shape[1])
    budget = int(spec.budget_chunks(np.asarray(sealed * PAGE + spec.local + PAGE))) if sealed else 0
    sequence, segment = padding_numbers(tables)
    of_sequence = plan.of_sequence
    if of_sequence is None:
        wanted, owner = batch, np.arange(count, batch)
    else:
        # Every sequence may have gained a segment before the shape changes again: rounded as batches are.
        wanted, owner, columns = round_up(max(rows, batch + 1)), np.array(0), round_up(most)
        none = np.full((batch, columns), wanted)
        none[:count, :most] = np.where(of_sequence < rows, of_sequence, wanted)
        of_sequence = none
    return replace(
        plan,
        sequences=SequenceNumbers(*_padded(plan.sequences, sequence, batch)),
        segments=SegmentNumbers(*_padded(plan.segments, segment._replace(sequence=owner), wanted)),
        of_sequence=of_sequence,
        exact_pages=exact,
        sealed_pages=sealed,
        max_budget=budget,
    )


def padded(numbers: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Numbers int64 [6, n] of pages to be sealed, rounded up with those of a padding page, int64 [6]."""
    more = round_up(numbers.shape[1]) - numbers.shape[1]
    return np.concatenate((numbers, np.repeat(padding[:, None], more, axis=1)), axis=1)


def _padded(numbers: tuple[np.ndarray, ...], more: tuple[object, ...], count: int) -> list[np.ndarray]:
    width = count - len(numbers[0])
    return [np.concatenate((x, np.broadcast_to(np.asarray(y), (width,)))) for x, y in zip(numbers, more, strict=True)]
