"""Attention over all dense rows of compressed pages in CUDA. It calls the kernel of ``paged_window_attention``, which
reads a range of tokens in each page (``csrc/kernels/paged_attention/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows
from shadowkv.ops.case import Case, unless
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention.cuda import attend
from shadowkv.ops.paged_window_attention import cuda
from shadowkv.ops.sequence_rows import SequenceRows

missing = cuda.missing


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    codecs = {"keys": case.key_codec, "values": case.value_codec}
    return [
        *(f"codec {codec} of {axis} is not dense" for axis, codec in codecs.items() if codec),
        *unless(not case.rank, "keys are latents"),
        *unless(not case.host_values, "values are on the host, in other pages than keys"),
        *cuda.supports(case),
    ]


def attend_coded(
    q: Tensor,
    keys: DenseRows | CodedRows,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for dense bfloat16 rows whose keys and values share one table of pages. Can be captured in
    a CUDA graph.

    The head dim is 64, 96, 128 or 256. Pages and lengths are read on the device and are not checked.

    Raises:
        ValueError: coded rows, or values with a table of pages of their own.
    """
    if not isinstance(keys, DenseRows) or not isinstance(values, DenseRows):
        name = next(type(rows).__name__ for rows in (keys, values) if not isinstance(rows, DenseRows))
        raise ValueError(f"attend_coded in CUDA takes DenseRows here, not {name}")
    if values.pages is not keys.pages:
        raise ValueError("attend_coded in CUDA takes dense rows only if values have the keys' table of pages")
    k, v = keys.rows.flatten(2, 3), values.rows.flatten(2, 3)
    ranges = ranges_of_pages(begin, end, keys.pages.shape[1])
    return attend("paged_window_attention", q, k, v, keys.pages, *ranges, sequences=sequences)


def ranges_of_pages(begin: Tensor, end: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Returns where the tokens from ``begin`` up to ``end`` start and stop in each page of a row, int64 [B, pages]
    each. Both numbers are counted from the page's start. They are equal for a page without such tokens."""
    first = PAGE * torch.arange(pages, device=begin.device)
    starts = (begin[:, None] - first).clamp(0, PAGE)
    return starts, (end[:, None] - first).clamp(0, PAGE).maximum(starts)
