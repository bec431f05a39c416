"""Attention over selected chunks in one CUDA kernel (``csrc/kernels/attend_selected/``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    CentredKeys,
    CodedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    ValueSource,
)
from shadowkv.ops.attention_results import attend_to_nothing
from shadowkv.ops.case import NOT_CENTRED, Case, unless, unless_one_of
from shadowkv.ops.codec import CodecId
from shadowkv.ops.extension import cuda_missing, multiprocessors

CHUNKS = (1, 2, 4, 8, 16)
MAX_GROUP = 16
"""Maximum number of query heads per kv head that the kernels of this op support."""
QUERIES = 8
"""Maximum number of query heads per thread block. If a kv head has more, several blocks rebuild the same keys."""
ROPE_DIMS = 16
"""The number of dimensions that RoPE rotates must be a multiple of this."""
KERNELS: dict[tuple[int, int], str] = {}
"""Names of ops in ``torch.ops.shadowkv_cuda``, by key codec and value codec. Pairs that are not listed use the op
``attend_selected``. Kernels for codecs from outside the package are added here."""
WARPS = 4
"""Warps per thread block; each processes its own tiles."""
TILE = 32
"""Maximum number of tokens that a warp processes at a time."""
BLOCKS_PER_PROCESSOR = 2
"""Thread blocks of the kernel that a multiprocessor holds at a time."""


missing = partial(cuda_missing, "attend_selected", "attend_selected")


def supports(case: Case) -> list[str]:
    """Why no kernel serves ``case`` on this GPU."""
    reasons = unfit_queries(case) + unless(not case.centred or case.key_codec == CodecId.FP8, NOT_CENTRED)
    if case.rank or case.centred:
        reasons += other_rope(case.rope_dim, case.head_dim, case.interleaved)
    memory = _op(case.key_codec, case.value_codec, "_memory")
    try:
        needed = memory(case.key_codec, case.value_codec, case.head_dim, case.rank)
    except RuntimeError as error:
        return [*reasons, str(error).partition("\n")[0].split(", ", 2)[-1]]  # C++'s message without function and line
    if needed > case.block_memory:
        reasons.append(f"a block needs {needed} bytes of shared memory, and can have {case.block_memory}")
    return reasons


def unfit_queries(case: Case) -> list[str]:
    """Why the CUDA kernels of this op do not support the queries and chunk sizes of ``case``."""
    return [
        *unless_one_of(case.dtype, (torch.bfloat16,)),
        *unless(1 <= case.group <= MAX_GROUP, f"{case.group} query heads per kv head are more than {MAX_GROUP}"),
        *unless_one_of(case.chunk, CHUNKS, "chunk size"),
    ]


def attend_selected(
    q: Tensor,
    keys: KeySource,
    values: ValueSource,
    selected: Tensor,
    log_weight: Tensor | None = None,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference. Can be captured in a CUDA graph after a first call with the same ``keys.rotary``.

    Queries, exact rows and bases are bfloat16. The head dim is 64, 96, 128 or 256, with at most 16 query heads per kv
    head. Chunks have 1, 2, 4, 8 or 16 tokens. Ranks are multiples of 32 up to 256. RoPE rotates a multiple of 16
    dimensions, in halves. ``csrc/kernels/attend_selected/attend_selected.cu`` lists the pairs of key and value codecs.
    Pages are on the queries' device. Scales of values are in the same pages as the keys.

    RoPE, scores of rebuilt keys and products of coded latents are in float16: entries of the basis under 6e-5 lose
    bits, keys over 65504 overflow. So are products of fp8 rows, which become float16 exactly, and those of a mean key
    with queries: queries over 65504 overflow, and a mean that adds more than that to a score. ``pages``, ``states``,
    ``first``, ``slots``, ``entries`` and ``selected`` are read on the device and are not checked.

    Raises:
        RuntimeError: codecs without a kernel, or arguments that the kernel does not support.
        ValueError: another RoPE, scales in other pages than the keys, or keys without their mean that are not fp8.
    """
    batch, heads, dim = q.shape
    if not selected.numel():
        return attend_to_nothing(q)
    q, selected = q.contiguous(), selected.contiguous()
    log_weight = None if log_weight is None else log_weight.contiguous()
    _check(keys, values)
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, dtype=torch.float32)
    kv_heads = selected.shape[1]
    key_codec, rows, *basis, key_scale = _stored_keys(keys)
    value_codec, *stored = _stored_values(values)
    units = batch * kv_heads * -(-heads // (kv_heads * QUERIES))
    split = splits(units, selected.shape[2] * rows.shape[-2], multiprocessors(q.device))
    width = dim + 4 if split > 1 else 0
    partial = lse.new_empty(batch, kv_heads, split, heads // kv_heads, width)
    rope = keys.rotary.config if isinstance(keys, LatentKeys | CentredKeys) else RopeConfig(dim)
    score_scale = math.log2(math.e) / math.sqrt(dim)  # turns a product into a base-2 exponent
    if isinstance(keys, LatentKeys):
        score_scale *= rope.magnitude
    keys_of = key_codec, rows, *basis, rope.dim, rope.magnitude, key_scale, keys.pages
    call = (q, selected, *keys_of, value_codec, *stored, log_weight, score_scale)
    _op(key_codec, value_codec)(*call, out, lse, partial)
    return out, lse


def _op(key_codec: int, value_codec: int, what: str = "") -> Callable[..., Any]:
    name = KERNELS.get((key_codec, value_codec), "attend_selected")
    return getattr(torch.ops.shadowkv_cuda, name + what)


def other_rope(rope_dim: int, dim: int, interleaved: bool) -> list[str]:
    """Why the kernel cannot rotate keys of ``dim`` dimensions of which RoPE rotates ``rope_dim``."""
    pairs = "neighbours" if interleaved else "halves"
    return unless(
        rope_dim % ROPE_DIMS == 0 and not interleaved,
        f"RoPE rotates {rope_dim} of {dim} dimensions in {pairs}; the kernel needs a multiple of {ROPE_DIMS} in halves",
    )


def _check(keys: KeySource, values: ValueSource) -> None:
    """Checks what the kernel cannot check: RoPE, the pages of scales, and which keys are without their mean. Raises
    ValueError."""
    stored = values.source if isinstance(values, BufferedRows) else values
    if isinstance(keys, LatentKeys | CentredKeys):
        rope = keys.rotary.config
        for reason in other_rope(rope.dim, rope.head_dim, rope.interleaved):
            raise ValueError(reason)
    if isinstance(keys, CentredKeys) and keys.codec.id != CodecId.FP8:
        raise ValueError(NOT_CENTRED)
    if not isinstance(stored, CodedRows) or not stored.scale.shape[-1]:
        return
    if stored.pages_of_scales.data_ptr() != keys.pages.data_ptr():
        raise ValueError("scales of values are not in the pages of the keys")


def _stored_keys(keys: KeySource) -> tuple[Any, ...]:
    """Returns the kernel's arguments for keys: the codec's id and the rows; then the basis of latents; mean, states,
    first positions and ``_angles`` of these and of centred keys; and the scales of fp8 rows, whose states are among
    these arguments, too. What keys do not have is None."""
    match keys:
        case DenseRows():
            return CodecId.DENSE, keys.rows, *[None] * 7
        case CentredKeys():
            mean = keys.mean, keys.states, keys.first
            return keys.codec.id, keys.codes, None, *mean, *_angles(keys.rotary), _scale_of_heads(keys)
        case CodedRows():
            return keys.codec.id, keys.codes, None, None, keys.states, None, None, None, _scale_of_heads(keys)
        case LatentKeys():
            state = keys.basis, keys.mean, keys.states, keys.first
            return keys.codec.id, keys.latents, *state, *_angles(keys.rotary), None


def _stored_values(values: ValueSource) -> tuple[Any, ...]:
    """Returns the kernel's arguments for values: the codec's id, rows or codes, scales, the states of fp8's scales, and
    the codec's rotation; then pages and None, or for a buffer its entries and slots."""
    match values:
        case DenseRows():
            return CodecId.DENSE, values.rows, None, None, None, values.pages, None
        case CodedRows():
            rotation = None if values.rotation is None else values.rotation.contiguous()
            of_heads = _scale_of_heads(values)
            scale = values.scale if of_heads is None else of_heads
            return values.codec.id, values.codes, scale, values.states, rotation, values.pages, None
        case BufferedRows():
            codec, _, scale, states, rotation, _, _ = _stored_values(values.source)
            return codec, values.rows, scale, states, rotation, values.entries, values.slots


def _scale_of_heads(rows: CodedRows) -> Tensor | None:
    """The scale of each kv head, float32 [states, H, 1], of fp8 rows; None for other rows."""
    return rows.state[0] if rows.codec.id == CodecId.FP8 else None


def splits(units: int, tokens: int, processors: int) -> int:
    """Returns the number of thread blocks that share the tokens of a unit. A unit is up to ``QUERIES`` query heads of
    one kv head and sequence.

    There are as many blocks as the device can hold at a time, but each warp gets at least one tile. If there are more
    units than blocks that the device can hold, units are not split: each block reads the basis of 40 KiB, which takes
    longer than an uneven last wave. 384 units of 1024 tokens take 90 us on an H200, and 100 us if units are split.
    """
    return max(1, min(-(-tokens // (WARPS * TILE)), BLOCKS_PER_PROCESSOR * processors // units))


_angles_of: WeakKeyDictionary[RotaryTables, tuple[Tensor, Tensor]] = WeakKeyDictionary()
"""Results of ``_angles``. They are kept as long as their RoPE tables, because captured graphs read them by address."""


def _angles(rotary: RotaryTables) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of every eighth position, and of the first eight positions. From both, the kernel
    computes the cosines and sines of all positions.

    Both tensors are float16 [n, d / 4, 2, 2] for n positions: the cosines of two dimensions, then their sines. They are
    not multiplied by RoPE's magnitude. Dimensions that do not rotate have cosine 1 and sine 0.
    """
    if rotary not in _angles_of:
        both = torch.stack([rotary.cos, rotary.sin], dim=1) / rotary.config.magnitude
        still = torch.eye(2, 1, device=both.device)  # cos and sin of the angle 0
        still = still.expand(len(both), -1, (rotary.config.head_dim - rotary.config.dim) // 2)
        both = torch.cat([both, still], dim=-1).unflatten(-1, (-1, 2)).transpose(1, 2).half()
        _angles_of[rotary] = both[::8].contiguous(), both[:8].contiguous()
    return _angles_of[rotary]
