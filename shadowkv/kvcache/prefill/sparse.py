"""Sparse prefill: tiles of a long prompt's queries attend to sampled blocks of keys.

Nothing is calibrated, and the error is bounded: a tile attends to as many blocks as represent what a few of its queries
attend to with a given standard deviation (``KVSpec.prefill_error``), at any length of the prompt, so that heads and
layers whose attention is spread out have more than others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.registry import Ops
from shadowkv.ops.select_blocks.reference import BLOCK, Blocks

SPARSE_FROM, MIN_QUERIES = 8192, 1024
"""Keys, and new tokens of a sequence, from which on sparse attention pays. Below, attention is exact."""

DENSE_LAST = 256
"""Newest tokens of a prompt that attend to everything, with the others of their tiles: in a question, each token may
look for something different."""

BlockHook = Callable[[int, Tensor, Tensor, Blocks], Blocks]


class SparsePrefill:
    """Attention of new tokens over blocks of the tokens before them.

    Args:
        error: largest standard deviation of what a sampled query attends to, as a share of its softmax.

    Attributes:
        hook: called with layer, RoPE-rotated queries [n, H_q, d] and keys [m, H, d], and blocks; what it returns is
            attended to. None leaves them as they are.
    """

    def __init__(self, ops: Ops, device: torch.device, error: float) -> None:
        self.ops, self.error = ops, error
        self.hook: BlockHook | None = None
        self._kept = torch.zeros((), dtype=torch.int64, device=device)
        self._causal = 0

    @staticmethod
    def pays(new: int, keys: int) -> bool:
        """Whether queries that see that many ``keys``, of a sequence that gains ``new`` tokens, attend sparsely."""
        return new >= MIN_QUERIES and keys > SPARSE_FROM

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int, sinks: Tensor | None = None) -> Tensor:
        """Attention [n, H_q, d] of the last n of m positions over k, v [m, H, d], q and k after RoPE, before
        ``to_come`` more tokens of the prompt. ``sinks``, float32 [H_q], are scores of one more position, whose value is
        0: blocks are chosen as without it, with which their error is less."""
        blocks = self.ops.select_blocks(q, k, self.error, max(0, DENSE_LAST - to_come), layer)
        if self.hook is not None:
            blocks = self.hook(layer, q, k, blocks)
        indices, counts, weights = blocks
        self._kept += counts.sum()
        first, last = len(k) - len(q), len(k) - 1
        ends = (min(start + BLOCK - 1, last) // BLOCK + 1 for start in range(first, last + 1, BLOCK))
        self._causal += q.shape[1] * sum(ends)
        out, lse = self.ops.attend_blocks(q, k, v, indices, counts, weights)
        return out if sinks is None else self.ops.add_sinks(out, lse, sinks)[0]

    def take_density(self) -> float | None:
        """Share of the blocks up to each tile that were attended to since the last call; None where no attention was
        sparse. Waits for the device."""
        kept, causal = int(self._kept), self._causal
        self._kept.zero_()
        self._causal = 0
        return kept / causal if causal else None
