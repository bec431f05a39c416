"""``SparseDrafts``: the model drafts its own next tokens, in steps that attend to few tokens (sparse self-speculation:
MagicDec, arXiv:2408.11049). ``DecodeSteps`` uses it.

A draft step is a decode step in which the policy's index selects the tokens to attend to (``KVSpec.drafts``). Keys and
values of a draft step are written where those of the next tokens belong. They are removed when all tokens are drafted,
and the step that verifies the draft, with attention to every token, writes them again. So draft steps need no memory of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.request import Request
from shadowkv.engine.scheduling.model_drafts import ModelDrafts
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence

DRAFT_SHARE = 0.5
"""Assumed time of a draft step, as a share of the time of a step without drafts."""


class SparseDrafts(ModelDrafts):
    """Drafts in steps of the whole model. ``runner`` runs the model."""

    def __init__(self, config: SpeculativeConfig, max_rows: int, runner: Runner) -> None:
        super().__init__(config, max_rows, runner, DRAFT_SHARE)

    def _can_draft(self, requests: Sequence[Request], sequences: Sequence[CachedSequence]) -> list[bool]:
        """All requests can have a draft if a sequence of one of them is compressed. For sequences that are not
        compressed, draft steps attend to everything."""
        return [any(map(is_compressed, sequences))] * len(requests)

    def _logits(
        self, place: int, requests: Sequence[Request], sequences: Sequence[CachedSequence], sources: list[int]
    ) -> Tensor:
        newest = [request.output_token_ids[-1] for request in requests]
        return self._runner.decode(list(sequences), newest, sources, None, (), (), True)

    def _undo(self, requests: Sequence[Request], sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
        cut_back(self._runner.cache, sequences, lengths)


def is_compressed(sequence: CachedSequence) -> bool:
    """Whether a group of layers has compressed tokens of the sequence."""
    return any(group.compressed for group in (sequence, *sequence.other_groups))


def cut_back(cache: KVCache, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
    """Removes the tokens that draft steps have appended. ``lengths`` are those of the sequences before these steps."""
    for sequence, length in zip(sequences, lengths, strict=True):
        if sequence.length > length:
            cache.truncate(sequence, length)
