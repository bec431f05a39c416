"""Attention over all tokens on Hopper, in the formats of the policy Shard (``baselines/shard.py``). Keys are latents of
mixed widths, values are vector codes. The kernel is in ``csrc/kernels/attend_mixed_sm90/``."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.cuda_sm90 import frequencies
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource, LatentKeys
from shadowkv.ops.attention_results import attend_to_nothing, result_and_parts
from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.codec import CodecId
from shadowkv.ops.extension import cuda_missing, multiprocessors
from shadowkv.ops.sequence_rows import SequenceRows

DIM = 128
RANKS = (96, 128, 160, 192)
MAX_GROUP = 8
"""Maximum number of query heads per kv head that the kernel supports."""

CONSUMERS = {True: 3, False: 2}
"""Number of consumer warpgroups per thread block. The key says whether a kv head has at most four query heads. Each
consumer warpgroup attends to one page at a time."""

FILLING = 4
"""Time that a thread block takes to load its basis and codebook. The unit is the time that a consumer warpgroup takes
to attend to one page."""

missing = partial(cuda_missing, "attend_mixed_sm90", "attend_mixed_sm90")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    codecs = (
        ("keys", case.key_codec, CodecId.LATENT_MIXED, "low-rank-mixed"),
        ("values", case.value_codec, CodecId.VQ_4X256, "vq-4x256"),
    )
    reasons = [f"codec {codec} of {axis} is not {name}" for axis, codec, known, name in codecs if codec != known]
    reasons += unless(case.capability == (9, 0), f"compute capability {case.capability} is not that of Hopper, 9.0")
    reasons += unless_one_of(case.dtype, (torch.bfloat16,))
    reasons += unless_one_of(case.head_dim, (DIM,), "head dim")
    reasons += unless_one_of(case.rank, RANKS, "rank")
    reasons += unless(case.num_kv_heads % 2 == 0, f"{case.num_kv_heads} kv heads are an odd number")
    reasons += unless(case.group <= MAX_GROUP, f"{case.group} query heads per kv head are more than {MAX_GROUP}")
    reasons += unless(not case.host_values, "values are on the host, and the kernel reads whole pages")
    halves = case.rope_dim == case.head_dim and not case.interleaved
    return reasons + unless(halves, "RoPE does not rotate all dimensions in halves")


def attend_coded(
    q: Tensor,
    keys: KeySource,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, but the operands of matrix products are float16. Can be captured in a CUDA graph after a
    first call with the same ``keys.rotary``.

    These operands are keys, queries, softmax weights, and entries of the codebook. RoPE rotates a key to its offset in
    its page, and for each page the queries to their distance from the page's first token. Basis entries under 6e-5 lose
    bits, keys over 65504 overflow. Values are rotated back by the codec's own Hadamard matrix. ``values.rotation`` is
    not read.

    Each row reads its pages, also if ``sequences`` has several. Pages, states and positions are read on the device and
    are not checked. A page's latents must be contiguous on the device, and so must a page's codes of all heads. Every
    16 consecutive latents must share one width.

    Raises:
        ValueError: keys or values in other formats.
        RuntimeError: shapes, dtypes or strides that do not fit.
    """
    if not isinstance(keys, LatentKeys) or keys.basis_step is None or keys.widths is None or keys.mean is None:
        raise ValueError(f"attend_coded needs mixed latents with a basis in 8 bits, not {type(keys).__name__}")
    if not isinstance(values, CodedRows) or values.codec.id != CodecId.VQ_4X256 or values.states is None:
        kind = values.codec.name if isinstance(values, CodedRows) else "dense"
        raise ValueError(f"attend_coded with mixed latents takes values in vq-4x256, not {kind}")
    batch, query_heads, dim = q.shape
    heads, entries = keys.basis.shape[2], keys.pages.shape[1]
    if not batch or not entries:
        return attend_to_nothing(q)
    split = splits(batch * heads // 2, entries, CONSUMERS[query_heads <= 4 * heads], multiprocessors(q.device))
    largest, codebook = values.state
    out, lse, *parts = result_and_parts(q, split)
    torch.ops.shadowkv_cuda.attend_mixed_sm90(
        q.contiguous(), begin.contiguous(), end.contiguous(), keys.latents.flatten(1, 2), keys.basis, keys.basis_step,
        keys.widths, keys.mean, keys.states, keys.first, keys.pages, frequencies(keys.rotary),
        values.codes.flatten(2, 3), largest, codebook, values.states, values.pages,
        math.log2(math.e) / math.sqrt(dim) * keys.rotary.config.magnitude,
        out, lse, *parts,
    )  # fmt: skip
    return out, lse


@lru_cache(maxsize=1024)
def splits(units: int, entries: int, consumers: int, processors: int) -> int:
    """Returns the number of thread blocks that share the pages of a unit. A unit is a pair of kv heads of one sequence.

    It is the number with the least estimated time. A multiprocessor runs one block at a time. Each block first
    fills its shared memory, which takes the time ``FILLING``.
    """
    most = max(1, entries // (2 * consumers))

    def time(share: int) -> int:
        waves = -(-units * share // processors)
        return waves * (-(-entries // (share * consumers)) + FILLING)

    return min(range(1, min(most, 2 * processors) + 1), key=time)
