"""Prefill strategies. With ``dense``, queries attend to everything. With ``sparse``, each tile of a long prompt's
queries attends to a sample of the blocks of keys.

Sparse prefill needs no calibration. The error of a tile is measured with a few of its queries. The tile attends to as
many blocks as are needed to keep this error within ``prefill_error``, whatever the prompt's length. So heads and layers
with spread-out attention get more blocks than others. docs/design/prefill.md lists all conditions of a sparse prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.parts.base import PrefillStrategy
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PREFILL_ERROR, PREFILL_ERROR_HELP, KVSpec
from shadowkv.ops.registry import Ops
from shadowkv.ops.select_blocks.reference import BLOCK
from shadowkv.settings import Check, setting

SPARSE_FROM, MIN_QUERIES = 8192, 1024
"""Sparse attention is faster if there are more keys than the first number, and at least as many new tokens of a
sequence as the second. Otherwise attention is exact."""

DENSE_LAST = 256
"""Number of a prompt's newest tokens that attend to everything. The other tokens of their tiles also attend to
everything. A prompt often ends with a question, whose tokens may each need different blocks, so one selection for a
tile is too coarse."""


class DensePrefill(PrefillStrategy):
    def pays(self, new: int, keys: int) -> bool:
        return False

    def attend(
        self, ops: Ops, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int, sinks: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError("a dense prefill attends exactly")


class SparsePrefill(PrefillStrategy):
    ops = ("attend_blocks", "select_blocks")
    selects_blocks = True

    @dataclass(frozen=True)
    class Settings:
        """With a ``prefill_error`` of 0, tiles attend to everything."""

        prefill_error: float = setting(
            PREFILL_ERROR,
            "prefill",
            PREFILL_ERROR_HELP,
            check=Check(lambda error: 0 <= error < 1, "must be at least 0 and below 1"),
        )

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._kept = torch.zeros((), dtype=torch.int64, device=device)
        self._causal = 0

    @classmethod
    def described(cls, spec: KVSpec, shape: ModelShape) -> str:
        return f"with an error of at most {cls.settings_of(spec).prefill_error:.4g}"

    def pays(self, new: int, keys: int) -> bool:
        return new >= MIN_QUERIES and keys > SPARSE_FROM

    def attend(
        self, ops: Ops, layer: int, q: Tensor, k: Tensor, v: Tensor, to_come: int, sinks: Tensor | None = None
    ) -> Tensor:
        # Blocks are selected as if there were no sinks. With sinks, the error is smaller than ``prefill_error``.
        blocks = ops.select_blocks(q, k, self.settings.prefill_error, max(0, DENSE_LAST - to_come), layer)
        if self.hook is not None:
            blocks = self.hook(layer, q, k, blocks)
        indices, counts, weights = blocks
        self._kept += counts.sum()
        first, last = len(k) - len(q), len(k) - 1
        ends = (min(start + BLOCK - 1, last) // BLOCK + 1 for start in range(first, last + 1, BLOCK))
        self._causal += q.shape[1] * sum(ends)
        out, lse = ops.attend_blocks(q, k, v, indices, counts, weights)
        return out if sinks is None else ops.add_sinks(out, lse, sinks)[0]

    def take_density(self) -> float | None:
        kept, causal = int(self._kept), self._causal
        self._kept.zero_()
        self._causal = 0
        return kept / causal if causal else None
