"""Formats of stored rows: the codec protocol, and the ids by which kernels identify codecs.

A format is defined once, by its codec (``shadowkv.kvcache.codecs``): references call it, kernels receive its id and
reject unknown ids. ``csrc/codecs.h`` lists the ids that kernels support, with the same values; ids from 1000 on are
for tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.ops.rotations import random_rotation


class CodecId(IntEnum):
    """Formats of rows and, from 16 on, of latents."""

    DENSE = 0
    ROTATED_4BIT = 1
    ROTATED_3BIT = 2
    ROTATED_2BIT = 3
    LLOYD_8BIT = 4
    LLOYD_4BIT = 5
    LLOYD_3BIT = 6
    LLOYD_2BIT = 7
    POLAR_INT4 = 8
    TQ3_0 = 9
    TQ35 = 10
    TQ25 = 11
    FP8 = 12
    VQ_4X256 = 13
    KVARN_4BIT = 14
    KVARN_2BIT = 15
    LATENT_DENSE = 16
    LATENT_INT8 = 17
    LATENT_INT4 = 18
    LATENT_MIXED = 19


UNIFORM = (CodecId.ROTATED_4BIT, CodecId.ROTATED_3BIT, CodecId.ROTATED_2BIT)
"""Ids of ``UniformRows`` codecs."""
LANES = (*UNIFORM, CodecId.LLOYD_8BIT, CodecId.LLOYD_4BIT, CodecId.LLOYD_3BIT, CodecId.LLOYD_2BIT)
"""Ids of codecs whose codes are stored in lanes (``shadowkv.kvcache.codecs.packing``)."""
LATENTS = (CodecId.LATENT_DENSE, CodecId.LATENT_INT8, CodecId.LATENT_INT4)

STRONG = 32
"""Number of rank dimensions, the strongest of a group of kv heads, that ``low-rank-int4`` keeps in 8 bits. The Hopper
kernel defines it in ``csrc/kernels/attend_latents_sm90/shape.cuh``."""


def unknown_codecs(keys: int, values: int = CodecId.DENSE, known: tuple[CodecId, ...] = UNIFORM) -> list[str]:
    """Why a backend that supports dense rows, the ``known`` codecs and latents cannot serve these key and value codecs:
    the codecs that are none of these."""
    rows = (CodecId.DENSE, *known)
    reasons = [] if keys in (*rows, *LATENTS) else [f"codec {keys} of keys is unknown"]
    return reasons if values in rows else [*reasons, f"codec {values} of values is unknown"]


class RowCodec(ABC):
    """Rows of one head, values or keys after RoPE, as bytes and scales.

    Attributes:
        id, name: unique among codecs; the name is that of the policy's axes ``keys`` and ``values``.
        scale_dtype: dtype of the scales.
        row_multiple: the dimensions of a row must be a multiple of this.
        rotated: whether rows are multiplied by ``rotation_matrix`` (Hadamard or random, not RoPE) before they are
            coded. Instead of rotating them back, a kernel may multiply queries by it (keys), or the output by its
            transpose (values).
        axes: what it stores: keys, values or both.
        tile: consecutive tokens that are coded together, axis -2 of rows, codes and scales: 1, or 64, a page, which can
            only be decoded as a whole.
        shared: parts of the state that all kv heads share (``state_shapes``): their axis of heads has length 1.
    """

    id: int
    name: str
    scale_dtype: torch.dtype = torch.float16
    row_multiple: int = 1
    rotated: ClassVar[bool] = False
    axes: ClassVar[tuple[str, ...]] = ("keys", "values")
    tile: ClassVar[int] = 1
    shared: ClassVar[tuple[str, ...]] = ()

    def for_axis(self, axis: str) -> RowCodec:
        """The codec for rows of ``axis``, ``keys`` or ``values``. It may encode differently, depending on how the rows
        are used, but into the same format: it decodes the same way on either axis."""
        return self

    def wanted(self, dim: int) -> str | None:
        """What ``dim`` would have to be for its rows to be coded, in words; None if they can be coded."""
        return f"a multiple of {self.row_multiple}" if dim % self.row_multiple else None

    def fitting_bytes(self, entries: int) -> int:
        """Bytes that ``fit`` needs for rows of ``entries`` entries in total."""
        return 0

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        """The matrix of a ``rotated`` codec, float32 [dim, dim], that ``name`` stands for."""
        return random_rotation(dim, name)

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of a row of ``dim`` dimensions."""

    def scales(self, dim: int) -> int:
        """Number of scales of a row: one, one per block of its dimensions, or none."""
        return 1

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what is learned for each kv head, float32, by name; empty if the format is the same for all
        rows."""
        return {}

    def fit(self, rows: Tensor) -> tuple[Tensor, ...]:
        """State [H, ...], or [1, ...] for ``shared`` parts, in the order of ``state_shapes``, from rows [S, H, d]."""
        return ()

    @abstractmethod
    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        """Codes uint8 [..., row_bytes] and scales [..., scales] of rows [..., d].

        Args:
            rotation: float32 [d, d], ``rotation_matrix``, by which rows are multiplied first; None for none.
            state: each [..., *shape], its leading axes those of the rows or 1.

        Raises:
            ValueError: rows of d dimensions cannot be coded.
        """

    @abstractmethod
    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Rows float32 [..., dim] from what ``encode`` returns; without a rotation they stay rotated."""

    def code_levels(self, dim: int, device: torch.device) -> Tensor | None:
        """What a code of one dimension stands for in rotated rows of ``dim`` dimensions, in units of the scale, float32
        [2 ** bits]; None if that is not the same for all rows."""
        return None

    def whole_levels(self, dim: int) -> tuple[tuple[int, ...], float] | None:
        """``code_levels`` for kernels that compute with integers: multiples [2 ** bits] of a step, either exact or so
        close that they add less than 0.5 % of the distortion; None if there are none."""
        return None

    def check(self, dim: int) -> None:
        """Raises ValueError if rows of ``dim`` dimensions cannot be coded."""
        if wanted := self.wanted(dim):
            raise ValueError(f"{self.name} rows need {wanted} dimensions, not {dim}")


