"""Rows as codes of 4, 3 or 2 bits, into pages."""

from shadowkv.ops.codec import LANES, CodecId

MAX_DIMS = 128
"""Of rows that a kernel multiplies by their codec's rotation: wider ones do not fit into shared memory beside them."""

ROTATED_IN_KERNELS = (*LANES, CodecId.VQ_4X256)
"""Codecs whose rows the Triton kernel rotates and encodes."""


def in_one_pass(codec: int, dim: int) -> bool:
    """Whether a kernel encodes rows of ``dim`` dimensions as it reads them, without copies."""
    return codec == CodecId.FP8 or (codec in ROTATED_IN_KERNELS and dim <= MAX_DIMS)
