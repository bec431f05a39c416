"""``Case``: what is known of the ops' arguments when an engine is loaded. ``registry`` uses it to choose backends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch


def unless(good: bool, reason: str) -> list[str]:
    """Returns ``[]`` if ``good``, otherwise ``[reason]``."""
    return [] if good else [reason]


def unless_one_of(value: object, known: Collection[object], what: str = "") -> list[str]:
    """Returns ``[]`` if ``value`` is one of ``known``, otherwise a reason such as ``head dim 96 is not 64 or 128``.

    Args:
        what: words before the value.
    """
    *others, last = [str(one).removeprefix("torch.") for one in known]
    listed = f"{', '.join(others)} or {last}" if others else last
    return unless(value in known, f"{what} {value} is not {listed}".lstrip())


NOT_CENTRED = "coded keys are stored without their mean"
"""Why a backend without support for ``CentredKeys`` cannot serve them."""


@dataclass(frozen=True)
class Case:
    """Properties of the model, the policy and the longest context. A backend's ``supports`` reads them.

    Attributes:
        ops: ops, and forms of ops, that the model and the policy call (``registry.CALLS``). ``supports`` is called only
            for backends of these.
        dtype: of queries, and of exact keys and values.
        head_dim, num_query_heads, num_kv_heads: sizes of the model's attention.
        rope_dim: leading dimensions of a head that RoPE rotates.
        interleaved: whether RoPE rotates neighbouring dimensions together, instead of dimensions ``rope_dim / 2``
            apart.
        chunk: tokens of a chunk, a divisor of 64.
        rank: dimensions of a latent, 0 if keys are not latents.
        latent_width: stored elements of a token's latent.
        key_codec, value_codec: ids of the formats of compressed keys and values, 0 for dense rows.
        centred: whether coded keys are stored without their mean (``sources.CentredKeys``).
        mass: whether selection stops once the selected chunks have a given share of the softmax.
        max_pages: compressed pages of the longest context.
        max_selected: chunks per kv head that a step may select from the longest context.
        fetched_bytes: bytes of one chunk of one kv head in the fetch buffer, 0 without a buffer.
        host_values: whether values are in host memory, with or without a fetch buffer.
        capability: compute capability of the GPU, None on a CPU.
        block_memory: bytes of shared memory available to one thread block.
    """

    ops: frozenset[str]
    dtype: torch.dtype
    head_dim: int
    num_query_heads: int
    num_kv_heads: int
    rope_dim: int
    interleaved: bool = False
    chunk: int = 8
    rank: int = 0
    latent_width: int = 0
    key_codec: int = 0
    value_codec: int = 0
    centred: bool = False
    mass: bool = False
    max_pages: int = 0
    max_selected: int = 0
    fetched_bytes: int = 0
    host_values: bool = False
    capability: tuple[int, int] | None = None
    block_memory: int = 0

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.num_query_heads // self.num_kv_heads
