"""The codec interface, and the ids by which kernels identify codecs.

A codec in ``shadowkv.kvcache.codecs`` defines a format. Reference backends call the codec. Kernels receive its id and
reject ids that they do not support. ``csrc/codecs.h`` repeats the ids that C++ and CUDA kernels support.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.ops.rotations import random_rotation

FIRST_OUTSIDE_ID = 1000
"""Codecs from outside the package have ids from this on."""


class CodecId(IntEnum):
    """Ids of formats: rows have 0 to 15, latents 16 to 31. Further formats of rows take ids from 32 on."""

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
FIXED_WIDTH_LATENTS = (CodecId.LATENT_DENSE, CodecId.LATENT_INT8, CodecId.LATENT_INT4)
"""Ids of latent codecs that need no widths: the bits of a rank dimension follow from the codec and the ranks."""

STRONG = 32
"""Number of rank dimensions that the codec ``low-rank-int4`` stores in 8 bits: the strongest ones of each group of kv
heads. The Hopper kernel has the same number in ``csrc/kernels/attend_latents_sm90/shape.cuh``."""


def unknown_codecs(keys: int, values: int = CodecId.DENSE, known: tuple[CodecId, ...] = UNIFORM) -> list[str]:
    """Reasons why a backend cannot serve these codecs of keys and values. The backend supports dense rows, the row
    codecs in ``known``, and, only as keys, ``FIXED_WIDTH_LATENTS``."""
    rows = (CodecId.DENSE, *known)
    reasons = [] if keys in (*rows, *FIXED_WIDTH_LATENTS) else [f"codec {keys} of keys is unknown"]
    return reasons if values in rows else [*reasons, f"codec {values} of values is unknown"]


class RowCodec(ABC):
    """Encodes rows of one head as codes (bytes) and scales. Rows are values, or keys after RoPE.

    Attributes:
        id: unique among codecs.
        name: unique among codecs, and the codec's name on a policy's axes ``keys`` and ``values``.
        scale_dtype: dtype of the scales.
        row_multiple: the dimensions of a row must be a multiple of this.
        rotated: whether rows are multiplied by ``rotation_matrix`` (Hadamard or random, not RoPE) before they are
            coded. A kernel need not rotate rows back: for keys, it may multiply queries by the matrix, and for values,
            the output by the transpose.
        axes: what the codec can store: ``keys``, ``values`` or both.
        tile: number of consecutive tokens that are coded together, on axis -2 of rows, codes and scales. It is 1, or 64
            for a page that can only be decoded as a whole.
        shared: names of those parts of the state that all kv heads share. Their axis of heads has length 1.
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
        """Returns the codec for rows of ``axis``, ``keys`` or ``values``. The codecs of the two axes may encode
        differently, but they decode in the same way."""
        return self

    def wanted(self, dim: int) -> str | None:
        """Returns what the dimensions must be, such as ``a multiple of 8``, if rows of ``dim`` cannot be coded;
        otherwise None."""
        return f"a multiple of {self.row_multiple}" if dim % self.row_multiple else None

    def fitting_bytes(self, entries: int) -> int:
        """Bytes of memory that ``fit`` needs for rows with ``entries`` numbers in total."""
        return 0

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        """The rotation matrix of a ``rotated`` codec, float32 [dim, dim]. It depends on ``dim`` and ``name`` alone."""
        return random_rotation(dim, name)

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of a row of ``dim`` dimensions."""

    def scales(self, dim: int) -> int:
        """Number of scales of a row: one, one per block of dimensions, or none."""
        return 1

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the state of each kv head, float32, by name. Empty if the codec has no state."""
        return {}

    def fit(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Learns the state from rows [S, H, d] of S tokens. Returns its tensors in the order of ``state_shapes``:
        [H, ...], or [1, ...] for ``shared`` parts."""
        return ()

    @abstractmethod
    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        """Encodes rows [..., d] as codes uint8 [..., row_bytes] and scales [..., scales].

        Args:
            rotation: ``rotation_matrix``, float32 [d, d], by which rows are multiplied first. None if the codec is not
                ``rotated``.
            state: tensors [..., *shape], with shapes from ``state_shapes``. Their leading axes have the sizes of the
                rows' axes, or 1.

        Raises:
            ValueError: rows of d dimensions cannot be coded.
        """

    @abstractmethod
    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Decodes codes and scales to rows float32 [..., dim]. Without ``rotation``, rows of a ``rotated`` codec
        stay rotated."""

    def code_levels(self, dim: int, device: torch.device) -> Tensor | None:
        """Returns the value of each code in units of the scale, float32 [2 ** bits]. A value is one entry of a rotated
        row of ``dim`` dimensions. Returns None if the values differ between rows or entries."""
        return None

    def whole_levels(self, dim: int) -> tuple[tuple[int, ...], float] | None:
        """Returns ``code_levels`` for kernels that compute with integers: an integer for each of the 2 ** bits codes,
        and a step. A level is about its integer times the step. This rounding adds less than 0.5 % to the distortion.
        Returns None if the codec has no such integers."""
        return None

    def check(self, dim: int) -> None:
        """Raises ValueError if rows of ``dim`` dimensions cannot be coded."""
        if wanted := self.wanted(dim):
            raise ValueError(f"{self.name} rows need {wanted} dimensions, not {dim}")


class LevelRows(RowCodec):
    """Encodes each entry of a rotated row as one of 2^bits levels. A decoded row is its levels times a scale. Kernels
    take their constants from here.

    Attributes:
        bits: bits per code.
    """

    rotated = True
    bits: int

    @property
    @abstractmethod
    def scale_rule(self) -> str:
        """The scale of a row u of norm 1 with levels l: 1 (``norm``), 1 / ||l|| (``renormalised``), u·l / l·l
        (``least_squares``), or 1 / u·l (``unbiased``)."""

    @abstractmethod
    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        """As ``RowCodec.code_levels``, float32 [2 ** bits], but never None."""

    @abstractmethod
    def upper_places(self, dim: int) -> tuple[int, ...]:
        """For each of a lane's dim / 8 codes: the position of its highest bit in the lane's bytes of the last plane
        (``Lanes`` in ``shadowkv.kvcache.codecs.packing``). Only for codecs in ``LANES``."""


class UniformRows(LevelRows):
    """Levels in equal steps. Each entry takes the nearest level.

    Attributes:
        step: distance between levels for a Gaussian of variance 1.
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
    """Encodes latents of keys (``sources.LatentKeys``), all rank dimensions of a token together.

    Attributes:
        id: unique among codecs.
        name: unique among codecs, and the codec's name on a policy's axis ``keys``.
        largest: the largest code. Codes are symmetric about 0. A code counts steps of its rank dimension, and the basis
            is multiplied by the steps. None if latents are not quantized.
        rank_multiple: the rank must be a multiple of this.
        bits: average bits per code, if the codec learns a width for each rank dimension. The basis is then in 8 bits.
            None if the widths follow from the codec and the ranks.
    """

    id: int
    name: str
    largest: int | None = None
    rank_multiple: int = 1
    bits: int | None = None

    def of_groups(self, ranks: Sequence[int]) -> LatentCodec:
        """Returns the codec for several groups of kv heads, one rank per group. In a latent, the strongest dimensions
        of every group come first, at most ``STRONG`` of each group. All other dimensions follow."""
        return self

    def largest_codes(self, rank: int, device: torch.device) -> Tensor:
        """Returns the largest code of each rank dimension, float32 [rank]. Only for quantized latents."""
        assert self.largest is not None, f"{self.name} latents are not quantized"
        return torch.full((rank,), float(self.largest), device=device)

    @abstractmethod
    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the number of stored elements per token, and their dtype, for a cache in ``dtype``."""

    @abstractmethod
    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        """Encodes float latents [..., r] as stored elements [..., w], where r is the rank and w is from ``field``. A
        codec that stores integers rounds the latents and clips them at ``largest_codes``.

        Args:
            widths: bits of each rank dimension, uint8 [..., r], if the codec learns them. The leading axes have the
                sizes of the latents' axes, or 1.
        """

    @abstractmethod
    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        """Decodes stored elements [..., w] to latents [..., rank]. 16-bit floats represent the numbers of a latent
        exactly. ``widths`` are those of ``encode``."""
