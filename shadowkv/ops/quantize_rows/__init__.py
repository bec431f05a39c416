"""Encodes rows by their codec and writes codes and scales to pages."""

from shadowkv.ops.codec import LANES, CodecId

MAX_DIMS = 128
"""Maximum number of dimensions of rows that the Triton kernel rotates. A larger rotation does not fit in shared
memory."""

ROTATED_IN_KERNELS = (*LANES, CodecId.VQ_4X256)
"""Codecs whose rows the Triton kernel rotates and encodes."""


def in_one_pass(codec: int, dim: int) -> bool:
    """Whether a kernel encodes rows of ``dim`` dimensions without intermediate copies."""
    return codec == CodecId.FP8 or (codec in ROTATED_IN_KERNELS and dim <= MAX_DIMS)
