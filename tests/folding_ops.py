"""Ops that read the pages of a sequence once for all its rows, as GPU backends do, and check that its rows agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.ops.attend_coded import reference as of_coded
from shadowkv.ops.attend_selected.sources import LatentKeys, attend_once
from shadowkv.ops.paged_attention import reference as of_pages
from shadowkv.ops.registry import Ops
from shadowkv.ops.sequence_rows import SequenceRows


def fold(ops: Ops, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Makes ``ops`` attend in this way. Returns a list to which each call for several rows of a sequence adds the op's
    name and the largest number of rows."""
    calls = list[tuple[str, int]]()

    def paged_attention(
        q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor, sequences: SequenceRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if sequences is not None:
            calls.append(("paged_attention", _checked(sequences, len(q))))
            first = _first_rows(sequences)
            attended = counts > 0
            assert torch.equal(pages[first][attended], pages[attended]), "rows of a sequence have the same pages"
            later = first[1:] == first[:-1]
            assert (counts[1:] >= counts[:-1])[later].all(), "no row has fewer tokens than the row before"
            pages = pages[first]
        return of_pages.paged_attention(q, k, v, pages, counts)

    def attend_coded(
        q: Tensor, keys: Any, values: Any, begin: Tensor, end: Tensor, sequences: SequenceRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if sequences is None or isinstance(keys, LatentKeys):
            return of_coded.attend_coded(q, keys, values, begin, end)
        calls.append(("attend_coded", _checked(sequences, len(q))))
        own = _first_rows(sequences)
        for rows in (begin, end, keys.states if hasattr(keys, "states") else begin):
            assert rows is None or torch.equal(rows[own], rows), "rows of a sequence have the same tokens and state"
        return attend_once(of_coded.attend_coded, q, keys, values, begin, end, sequences)

    patch.setattr(ops, "paged_attention", paged_attention)
    patch.setattr(ops, "attend_coded", attend_coded)
    return calls


def _checked(sequences: SequenceRows, rows: int) -> int:
    """Returns the largest number of rows of a sequence."""
    counts = sequences.starts.diff()
    assert sequences.starts[0] == 0 and sequences.starts[-1] == rows, "each row is in one sequence"
    assert 0 <= counts.min() <= counts.max() <= sequences.most
    return int(counts.max())


def _first_rows(sequences: SequenceRows) -> Tensor:
    """The first row of each row's sequence, int64 [B]."""
    counts = sequences.starts.diff()
    return sequences.starts[:-1].repeat_interleave(counts)
