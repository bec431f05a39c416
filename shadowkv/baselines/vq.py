"""Values as entries of a codebook, 4 dimensions per byte: vector quantization as in Shard.

Rows are transformed by a Hadamard matrix, and each dimension is divided by its largest entry. Then all groups of 4
dimensions have similar distributions. So one codebook of 256 entries serves all heads of a layer. The codebook is
learned from the prompt by k-means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import codecs
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.rotations import walsh_hadamard

GROUP = 4
ENTRIES = 256
ITERATIONS = 30

FITTED = 131072
"""Maximum number of groups that a codebook is fitted on; they are drawn from all tokens. With 8 heads of 128
dimensions, 512 tokens have this number of groups. Fitting on this number takes a few seconds on a CPU core."""

AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
"""Number of products of a group and a codebook entry that are computed at a time, by device type. On a CPU the products
take 2 MiB, which fits into a core's cache. On a GPU they take 64 MiB: enough work for a kernel launch, and within the
memory reserved at start."""

UNIT = 2.0**30
"""Scale of fixed-point sums. Sums of integers do not depend on the order of the terms, so k-means is reproducible on a
GPU too."""


class VectorRows(RowCodec):
    """Codes each 4 dimensions of a value in a byte. Rows have no scale of their own: dimensions are divided by the
    largest entries of the prompt, so larger entries of later rows are clipped. Entry 0 of the codebook is the origin,
    so rows of zeros stay zero.

    The codec is not for keys, because products with queries would be biased (``codecs/lloyd.py``).
    """

    id, name = CodecId.VQ_4X256, "vq-4x256"
    axes = ("values",)
    rotated = True
    shared = ("vq_codebook",)

    def wanted(self, dim: int) -> str | None:
        return "a power of two from 4 on" if dim < GROUP or dim & (dim - 1) else None

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        return _rotated(torch.eye(dim))

    def row_bytes(self, dim: int) -> int:
        return dim // GROUP

    def scales(self, dim: int) -> int:
        return 0

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """The largest entry of each dimension, and the codebook, which all heads share."""
        return {"vq_largest": (dim,), "vq_codebook": (ENTRIES, GROUP)}

    def fitting_bytes(self, entries: int) -> int:
        """Rows in float32, two rotated copies, a copy divided by the largest entries, and products with the codebook's
        entries."""
        return 4 * (4 * entries + AT_ONCE["cuda"])

    def fit(self, rows: Tensor) -> tuple[Tensor, ...]:
        self.check(rows.shape[-1])
        y = _rotated(rows.float())
        largest = y.abs().amax(0)
        largest = largest.masked_fill(largest == 0, 1)
        groups = (y / largest).reshape(-1, GROUP)
        if len(groups) > FITTED:
            drawn = torch.randint(len(groups), (FITTED,), generator=torch.Generator().manual_seed(0))
            groups = groups[drawn.to(groups.device)]
        return largest, k_means(groups)[None]

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        self.check(rows.shape[-1])
        largest, codebook = state
        y = rows.float() if rotation is None else rows.float() @ rotation
        groups = (y / largest).unflatten(-1, (-1, GROUP))
        # Axes along which rows share a codebook are moved to the end, so that each codebook needs only one matrix
        # product.
        axes = sorted(range(codebook.dim() - 2), key=lambda axis: codebook.shape[axis] == 1)
        moved = groups.permute(*axes, -2, -1)
        books = codebook.flatten(0, -3) if axes else codebook[None]
        codes = nearest(moved.reshape(len(books), -1, GROUP), books).view(moved.shape[:-1])
        codes = codes.permute(*(axes.index(axis) for axis in range(len(axes))), -1)
        return codes, torch.empty(*rows.shape[:-1], 0, dtype=self.scale_dtype, device=rows.device)

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        largest, codebook = state
        entries = codes.long().unsqueeze(-1).expand(*codes.shape, GROUP)
        y = codebook.expand(*codes.shape[:-1], -1, -1).gather(-2, entries).flatten(-2) * largest
        return y if rotation is None else y @ rotation.T


def k_means(points: Tensor) -> Tensor:
    """Learns a codebook float32 [256, 4] from points float32 [n, 4] with entries in [-1, 1].

    It runs 30 iterations of Lloyd's algorithm, starting from points drawn with a fixed seed. Entry 0 stays the origin.
    Entries without points do not change.
    """
    drawn = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[: ENTRIES - 1]
    codebook = points.new_zeros(ENTRIES, GROUP)
    codebook[1 : len(drawn) + 1] = points[drawn.to(points.device)]
    counted = (torch.nn.functional.pad(points.double(), (0, 1), value=1.0) * UNIT).round().long()
    for _ in range(ITERATIONS):
        codes = nearest(points[None], codebook[None])[0].int()
        sums = counted.new_zeros(ENTRIES, GROUP + 1).index_add_(0, codes, counted).double()
        found = sums[:, GROUP:] > 0
        found[0] = False
        codebook = torch.where(found, (sums[:, :GROUP] / sums[:, GROUP:]).float(), codebook)
    return codebook


def nearest(points: Tensor, codebooks: Tensor) -> Tensor:
    """Returns, for points [b, n, 4], the indices uint8 [b, n] of the nearest entries in codebooks [b, 256, 4]. Ties go
    to the first entry."""
    half = codebooks.square().sum(-1).unsqueeze(-2) / 2
    pieces = points.split(max(1, AT_ONCE[points.device.type] // (ENTRIES * len(codebooks))), dim=1)
    found = [torch.baddbmm(half, piece, codebooks.mT, beta=-1).argmax(-1).to(torch.uint8) for piece in pieces]
    return torch.cat(found, dim=1)


def _rotated(rows: Tensor) -> Tensor:
    """Rows [..., d] times the normalised Hadamard matrix, which is symmetric."""
    return walsh_hadamard(rows) / rows.shape[-1] ** 0.5


def register() -> None:
    """Registers the codec."""
    codecs.register(VectorRows())
