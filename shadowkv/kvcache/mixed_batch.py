"""A mixed pass, as the cache sees it: one more token of some sequences, and prompts of others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.prefill.batch import PrefillBlock


@dataclass
class ExactPrompt:
    """The tokens of a new sequence that all stay exact, in T rows, more than it has tokens where a graph is padded.

    Everything about it is on the device (``KVCache.exact_prompt``), so that a pass can be captured once for many
    prompts: shapes are those of T alone.

    Attributes:
        positions: int64 [T].
        write_page, write_offset: int64 [T], names of exact pages, and rows there; those of padding are nobody's.
        keys, values: [T, H, d] before RoPE, of the layer at work.
        further: the same tokens in further groups of layers, where this is the first.
    """

    positions: Tensor
    write_page: Tensor
    write_offset: Tensor
    further: tuple[ExactPrompt, ...] = ()
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class MixedBatch:
    """B tokens of a decode step, followed by the T tokens of a prefill that is one block, or of a prompt that stays
    exact.

    The two are of different sequences and attend apart; they are one batch for everything else in a layer.
    """

    step: DecodeBatch
    prompts: PrefillBlock | ExactPrompt

    @property
    def num_steps(self) -> int:
        """B."""
        return len(self.step.positions)
