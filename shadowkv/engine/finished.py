"""Finished sequences that stay in the cache for a next turn, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory import Blocks
from shadowkv.kvcache.sequence import Sequence


class FinishedSequences:
    """Token ids of cached sequences that no request owns."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._tokens: OrderedDict[Sequence, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Takes over a sequence whose cached tokens are ``token_ids``."""
        self._cache.trim(sequence)
        self._tokens[sequence] = np.asarray(token_ids, np.int64)

    def match(self, prompt: list[int]) -> tuple[Sequence, int] | None:
        """The sequence that shares the longest start with ``prompt``, and how many tokens of it can stay.

        At least half of a sequence must stay, or a short common start would use up a long conversation; sealed
        tokens cannot be cut off; and one prompt token at least is left to compute.
        """
        wanted, best = np.asarray(prompt, np.int64), None
        for sequence, tokens in self._tokens.items():
            length = min(len(tokens), len(wanted) - 1)
            differs = np.flatnonzero(tokens[:length] != wanted[:length])
            common = int(differs[0]) if len(differs) else length
            usable = common >= max(1, len(tokens) // 2, sequence.fixed)
            if usable and (best is None or common > best[1]):
                best = (sequence, common)
        return best

    def take(self, sequence: Sequence) -> None:
        """Gives ``sequence`` to a request."""
        del self._tokens[sequence]

    def blocks(self, spare: Sequence | None = None) -> Blocks:
        """What would be free without all sequences other than ``spare``."""
        return self._cache.held(one for one in self._tokens if one is not spare)

    def evict(self, spare: Sequence | None = None) -> bool:
        """Releases the least recently used sequence other than ``spare``; False if there is none."""
        victim = next((sequence for sequence in self._tokens if sequence is not spare), None)
        if victim is None:
            return False
        del self._tokens[victim]
        self._cache.release(victim)
        return True
