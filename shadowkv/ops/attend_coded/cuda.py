"""Attention over coded rows in CUDA, in integer arithmetic (``csrc/kernels/attend_coded/``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows
from shadowkv.ops.attention_results import attend_to_nothing, result_and_parts
from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.extension import cuda_missing, multiprocessors
from shadowkv.ops.sequence_rows import SequenceRows

LLOYD = (CodecId.LLOYD_4BIT, CodecId.LLOYD_3BIT, CodecId.LLOYD_2BIT)
VALUES_OF = {
    **dict.fromkeys(LLOYD, LLOYD),
    CodecId.POLAR_INT4: (CodecId.POLAR_INT4,),
    CodecId.TQ3_0: (CodecId.TQ3_0,),
    CodecId.KVARN_4BIT: (CodecId.KVARN_2BIT,),
}
"""For each key codec: the value codecs for which there is a kernel."""
DIM = 128

QUERIES = 4
"""Query heads per thread block."""

WARPS, RESIDENT_BLOCKS = {False: 4, True: 8}, {False: 5, True: 2}
"""Warps per thread block, and thread blocks that a multiprocessor of an H100 or H200 holds at a time. Both depend on
whether keys are centred, because the compiled kernels use different numbers of registers."""

MAX_WAVES = 5
"""Maximum number of waves of thread blocks. More blocks even out ragged lengths, but each block takes time to start and
writes a partial result."""

PAGES_OF_A_WARP = 16
"""Another wave of blocks is worth its cost if each warp still has at least this many pages."""

missing = partial(cuda_missing, "attend_coded", "attend_coded")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    reasons = unless_one_of(case.head_dim, (DIM,), "head dim")
    reasons += _unknown_pair(case.key_codec, case.value_codec)
    whole = not case.centred or case.rope_dim % 8 == 0
    return reasons + unless(whole, f"RoPE rotates {case.rope_dim} dimensions of centred keys, no multiple of 8")


def attend_coded(
    q: Tensor,
    keys: DenseRows | CodedRows,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, but some operands are rounded to 16 bits. Can be captured in a CUDA graph.

    A query is rounded to multiples of 1/32,639 of its largest entry. A page's softmax weights are multiplied by the
    scales of its values, and the products are rounded to multiples of 1/65,535 of the largest product. Levels are the
    integers of ``RowCodec.whole_levels``.

    Keys and values have 128 dimensions, and their codecs are one of the pairs in ``VALUES_OF``. The rows of a head in a
    page are contiguous. Each row reads its pages, also if ``sequences`` has several. Page ids, states and positions are
    read on the device and not checked: wrong ones read out of bounds.

    Raises:
        ValueError: rows of other dimensions or codecs.
        RuntimeError: shapes, dtypes or strides that do not fit.
    """
    batch, query_heads, dim = q.shape
    if not isinstance(keys, CodedRows) or not isinstance(values, CodedRows) or dim != DIM:
        kinds = (rows.codec.name if isinstance(rows, CodedRows) else "dense" for rows in (keys, values))
        raise ValueError(
            f"attend_coded in CUDA takes {DIM} dimensions of coded rows, not {dim} in {' and '.join(kinds)}"
        )
    if wrong := _unknown_pair(keys.codec.id, values.codec.id):
        raise ValueError(f"attend_coded in CUDA: {'; '.join(wrong)}")
    heads, entries = keys.codes.shape[1], keys.pages.shape[1]
    if not batch or not entries:
        return attend_to_nothing(q)
    units, centred = batch * heads * -(-query_heads // heads // QUERIES), isinstance(keys, CentredKeys)
    split = splits(units, entries, multiprocessors(q.device), centred)
    rope_q = q.float().contiguous()
    asked = rope_q if keys.rotation is None else rope_q @ keys.rotation
    out, lse, *parts = result_and_parts(asked, split)
    torch.ops.shadowkv_cuda.attend_coded(
        asked, begin.contiguous(), end.contiguous(), *_form(keys), *_form(values), *_mean(rope_q, keys),
        out, lse, *parts,
    )  # fmt: skip
    if values.rotation is not None:
        out = out @ values.rotation.T
    return out.to(q.dtype), lse


def splits(units: int, entries: int, processors: int, centred: bool) -> int:
    """Returns the number of thread blocks that share the pages of a unit. A unit is up to ``QUERIES`` query heads of
    one kv head and sequence.

    Blocks run in waves. Waves are added, up to ``MAX_WAVES``, while more than a tenth of all places for blocks would
    stay empty. Each warp has at least two pages.
    """
    warps, places = WARPS[centred], processors * RESIDENT_BLOCKS[centred]
    waves = min(MAX_WAVES, max(1, units * entries // (places * warps * PAGES_OF_A_WARP)))
    while waves < MAX_WAVES and places * waves // units * units < 0.9 * places * waves:
        waves += 1
    return max(1, min(-(-entries // (2 * warps)), places * waves // units))


def level_bytes(codec: RowCodec) -> tuple[int, float]:
    """Packs the levels of a codec's first eight codes into the bytes of an integer. Returns the integer and the step.

    If all levels fit into a byte each, a byte with the value b stands for the level b · step. Otherwise, it stands for
    (2 b + 1) · step. The kernel derives the levels of further codes from these. For codecs without levels, the integer
    is 0 and the step 1.
    """
    levels = codec.whole_levels(DIM)
    if levels is None:
        return 0, 1.0
    multiples, step = levels
    if max(map(abs, multiples)) > 127:
        multiples = tuple((multiple - 1) // 2 for multiple in multiples)
    return int.from_bytes((byte & 255 for byte in multiples[:8]), "little", signed=True), step


def _unknown_pair(keys: int, values: int) -> list[str]:
    """Returns the reason if there is no kernel for a pair of key and value codecs, otherwise ``[]``."""
    wanted = {int(codec): others for codec, others in VALUES_OF.items()}.get(keys)
    if wanted is None:
        return [f"codec {keys} of keys is not one of lloyd-4bit, -3bit and -2bit, polar-int4, tq3_0 and kvarn-4bit"]
    return unless(values in wanted, f"codec {values} of values has no kernel with codec {keys} of keys")


def _form(rows: CodedRows) -> tuple[Any, ...]:
    """Returns the kernel's arguments for keys or values: the codec's id, codes, scales, pages of codes and of scales,
    and ``level_bytes``."""
    pages = rows.pages, rows.pages_of_scales
    return rows.codec.id, rows.codes.flatten(2, 3), rows.scale, *pages, *level_bytes(rows.codec)


def _mean(rope_q: Tensor, keys: CodedRows) -> tuple[Any, ...]:
    """Returns the kernel's arguments for centred keys: queries without the codec's rotation, mean keys, and RoPE. For
    other keys, the tensors are None, and RoPE's magnitude and ``interleaved`` are 1 and False."""
    if not isinstance(keys, CentredKeys):
        return *[None] * 6, 1.0, False
    rotary = keys.rotary
    assert keys.states is not None, "centred keys have states, whether or not their codec has a state"
    places = keys.states.contiguous(), keys.first.contiguous()
    return rope_q, keys.mean, *places, rotary.cos, rotary.sin, rotary.config.magnitude, rotary.config.interleaved
