"""Attention over rows of 8-bit floats in CUDA. The kernel of ``paged_attention`` reads the pages in place
(``csrc/kernels/paged_attention/``). Each head has two scales: the key scale multiplies its scores, the value scale its
output."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows
from shadowkv.ops.attention_results import result_and_parts
from shadowkv.ops.case import NOT_CENTRED, Case, unless, unless_one_of
from shadowkv.ops.codec import CodecId
from shadowkv.ops.extension import cuda_missing, multiprocessors
from shadowkv.ops.paged_attention.cuda import number_and_rows, resident_blocks, splits
from shadowkv.ops.sequence_rows import SequenceRows

RESIDENT_BLOCKS = {64: 5, 96: 5, 128: 4, 256: 2}
"""Thread blocks of the compiled kernel that a multiprocessor holds at a time, by head dim."""

WIDE_BLOCKS = {64: 3, 96: 3, 128: 2}
"""As ``RESIDENT_BLOCKS``, if a kv head of a sequence has more than 8 queries (``paged_attention.cuda.WIDE_BLOCKS``)."""

missing = partial(cuda_missing, "attend_fp8", "attend_fp8")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    codecs = {"keys": case.key_codec, "values": case.value_codec}
    return [
        *(f"codec {codec} of {axis} is not fp8" for axis, codec in codecs.items() if codec != CodecId.FP8),
        *unless(not case.centred, NOT_CENTRED),
        *unless_one_of(case.dtype, (torch.bfloat16,)),
        *unless_one_of(case.head_dim, RESIDENT_BLOCKS, "head dim"),
    ]


def attend_coded(
    q: Tensor,
    keys: DenseRows | CodedRows,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 8-bit floats (e4m3) without a mean. Can be captured in a CUDA graph.

    Queries are bfloat16 with entries up to 65504 and a head dim of 64, 96, 128 or 256. Pages and lengths are read on
    the device and are not checked.

    Raises:
        ValueError: rows of another codec, or another head dim.
    """
    dim = q.shape[2]
    if dim not in RESIDENT_BLOCKS:
        raise ValueError(f"attend_coded in CUDA supports fp8 rows of head dim 64, 96, 128 or 256, not {dim}")
    keys, values, q = _fp8(keys), _fp8(values), q.contiguous()
    k, v = keys.codes.flatten(2, 3), values.codes.flatten(2, 3)
    count, starts, most_rows = number_and_rows(q, sequences)
    resident = resident_blocks(q.shape[1] // k.shape[1] * most_rows, RESIDENT_BLOCKS, WIDE_BLOCKS)
    split = splits(count * k.shape[1], keys.pages.shape[1], dim, multiprocessors(q.device), resident)
    out, lse, *parts = result_and_parts(q, split)
    torch.ops.shadowkv_cuda.attend_fp8(
        q, k, v, *keys.state, *values.state, keys.states, values.states, keys.pages, values.pages, begin, end,
        starts, most_rows, out, lse, *parts,
    )  # fmt: skip
    return out, lse


def _fp8(rows: DenseRows | CodedRows) -> CodedRows:
    """Returns ``rows`` if they are fp8 rows without a mean; raises ValueError otherwise."""
    if not isinstance(rows, CodedRows) or isinstance(rows, CentredKeys) or rows.codec.id != CodecId.FP8:
        name = rows.codec.name if isinstance(rows, CodedRows) else "dense"
        raise ValueError(f"attend_coded in CUDA takes fp8 rows, not {type(rows).__name__} ({name})")
    return rows
