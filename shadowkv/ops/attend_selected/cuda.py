"""Attention over selected chunks in one CUDA kernel: ``csrc/kernels/attend_selected.cuh``."""

from __future__ import annotations

import math
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shadowkv.ops.attend_selected import cuda_sm90, reference
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    QuantisedRows,
    ValueSource,
)
from shadowkv.ops.extension import load_cuda
from shadowkv.ops.rotate.tables import RotaryTables

HEAD_DIMS = (64, 96, 128, 256)
CHUNKS = (1, 2, 4, 8, 16)
MAX_GROUP = 8
MAX_RANK = 256
WARPS = 4
"""Warps of a thread block; each takes tiles of its own."""
TILE = 32
"""Tokens that a warp takes at a time, at most."""
BLOCKS_PER_PROCESSOR = 2
"""Thread blocks of the kernel that a multiprocessor holds at a time."""


@cache
def available() -> bool:
    """Whether the op was built and there is a CUDA device."""
    if not load_cuda("attend_selected"):
        return False
    for name in ("attend_selected_latents", "attend_selected_rows"):
        torch.library.register_fake(f"shadowkv_cuda::{name}", lambda *args: None)
    return True


def attend_selected(
    q: Tensor, keys: KeySource, values: ValueSource, selected: Tensor, log_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference; can be captured in a CUDA graph after a first call with the same ``keys.rotary``.

    The kernel takes bfloat16 queries of head dim 64, 96, 128 or 256, at most 8 query heads per kv head, and chunks of
    1, 2, 4, 8 or 16 tokens, with

    - ``LatentKeys``: int8 or bfloat16 latents of a rank that is a multiple of 32 up to 256, bfloat16 basis, bfloat16
      or float32 mean, rotation of all dimensions in halves; with 4-bit or dense bfloat16 values, or, if the latents are
      int8, with 3-bit or 2-bit ones,
    - ``DenseRows`` keys with ``DenseRows`` values, both bfloat16,

    or with those values in a buffer. Pages lie on the queries' device, scales of values in the pages of the keys. The
    reference, which cannot be captured, does the rest.

    On Hopper, int8 latents of rank up to 160 with values of 4, 3 or 2 bits that are in no buffer, both of head dim 64
    or 128, go to a kernel of their own (``cuda_sm90``), and all else to ``csrc/kernels/attend_selected.cuh``.

    Rebuilt keys are rotated and scored in half, int8 latents are multiplied in half too: entries of the basis under
    6e-5 lose bits, keys over 65504 overflow. ``pages``, ``slots``, ``entries`` and ``selected`` are read on the device
    and are not checked.
    """
    if not _supported(q, keys, values, selected):
        return reference.attend_selected(q, keys, values, selected, log_weight)
    log_weight = None if log_weight is None else log_weight.contiguous()
    match keys, values:
        case LatentKeys(), QuantisedRows() if cuda_sm90.takes(q, keys, values):
            return cuda_sm90.attend_selected(q, keys, values, selected, log_weight)
    batch, heads, dim = q.shape
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, dtype=torch.float32)
    kv_heads = selected.shape[1]
    tokens = selected.shape[2] * (keys.latents.shape[2] if isinstance(keys, LatentKeys) else keys.rows.shape[3])
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    split = splits(batch * kv_heads, tokens, processors)
    width = dim + 4 if split > 1 else 0
    partial = lse.new_empty(batch, kv_heads, split, heads // kv_heads, width)
    stored = _stored(values)
    match keys:
        case LatentKeys():
            torch.ops.shadowkv_cuda.attend_selected_latents(
                q,
                selected,
                keys.latents,
                keys.basis,
                keys.mean,
                keys.slots,
                keys.pages,
                *_turns(keys.rotary),
                *stored,
                log_weight,
                _score_scale(dim) * keys.rotary.config.magnitude,
                out,
                lse,
                partial,
            )
        case DenseRows():
            rows, _, _, *where = stored
            torch.ops.shadowkv_cuda.attend_selected_rows(
                q, selected, keys.rows, keys.pages, rows, *where, log_weight, _score_scale(dim), out, lse, partial
            )
    return out, lse


def _stored(values: ValueSource) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Rows or codes, scales and rotation of codes, pages or entries, and slots of a buffer."""
    match values:
        case DenseRows():
            return values.rows, None, None, values.pages, None
        case QuantisedRows():
            return values.codes, values.scale, values.rotation.contiguous(), values.pages, None
        case BufferedRows():
            _, scale, rotation, _, _ = _stored(values.source)
            return values.rows, scale, rotation, values.entries, values.slots


def splits(units: int, tokens: int, processors: int) -> int:
    """Blocks for each of ``units`` sequences x kv heads: enough to fill the device, with a tile for every warp.

    A second wave of whole blocks costs less than splitting them does (90 against 100 us at 384 units of 1024 tokens on
    an H200): the basis of 40 KiB is read once per block.
    """
    return max(1, min(-(-tokens // (WARPS * TILE)), BLOCKS_PER_PROCESSOR * processors // units))


def _supported(q: Tensor, keys: KeySource, values: ValueSource, selected: Tensor) -> bool:
    dim, heads, device = q.shape[2], selected.shape[1], q.device
    if q.dtype != torch.bfloat16 or dim not in HEAD_DIMS or not 1 <= q.shape[1] // heads <= MAX_GROUP:
        return False
    if not selected.numel() or not (q.is_contiguous() and selected.is_contiguous()):
        return False
    stored = values.source if isinstance(values, BufferedRows) else values
    match stored:
        case DenseRows(rows=rows):
            chunk, good = rows.shape[3], rows.dtype == torch.bfloat16 and rows.device == device
        case QuantisedRows(codes=codes):
            scale_pages = stored.pages if stored.scale_pages is None else stored.scale_pages
            chunk, good = codes.shape[3], codes.device == device
            good = good and scale_pages.data_ptr() == keys.pages.data_ptr()
    if not good or chunk not in CHUNKS:
        return False
    match keys:
        case DenseRows(rows=rows):
            return isinstance(stored, DenseRows) and rows.dtype == torch.bfloat16 and rows.device == device
        case LatentKeys():
            rank, rope = keys.latents.shape[3], keys.rotary.config
            few_bits = isinstance(stored, QuantisedRows) and stored.bits < 4
            return (
                keys.latents.dtype in ((torch.int8,) if few_bits else (torch.int8, torch.bfloat16))
                and rank % 32 == 0
                and rank <= MAX_RANK
                and keys.basis.dtype == torch.bfloat16
                and (keys.mean is None or keys.mean.dtype in (torch.bfloat16, torch.float32))
                and rope.dim == dim
                and not rope.interleaved
            )


def _score_scale(dim: int) -> float:
    """Of a product of query and key in the exponent to base 2."""
    return math.log2(math.e) / math.sqrt(dim)


_turns_of: WeakKeyDictionary[RotaryTables, tuple[Tensor, Tensor]] = WeakKeyDictionary()
"""Captured graphs read them by address: they live as long as the tables that they were made from."""


def _turns(rotary: RotaryTables) -> tuple[Tensor, Tensor]:
    """cos and sin as the kernel reads them, of every eighth position and of the first eight: the rest are products.

    float16 [n, d / 4, 2, 2], for each two dimensions their cosines and their sines, without the magnitude.
    """
    if rotary not in _turns_of:
        both = torch.stack([rotary.cos, rotary.sin], dim=1).unflatten(-1, (-1, 2)) / rotary.config.magnitude
        both = both.transpose(1, 2).half()
        _turns_of[rotary] = both[::8].contiguous(), both[:8].contiguous()
    return _turns_of[rotary]
