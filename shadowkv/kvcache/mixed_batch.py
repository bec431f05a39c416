"""A mixed pass, as the cache sees it: one more token of some sequences, and prompts of others."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.prefill.batch import ExactPrompt, PrefillBlock


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
