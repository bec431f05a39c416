"""What is cached of prompts on the device: sequences that run and finished ones that are kept, to be gone on with.

A request goes on with a finished sequence where it continues nearly all of it: with its exact tail, and in its place.
Otherwise it forks: any number of requests share pages of sequences that run or are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shadowkv.cache.pages import PageNames
from shadowkv.cache.tree import PrefixTree
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory import Blocks
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.spec import PAGE


@dataclass(frozen=True)
class Prompt:
    """What a request asks the cache for.

    Attributes:
        token_ids: of the prompt, or of prompt and answer.
        pages: names of its full pages.
    """

    token_ids: list[int]
    pages: PageNames

    @property
    def shareable(self) -> list[str]:
        """Those that another sequence may compute for it: one token at least is left."""
        return self.pages[: (len(self.token_ids) - 1) // PAGE]


@dataclass(frozen=True)
class Match:
    """A start of a prompt that ``sequence`` has.

    Attributes:
        tokens: its length: one prompt token at least is left to compute.
        whole: whether the sequence itself can be gone on with, which nobody uses; otherwise it is forked.
    """

    sequence: Sequence
    tokens: int
    whole: bool


class PrefixCache:
    """Starts of prompts by their tokens; and finished sequences, least recently used first out.

    Attributes:
        version: counts what was added, so that who found nothing need not look again before.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._tree = cache, PrefixTree()
        self._kept: OrderedDict[Sequence, Prompt] = OrderedDict()
        self.version = 0

    def __len__(self) -> int:
        return len(self._kept)

    def match(self, prompt: Prompt) -> Match | None:
        """The longest start of ``prompt`` that is cached; of equal ones a sequence that can be gone on with."""
        best = self._whole(prompt)
        for node, end in self._tree.along(prompt.shareable):
            for sequence, held in node.holders.items():
                wanted = min(end, held) * PAGE
                if best is None or wanted > best.tokens:
                    tokens = self._cache.fork_point(sequence, wanted)
                    if tokens > (best.tokens if best else 0):
                        best = Match(sequence, tokens, False)
        return best

    def _whole(self, wanted: Prompt) -> Match | None:
        """The kept sequence that ``wanted`` continues.

        All its full pages must be wanted, or an edited history would use up a conversation; sealed and shared tokens
        cannot be cut off.
        """
        best, limit = None, len(wanted.token_ids) - 1
        for sequence, kept in self._kept.items():
            pages = len(kept.token_ids) // PAGE
            if kept.pages.origin != wanted.pages.origin or pages > len(wanted.pages):
                continue
            if pages and kept.pages[pages - 1] != wanted.pages[pages - 1]:
                continue
            tokens = pages * PAGE
            for one, other in zip(kept.token_ids[tokens:], wanted.token_ids[tokens:limit]):
                if one != other:
                    break
                tokens += 1
            usable = max(1, sequence.fixed, len(kept.token_ids) // 2) <= tokens <= limit
            if usable and (best is None or tokens > best.tokens):
                best = Match(sequence, tokens, True)
        return best

    def computed(self, sequence: Sequence, prompt: Prompt) -> None:
        """Notes that the pages of a prompt are in ``sequence``, which runs: others can fork it."""
        pages = self._cache.fork_point(sequence, len(prompt.token_ids)) // PAGE
        self.version += 1
        self._tree.hold(sequence, prompt.pages[:pages])

    def keep(self, sequence: Sequence, prompt: Prompt) -> None:
        """Takes over a finished sequence; its cached tokens are the first of ``prompt``'s."""
        self._cache.trim(sequence)
        self.computed(sequence, prompt)
        self._kept[sequence] = Prompt(prompt.token_ids[: sequence.length], prompt.pages)

    def take(self, match: Match, start: int, capacity: int) -> Sequence:
        """A sequence that begins with a match, extended to ``start`` and ``capacity`` tokens; raises OutOfPages."""
        sequence, cache = match.sequence, self._cache
        if not match.whole:
            child = cache.fork(sequence, match.tokens, start, capacity)
            self._tree.fork(child, sequence, match.tokens // PAGE)
            if sequence in self._kept:
                self._kept.move_to_end(sequence)
            return child
        del self._kept[sequence]
        cache.truncate(sequence, match.tokens)
        self._tree.cut(sequence, match.tokens // PAGE)
        cache.extend(sequence, start, capacity)
        return sequence

    def growth(self, match: Match, start: int, capacity: int) -> Blocks:
        """What ``take`` needs."""
        if match.whole:
            return self._cache.growth(match.sequence, start, capacity)
        return self._cache.fork_demand(match.sequence, match.tokens, start, capacity)

    def release(self, sequence: Sequence) -> None:
        """Gives back a sequence that is not kept."""
        self._tree.forget(sequence)
        self._cache.release(sequence)

    def blocks(self, spare: Sequence | None = None) -> Blocks:
        """What would be free without all kept sequences other than ``spare``."""
        return self._cache.held(one for one in self._kept if one is not spare)

    def evict(self, spare: Sequence | None = None) -> bool:
        """Releases the least recently used kept sequence other than ``spare``; False if there is none."""
        victim = next((sequence for sequence in self._kept if sequence is not spare), None)
        if victim is None:
            return False
        del self._kept[victim]
        self.release(victim)
        return True
