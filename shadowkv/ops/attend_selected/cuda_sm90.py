"""Attention over selected tokens, with keys as latents and coded values, on Hopper
(``csrc/kernels/attend_latents_sm90/``)."""

from __future__ import annotations

import math
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.attend_selected.cuda import other_rope, unfit_queries
from shadowkv.ops.attend_selected.sources import CodedRows, KeySource, LatentKeys, ValueSource
from shadowkv.ops.attention_results import attend_to_nothing
from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.codec import STRONG, UNIFORM, CodecId
from shadowkv.ops.extension import HOPPER, cuda_missing, multiprocessors

DIMS = (64, 128)
"""Head dims that the kernel supports."""
TILE = 64
"""Tokens that a warpgroup processes at a time."""
KERNELS: dict[int, str] = dict.fromkeys(UNIFORM, "attend_latents_sm90")
"""Names of ops in ``torch.ops.shadowkv_cuda``, by value codec."""
CONSUMERS = 3
"""Maximum number of consumer warpgroups per thread block. Each writes a partial result for its tiles of a unit. A unit
is one kv head of one sequence."""
RANKS = (32, 64, 96, 128, 160)
"""Ranks that the kernel supports. The basis of a larger rank does not fit in shared memory."""


missing = partial(cuda_missing, "attend_latents_sm90", "attend_latents_sm90", capability=HOPPER)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return [
        *unfit_queries(case),
        *unless_one_of(case.head_dim, DIMS, "head dim"),
        *unless(case.key_codec == CodecId.LATENT_INT4, f"codec {case.key_codec} of keys is not low-rank-int4"),
        *unless(case.value_codec in KERNELS, f"codec {case.value_codec} of values does not have equal steps"),
        *unless_one_of(case.rank, RANKS, "rank"),
        *unless(
            2 * case.latent_width == case.rank + STRONG,
            f"latents of {case.latent_width} bytes do not have {STRONG} dimensions in 8 bits and the others in 4",
        ),
        *unless(not case.host_values, "values are on the host"),
        *other_rope(case.rope_dim, case.head_dim, case.interleaved),
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

    Queries are bfloat16. The head dim is 64 or 128, with at most 16 query heads per kv head. Chunks have 1, 2, 4, 8 or
    16 tokens. Keys are latents of a rank in ``RANKS``, with the 32 strongest dimensions in 8 bits and the others in 4.
    RoPE rotates a multiple of 16 dimensions, in halves. Values have a codec in ``KERNELS`` and are not in a buffer.
    Pages are on the queries' device, multiples of 32 bytes apart. Scales of values are in the pages of their codes.

    Keys are rebuilt, rotated and scored in float16: entries of the basis under 6e-5 lose bits, keys over 65504
    overflow. ``pages``, ``states``, ``first``, ``selected`` and ``most`` are read on the device and are not checked.
    The kernel reads ``most`` before the previous kernel on the stream has ended. The previous kernel must not write
    ``most``, but it may write the other arguments.

    Raises:
        ValueError: keys or values in other formats, another RoPE, or scales in other pages than the codes.
        RuntimeError: shapes, dtypes or strides that do not fit.
    """
    batch, heads, dim = q.shape
    if not selected.numel():
        return attend_to_nothing(q)
    keys, values = _latents(keys), _coded(values)
    assert values.rotation is not None, "these codecs have a rotation"
    q, selected, kv_heads = q.contiguous(), selected.contiguous(), selected.shape[1]
    units, tiles = batch * kv_heads, -(-selected.shape[2] * keys.latents.shape[2] // TILE)
    blocks = blocks_for(units * tiles, multiprocessors(q.device))
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
        keys.rotary.config.dim,
        keys.rotary.config.magnitude,
        values.codec.id,
        values.codes,
        values.scale,
        values.rotation.contiguous(),
        values.pages,
        None if log_weight is None else log_weight.contiguous(),
        most,
        math.log2(math.e) / math.sqrt(dim) * keys.rotary.config.magnitude,
        blocks,
        out,
        lse,
        lse.new_empty(units + blocks, CONSUMERS, heads // kv_heads, dim + 4),
    )
    return out, lse


def _latents(keys: KeySource) -> LatentKeys:
    """Returns ``keys`` if they are latents with a RoPE that the kernel supports; raises ValueError otherwise."""
    if not isinstance(keys, LatentKeys):
        raise ValueError(f"attend_selected on Hopper takes latents, not {type(keys).__name__}")
    rope = keys.rotary.config
    for reason in other_rope(rope.dim, rope.head_dim, rope.interleaved):
        raise ValueError(reason)
    return keys


def _coded(values: ValueSource) -> CodedRows:
    """Returns ``values`` if the kernel supports their codec and pages; raises ValueError otherwise."""
    if not isinstance(values, CodedRows) or values.codec.id not in KERNELS:
        kind = values.codec.name if isinstance(values, CodedRows) else type(values).__name__
        raise ValueError(f"attend_selected on Hopper takes values in equal steps and outside a buffer, not {kind}")
    if values.pages_of_scales.data_ptr() != values.pages.data_ptr():
        raise ValueError("scales of values are not in the pages of their codes")
    return values


def blocks_for(tiles: int, processors: int) -> int:
    """Returns the number of thread blocks that share at most ``tiles`` tiles, over all units."""
    return min(max(1, tiles // CONSUMERS), processors)


_frequencies_of: WeakKeyDictionary[RotaryTables, Tensor] = WeakKeyDictionary()
"""Results of ``frequencies``. They are kept as long as their RoPE tables, because captured graphs read them by
address."""


def frequencies(rotary: RotaryTables) -> Tensor:
    """Returns RoPE's frequencies in revolutions per position, in units of 2^-32 and in the kernel's order, int32
    [d / 32, 4, 2, 2].

    The frequency of pair 16 i + 8 j + 2 t + e is at [i, t, j, e]. Pairs of dimensions that do not rotate have 0.
    """
    if rotary not in _frequencies_of:
        revolutions = rotary.config.inverse_frequencies() / (2 * math.pi) * 2**32
        still = revolutions.new_zeros((rotary.config.head_dim - rotary.config.dim) // 2)
        ordered = torch.cat([revolutions, still]).round().to(torch.int32).unflatten(0, (-1, 2, 4, 2)).transpose(1, 2)
        _frequencies_of[rotary] = ordered.contiguous().to(rotary.cos.device)
    return _frequencies_of[rotary]