class LevelRows(RowCodec):
    """Rotated rows as levels times a scale; kernels that code or decode them take their constants from here.

    Attributes:
        bits: bits per code.
    """

    rotated = True
    bits: int

    @property
    @abstractmethod
    def scale_rule(self) -> str:
        """How the scale of a row u of norm 1 with levels l is chosen: ``norm``, 1; ``renormalised``, 1 / ||l||;
        ``least_squares``, u l / l l; or ``unbiased``, 1 / u l."""

    @abstractmethod
    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        """As for any codec, float32 [2 ** bits], but never None."""

    @abstractmethod
    def upper_places(self, dim: int) -> tuple[int, ...]:
        """The bit of its lane's bytes in the last plane that each code of a lane occupies, for rows of ``dim``
        dimensions whose codes are stored in lanes."""


class UniformRows(LevelRows):
    """Levels in equal steps; each entry takes the nearest.

    Attributes:
        step: step of the quantiser for a unit Gaussian.
    """

    step: float

    @property
    def scale_rule(self) -> str:
        """The scale with the least squared error."""
        return "least_squares"

    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        """Levels that are 1 apart and symmetric about 0, float32 [2 ** bits]."""
        count = 2**self.bits
        return torch.arange(count, dtype=torch.float32, device=device) - (count - 1) / 2


class LatentCodec(ABC):
    """Latents of keys on a basis (``sources.LatentKeys``), the rank dimensions of a token together.

    Attributes:
        id, name: unique among codecs; the name is that of the policy's axis ``keys``.
        largest: the largest code of any rank dimension, which is symmetric about 0; None for latents that are not
            quantised. Codes are in units of a step per rank dimension, which is folded into the basis.
        rank_multiple: the rank must be a multiple of this.
        bits: average bits per code, if rank dimensions have individual widths, which a state learns; their basis is
            in 8 bits. None if all have the same width.
    """

    id: int
    name: str
    largest: int | None = None
    rank_multiple: int = 1
    bits: int | None = None

    def of_groups(self, ranks: Sequence[int]) -> LatentCodec:
        """The codec for latents of groups of kv heads with these ranks: the strongest rank dimensions of all groups
        first, up to ``STRONG`` of each, then the others."""
        return self

    def largest_codes(self, rank: int, device: torch.device) -> Tensor:
        """The largest code of each rank dimension that can be stored, float32 [rank]; for quantised latents only."""
        assert self.largest is not None, f"{self.name} latents are not quantised"
        return torch.full((rank,), float(self.largest), device=device)

    @abstractmethod
    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Elements per token and their dtype, if the cache's own is ``dtype``."""

    @abstractmethod
    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        """Stored elements [..., w] of float latents [..., r]; whole numbers are clipped at ``largest_codes``.

        Args:
            widths: bits of each rank dimension if there are any, uint8 [..., r], leading axes those of the latents or
                1.
        """

    @abstractmethod
    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        """Latents [..., rank] as numbers that a 16-bit float dtype can hold; ``widths`` as in ``encode``."""
