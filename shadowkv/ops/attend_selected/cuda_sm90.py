"""Attention over selected tokens from latents and coded values on Hopper: ``attend_latents_sm90.cuh``."""

from __future__ import annotations

import math
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.attend_selected.sources import CodedRows, LatentKeys
from shadowkv.ops.codec import STRONG, UNIFORM, CodecId
from shadowkv.ops.extension import load_cuda

DIMS = (64, 128)
"""Head dims that the kernel supports."""
TILE = 64
"""Tokens that a warpgroup processes at a time."""
KERNELS: dict[int, str] = dict.fromkeys(UNIFORM, "attend_latents_sm90")
"""Ops in ``torch.ops.shadowkv_cuda`` by value codec."""
CONSUMERS = 3
"""Most consumer warpgroups per thread block; each leaves a partial result per unit."""
MOST_RANK = 160
"""Largest rank whose basis fits in shared memory."""


@cache
def available() -> bool:
    """Whether the kernel was built and the CUDA device is a Hopper."""
    return load_cuda("attend_latents_sm90", "attend_latents_sm90") and torch.cuda.get_device_capability() == (9, 0)


def takes(q: Tensor, keys: LatentKeys, values: CodedRows) -> bool:
    """Whether this kernel supports these arguments, as ``attend_selected`` takes them."""
    rank = keys.basis.shape[1]
    return (
        available()
        and keys.codec.id == CodecId.LATENT_INT4
        and values.codec.id in KERNELS
        and (values.scale_pages is None or values.scale_pages.data_ptr() == values.pages.data_ptr())
        and q.shape[2] in DIMS
        and rank <= MOST_RANK
        and 2 * keys.latents.shape[3] == rank + STRONG  # of one group of heads
        and keys.latents.stride(0) % 32 == values.codes.stride(0) % 32 == values.scale.stride(0) % 16 == 0
    )


def attend_selected(
    q: Tensor, keys: LatentKeys, values: CodedRows, selected: Tensor, log_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference; can be captured in a CUDA graph after a first call with the same ``keys.rotary``."""
    batch, heads, dim = q.shape
    assert values.rotation is not None, "these codecs have a rotation"
    kv_heads = selected.shape[1]
    tiles = -(-selected.shape[2] * keys.latents.shape[2] // TILE)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    blocks, segments = runs(batch * kv_heads, tiles, processors)
    parts = segments * CONSUMERS
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, dtype=torch.float32)
    getattr(torch.ops.shadowkv_cuda, KERNELS[values.codec.id])(
        q,
        selected,
        keys.codec.id,
        keys.latents,
        keys.basis,
        keys.mean,
        keys.states,
        keys.first,
        keys.pages,
        frequencies(keys.rotary),
        values.codec.id,
        values.codes,
        values.scale,
        values.rotation.contiguous(),
        values.pages,
        log_weight,
        math.log2(math.e) / math.sqrt(dim) * keys.rotary.config.magnitude,
        blocks,
        out,
        lse,
        lse.new_empty(batch, kv_heads, parts, heads // kv_heads, dim + 4),
    )
    return out, lse


def runs(units: int, tiles: int, most: int) -> tuple[int, int]:
    """Thread blocks, and most partial results per unit, when each block takes an equal run of all units' tiles."""
    blocks = min(max(1, units * tiles // CONSUMERS), most)
    least = units * tiles // blocks
    return blocks, min(tiles, (tiles - 2 + least) // least + 1)


_frequencies_of: WeakKeyDictionary[RotaryTables, Tensor] = WeakKeyDictionary()
"""Captured graphs read them by address: they live as long as the tables that they were computed from."""


def frequencies(rotary: RotaryTables) -> Tensor:
    """Revolutions per position as the kernel reads them, times 2^32: int32 [d / 32, 4, 2, 2], of dimensions 16 i + 8 j
    + 2 t + e at [i, t, j, e].
    """
    if rotary not in _frequencies_of:
        revolutions = rotary.config.inverse_frequencies() / (2 * math.pi) * 2**32
        ordered = revolutions.round().to(torch.int32).unflatten(0, (-1, 2, 4, 2)).transpose(1, 2)
        _frequencies_of[rotary] = ordered.contiguous().to(rotary.cos.device)
    return _frequencies_of[rotary]
