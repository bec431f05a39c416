"""Where the keys and values of sealed tokens are, as the op reads them.

B rows (sequences), H kv heads, C chunks of c tokens in a page of 64. The first axis of every page array counts
granules and is indexed by page names (``shadowkv.kvcache.memory``). The token at position p of a row is at row p % 64
= chunk * c + offset of the page that the row's table names at p // 64.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shadowkv.ops.rotate.tables import RotaryTables


@dataclass(frozen=True)
class DenseRows:
    """Exact rows: keys that are rotated already, or values.

    Attributes:
        rows: [N, H, C, c, d], any float dtype; pinned host memory is a tensor of the device that reads it.
        pages: int64 [B, P].
    """

    rows: Tensor
    pages: Tensor


@dataclass(frozen=True)
class LatentKeys:
    """Low-rank keys (ShadowKV, arXiv:2410.21465): key = RoPE(latents x basis + mean).

    Attributes:
        latents: [N, C, c, r], float or int8. The quantisation step of each rank dimension is part of the basis.
        basis: [slots, r, H, d].
        mean: [slots, H, d], or None for zero.
        slots: int64 [B], the row of ``basis`` and ``mean`` that a sequence owns.
        pages: int64 [B, P].
        rotary: the rotation; its tables are on the queries' device.
    """

    latents: Tensor
    basis: Tensor
    mean: Tensor | None
    slots: Tensor
    pages: Tensor
    rotary: RotaryTables


@dataclass(frozen=True)
class QuantisedRows:
    """Values as codes of rotated rows (TurboQuant, arXiv:2504.19874), in the layout of ``packing``.

    Attributes:
        codes: uint8 [N, H, C, c, d * bits / 8].
        scale: float16 [N, H, 64], one step per row.
        bits: 4, 3 or 2.
        rotation: float32 [d, d], orthogonal; rows were multiplied by it before they were coded.
        pages: int64 [B, P], those of ``codes``.
        scale_pages: int64 [B, P], those of ``scale``; None where they are the same.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    rotation: Tensor
    pages: Tensor
    scale_pages: Tensor | None = None


@dataclass(frozen=True)
class BufferedRows:
    """Values whose selected chunks ``fetch_chunks`` has copied into a buffer.

    Attributes:
        source: the values themselves; only their scales are read there.
        rows: [slots, H, M, c, w], copies of chunks of its rows or codes.
        slots: int64 [B], the row of ``rows`` that a sequence owns.
        entries: int64 [B, H, k], where in ``rows`` the selected chunks are, -1 for none.
    """

    source: DenseRows | QuantisedRows
    rows: Tensor
    slots: Tensor
    entries: Tensor


KeySource = DenseRows | LatentKeys
ValueSource = DenseRows | QuantisedRows | BufferedRows
