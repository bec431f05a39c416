"""Sparse prefill: tiles of a long prompt's queries attend to blocks of keys that a few of them choose.

Nothing is calibrated: a tile keeps blocks that hold a share of its own sampled queries' attention, so that heads and
layers whose attention is spread out keep more than others. Tiles that would keep nearly everything are capped where
attention to their blocks takes as long as to all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.registry import Ops
from shadowkv.ops.select_blocks.reference import BLOCK

SHARE = 0.01
"""Share that a block must have of a sampled query's softmax over all blocks that are not attended to anyway. With 0.02
Qwen2.5-Coder-1.5B lost two to four points of RULER at 32K, mostly needles among many keys."""

MOST = 0.75
"""Largest share of the blocks that a tile may attend to that it does attend to: choosing them and attending to them
then takes about as long as attending to all."""

SPARSE_FROM, FEWEST_QUERIES = 8192, 1024
"""Keys, and new tokens of a sequence, from which on sparse attention pays. Below, attention is exact."""

DENSE_LAST = 256
"""Newest tokens of a prompt that attend to everything, with the others of their tiles: in a question, each token may
look for something different."""

BlockHook = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class SparsePrefill:
    """Attention of new tokens over blocks of the tokens before them.

    Attributes:
        hook: called with layer, RoPE-rotated queries [n, H_q, d], and indices and counts as ``select_blocks`` returns
            them; what it returns is attended to. None leaves them as they are.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self.ops = ops
        self.hook: BlockHook | None = None
        self._kept = torch.zeros((), dtype=torch.int64, device=device)
        self._causal = 0

    @staticmethod
    def pays(new: int, keys: int) -> bool:
        """Whether queries that see that many ``keys``, of a sequence that gains ``new`` tokens, attend sparsely."""
        return new >= FEWEST_QUERIES and keys > SPARSE_FROM

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int) -> Tensor:
        """Attention [n, H_q, d] of the last n of m positions over k, v [m, H, d], q and k after RoPE, before
        ``to_come`` more tokens of the prompt."""
        indices, counts = self.ops.select_blocks(q, k, SHARE, MOST, max(0, DENSE_LAST - to_come))
        if self.hook is not None:
            indices, counts = self.hook(layer, q, indices, counts)
        self._kept += counts.sum()
        first, last = len(k) - len(q), len(k) - 1
        ends = (min(start + BLOCK - 1, last) // BLOCK + 1 for start in range(first, last + 1, BLOCK))
        self._causal += q.shape[1] * sum(ends)
        out: Tensor = self.ops.attend_blocks(q, k, v, indices, counts)
        return out

    def take_density(self) -> float | None:
        """Share of the blocks up to each tile that were attended to since the last call; None where no attention was
        sparse. Waits for the device."""
        kept, causal = int(self._kept), self._causal
        self._kept.zero_()
        self._causal = 0
        return kept / causal if causal else None
