"""Keys and values of compressed tokens in their stored forms: the arguments of the ops that attend to them.

There are B rows, one per sequence, each with P compressed pages; H kv heads; and C chunks of c tokens in a page of 64.
The first axis N of every page array counts granules and is indexed by page ids. A page id is the number of the page's
first granule (``shadowkv.kvcache.memory.arenas``). Token p of a row is in page ``pages[row, p // 64]``, at p % 64 =
chunk * c + offset. d is the head dim, r the rank of latents, w the stored elements of a token, and s the scales of a
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.codec import LatentCodec, RowCodec
from shadowkv.ops.sequence_rows import SequenceRows


@dataclass(frozen=True)
class DenseRows:
    """Exact rows: keys after RoPE, or values.

    Attributes:
        rows: [N, H, C, c, d], any float dtype. Rows in pinned host memory are given as a tensor of the device that
            reads them.
        pages: int64 [B, P].
    """

    rows: Tensor
    pages: Tensor


@dataclass(frozen=True)
class LatentKeys:
    """Low-rank keys (ShadowKV, arXiv:2410.21465): key = RoPE(latents x basis + mean).

    Attributes:
        latents: [N, C, c, w], stored by ``codec``. The quantization step of each rank dimension is part of the basis.
        codec: codec of the latents.
        basis: [states, r, H, d], contiguous but for the first axis. It is int8 if there is a ``basis_step``.
        mean: [states, H, d], contiguous but for the first axis, or None for zero.
        states: int64 [B], the state of each row, an index into ``basis`` and ``mean``.
        pages: int64 [B, P].
        first: int64 [B], position of the row's first token, a multiple of 64. Offset o of chunk n is at position
            ``first + n * c + o``.
        rotary: RoPE; its tables are on the queries' device.
        widths: uint8 [states, r], bits of each rank dimension. None if the codec does not learn them.
        basis_step: float32 [states, r], the step by which the integers in a row of an int8 basis are multiplied. None
            if the basis is floating-point.
    """

    latents: Tensor
    codec: LatentCodec
    basis: Tensor
    mean: Tensor | None
    states: Tensor
    pages: Tensor
    first: Tensor
    rotary: RotaryTables
    widths: Tensor | None = None
    basis_step: Tensor | None = None

    def decoded(self) -> LatentKeys:
        """Returns the same keys with a floating-point basis. If the basis is int8, each row of the batch gets its own
        state: a basis [B, r, H, d] in the mean's dtype, with mean and widths. Otherwise nothing changes."""
        if self.basis_step is None:
            return self
        basis = self.basis[self.states] * self.basis_step[self.states][..., None, None]
        mean = None if self.mean is None else self.mean[self.states]
        return replace(
            self,
            basis=basis if mean is None else basis.to(mean.dtype),
            mean=mean,
            states=torch.arange(len(self.states), device=self.states.device),
            widths=None if self.widths is None else self.widths[self.states],
            basis_step=None,
        )


@dataclass(frozen=True)
class CodedRows:
    """Keys after RoPE, or values, in the bytes of a codec.

    Attributes:
        codes: uint8 [N, H, C, c, w].
        scale: [N', H, 64, s] in the codec's dtype. It is not read if s is 0.
        codec: codec of the rows.
        dim: d, the head dim.
        rotation: float32 [d, d], the orthogonal matrix by which rows were multiplied before they were coded. None if
            the codec is not ``rotated``.
        pages: int64 [B, P], page ids of ``codes``.
        scale_pages: int64 [B, P], page ids of ``scale``. None if they are the same as ``pages``.
        state: the parts of the codec's fitted state, float32 [states, H, ...] each. Empty if the codec has no state.
        states: int64 [B], the state of each row, an index into the parts of ``state``. None if there is no state.
    """

    codes: Tensor
    scale: Tensor
    codec: RowCodec
    dim: int
    rotation: Tensor | None
    pages: Tensor
    scale_pages: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    states: Tensor | None = None

    @property
    def pages_of_scales(self) -> Tensor:
        """int64 [B, P], page ids of ``scale``."""
        return self.pages if self.scale_pages is None else self.scale_pages


@dataclass(frozen=True)
class CentredKeys(CodedRows):
    """Coded keys that are stored without their mean: key = RoPE(mean) + decoded row. ``states`` is never None, because
    it also indexes ``mean``.

    Attributes:
        mean: float32 [states, H, d], before RoPE.
        first: int64 [B], position of the row's first token, a multiple of 64.
        rotary: RoPE; its tables are on the queries' device.
    """

    mean: Tensor = field(kw_only=True)
    first: Tensor = field(kw_only=True)
    rotary: RotaryTables = field(kw_only=True)


@dataclass(frozen=True)
class BufferedRows:
    """Values whose selected chunks ``fetch_chunks`` has copied into a buffer.

    Attributes:
        source: the values from which chunks were copied. Attention reads only their scales from ``source``.
        rows: [slots, H, M, c, w], copies of chunks of the values' rows or codes. A slot has M entries per head.
        slots: int64 [B], the slot of each sequence.
        entries: int64 [B, H, k], the entry that holds each selected chunk, -1 where no chunk is selected.
    """

    source: DenseRows | CodedRows
    rows: Tensor
    slots: Tensor
    entries: Tensor


KeySource = DenseRows | LatentKeys | CodedRows
ValueSource = DenseRows | CodedRows | BufferedRows


def of_rows(source: DenseRows | CodedRows, rows: Tensor) -> DenseRows | CodedRows:
    """Returns the source of some rows, int64 [n]."""
    names = ("pages", "scale_pages", "states", "first")
    of_each = {name: getattr(source, name, None) for name in names}
    return replace(source, **{name: x[rows] for name, x in of_each.items() if x is not None})


def attend_once(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    keys: DenseRows | CodedRows,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows,
) -> tuple[Tensor, Tensor]:
    """Calls ``attend``, which is ``attend_coded`` without ``sequences``, with one row for each sequence. The queries of
    the sequence's other rows are further query heads. The other arguments, q [B, H_q, d] among them, and the results
    are those of ``attend_coded``."""
    heads, first = (keys.rows if isinstance(keys, DenseRows) else keys.codes).shape[1], sequences.first
    results = attend(sequences.fold(q, heads), of_rows(keys, first), of_rows(values, first), begin[first], end[first])
    out, lse = (sequences.unfold(x, heads, len(q)) for x in results)
    return out, lse


def heads_and_chunk(source: KeySource) -> tuple[int, int]:
    """Returns the number H of kv heads, and the tokens c per chunk. Rows and codes are stored as [N, H, C, c, w],
    latents as [N, C, c, w]."""
    match source:
        case DenseRows():
            return source.rows.shape[1], source.rows.shape[3]
        case CodedRows():
            return source.codes.shape[1], source.codes.shape[3]
        case LatentKeys():
            return source.basis.shape[2], source.latents.shape[2]
