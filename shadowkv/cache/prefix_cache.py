"""Prefixes cached on the device: those of running sequences, and of finished ones that are kept for reuse.

A request takes over a kept sequence where it continues nearly all of it, including its exact tail, and in its place.
Otherwise it forks: any number of requests share pages of sequences that run or are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shadowkv.cache.disk import DiskTier
from shadowkv.cache.eviction import Eviction
from shadowkv.cache.host import HostTier
from shadowkv.cache.index import Entry
from shadowkv.cache.lookups import Lookups
from shadowkv.cache.lower_tiers import STEP_BYTES, LowerTiers
from shadowkv.cache.matches import Match, Prompt
from shadowkv.cache.saves import Saves
from shadowkv.cache.segments import PrefixSegment, segments_of
from shadowkv.cache.speeds import Speeds
from shadowkv.cache.stats import TierCounts, TierStats
from shadowkv.cache.tree import Node, PrefixTree
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""Seconds between two polls for what is on its way, where there is nothing else to do."""


class PrefixCache:
    """Prefixes of prompts by their tokens; and kept sequences, evicted least recently used first.

    Args:
        host: holds copies of what is computed; None for none below the device.
        disk: makes the disk tier from the callback to report events to; None without one.
        eviction: says which copies go first in host memory.
        step_bytes: most bytes of copies to host memory launched in a step.

    Attributes:
        version: counts additions: until it changes, a prompt without a match need not be looked up again.
        lower: the tiers below the device.
    """

    def __init__(
        self,
        cache: KVCache,
        host: HostTier | None = None,
        disk: Callable[[Callable[[str, Entry], None]], DiskTier] | None = None,
        eviction: Eviction | None = None,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._cache, self._tree = cache, PrefixTree()
        self._kept: OrderedDict[CachedSequence, Prompt] = OrderedDict()
        self._lookups = Lookups()
        self.version, self.counts, self.speeds = 0, TierCounts(), Speeds()
        self.lower: LowerTiers | None = None
        if host is not None:
            eviction = eviction or Eviction()
            self.lower = LowerTiers(cache, self._tree, host, disk, self.counts, self.speeds, eviction, step_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def changes(self) -> int:
        """A counter that grows with every change that may give a prompt another match, or other needs of room."""
        return self._tree.changes + self._cache.changes

    def look_up(self, prompt: Prompt) -> Match | None:
        """``match`` of a waiting prompt, repeated as long as nothing changes; what it is to be restored from stays in
        host memory. Call ``forget`` when it no longer waits."""
        if not self._lookups.current(prompt, self.changes):
            match = self.match(prompt)
            if self.lower is not None:
                self._lookups.hold(prompt, match, self.lower.copies)
            self._lookups.note(prompt, match, self.changes)
        return self._lookups.match(prompt)

    def forget(self, prompt: Prompt) -> None:
        """Drops a prompt, if it has been looked up."""
        self._lookups.forget(prompt, None if self.lower is None else self.lower.copies)

    def match(self, prompt: Prompt) -> Match | None:
        """The longest prefix of ``prompt`` that is cached; among equals, a sequence that can be taken over."""
        best, along = self._whole(prompt), list(self._tree.along(prompt.shareable))
        for node, end in along:
            for sequence, held in node.holders.items():
                wanted = min(end, held) * PAGE
                if best is None or wanted > best.tokens:
                    tokens = self._cache.fork_point(sequence, wanted)
                    if tokens > (best.tokens if best else 0):
                        best = Match(sequence, tokens)
        if self.lower is not None:
            with self._failing_alone():
                return self._restorable(self.lower, along, best)
        return best

    def _restorable(self, lower: LowerTiers, along: list[tuple[Node, int]], best: Match | None) -> Match | None:
        """What the tiers below have, where restoring it takes less time than computing what ``best`` lacks; otherwise
        ``best``. Starts reading what is on disk."""
        reached = best.tokens if best else 0
        found = [(end, node) for node, end in along if end * PAGE > reached]
        for end, node in sorted(found, key=lambda one: -one[0]):
            if (way := lower.chain(node, end)) is None:
                continue
            steps, sequence = way
            computing = self.speeds.computing_seconds(end * PAGE - reached)
            if lower.seconds(steps) > computing:
                continue
            try:
                self._cache.snapshots.demand(lower.links(steps), end * PAGE, end * PAGE, sequence)
            except ValueError:  # such sequences cannot be cut there
                continue
            until = lower.fetch(steps, computing)
            if until is not None:
                return Match(sequence, end * PAGE, steps=tuple(steps), until=until)
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

    def computed(self, sequence: CachedSequence, prompt: Prompt) -> None:
        """Records that the pages of a prompt are in ``sequence``, which is running: others can fork it."""
        # The last token may be taken back, and a request for all of them has one to compute.
        pages = self._cache.fork_point(sequence, len(prompt.token_ids) - 1) // PAGE
        self.version += 1
        way = self._tree.hold(sequence, prompt.pages, pages)
        if self.lower is not None:
            with self._failing_alone():
                for node in way:
                    if node.copy is not None:
                        self.lower.write(node)
                    elif (source := self._source(node, sequence, prompt)) is not None:
                        self.lower.store(node, *source)

    def _source(self, node: Node, sequence: CachedSequence, prompt: Prompt) -> tuple[CachedSequence, list[int]] | None:
        """A sequence that has all pages of a node, this one or a kept one, and its tokens."""
        for one, held in node.holders.items():
            own = prompt if one is sequence else self._kept.get(one)
            if own is not None and held == node.end:
                return one, own.token_ids
        return None

    def keep(self, sequence: CachedSequence, prompt: Prompt) -> None:
        """Takes over a finished sequence; its cached tokens are the first of ``prompt``'s."""
        self._cache.trim(sequence)
        self.computed(sequence, prompt)
        self._kept[sequence] = Prompt(prompt.token_ids[: sequence.length], prompt.pages)

    def take(self, match: Match, start: int, capacity: int) -> CachedSequence:
        """A sequence that begins with a match, extended to ``start`` and ``capacity`` tokens.

        Raises OutOfBlocks, and whatever prevents restoring ``match.steps``, with nothing taken.
        """
        taken = self._take(match, start, capacity)
        if self.lower is not None:
            self.lower.hit(self._tree.way_of(taken))
        return taken

    def _take(self, match: Match, start: int, capacity: int) -> CachedSequence:
        sequence, cache = match.sequence, self._cache
        if sequence is not None and sequence in self._kept and not match.whole:
            self._kept.move_to_end(sequence)
        if match.steps:
            assert self.lower is not None
            child = self.lower.restore(list(match.steps), start, capacity, sequence)
            if sequence is not None:
                self._tree.fork(child, sequence, match.steps[0].node.first)
            for step in match.steps:
                self._tree.join(child, step.node, step.stop)
            return child
        assert sequence is not None
        self.counts.hit_tokens["device"] += match.tokens
        if not match.whole:
            child = cache.fork(sequence, match.tokens, start, capacity)
            self._tree.fork(child, sequence, match.tokens // PAGE)
            return child
        cache.truncate(sequence, match.tokens)
        self._tree.cut(sequence, match.tokens // PAGE)
        cache.extend(sequence, start, capacity)
        del self._kept[sequence]
        return sequence

    def growth(self, match: Match, start: int, capacity: int) -> Blocks:
        """What ``take`` needs."""
        sequence, cache = match.sequence, self._cache
        if match.steps:
            assert self.lower is not None
            return cache.snapshots.demand(self.lower.links(match.steps), start, capacity, sequence)
        assert sequence is not None
        if match.whole:
            return cache.growth(sequence, start, capacity)
        return cache.fork_demand(sequence, match.tokens, start, capacity)

    def release(self, sequence: CachedSequence) -> None:
        """Frees a sequence that is not kept."""
        self._tree.forget(sequence)
        self._cache.release(sequence)

    def blocks(self, spare: CachedSequence | None = None) -> Blocks:
        """What would be free without all kept sequences other than ``spare``."""
        return self._cache.held(one for one in self._kept if one is not spare)

    def evict(self, spare: CachedSequence | None = None) -> bool:
        """Releases the least recently used kept sequence other than ``spare``; False if there is none."""
        victim = next((sequence for sequence in self._kept if sequence is not spare), None)
        if victim is None:
            return False
        del self._kept[victim]
        self.release(victim)
        self.counts.device_evictions += 1
        return True

    @property
    def saves(self) -> Saves | None:
        """What is saved and restored by name; None without a disk tier, or once it has been given up."""
        return None if self.lower is None else self.lower.saves

    @contextmanager
    def on_the_device_alone(self) -> Iterator[None]:
        """While it is open, nothing that is computed is copied to the tiers below, and nothing comes from there."""
        lower, self.lower = self.lower, None
        self._tree.changes += 1
        try:
            yield
        finally:
            self.lower = lower
            self._tree.changes += 1

    def stats(self) -> dict[str, TierStats]:
        """What each tier holds and has done; may be called from any thread."""
        use, counts = self._cache.use()["device"], self.counts
        device = TierStats(use.used_bytes, use.total_bytes, counts.hit_tokens["device"], counts.device_evictions)
        lower = self.lower  # the engine's thread may give it up meanwhile
        return {"device": device, **({} if lower is None else lower.stats())}

    def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        """Where cached prompts are, at most ``most`` runs of pages, and how many there are; on the engine's thread."""
        return segments_of(self._tree, self._kept, most)

    @property
    def opening(self) -> bool:
        """Whether the contents of the disk are about to be known, but are not yet."""
        return self.lower is not None and self.lower.opening

    @property
    def busy(self) -> bool:
        """Whether copies are on their way to other tiers."""
        return self.lower is not None and self.lower.busy

    def advance(self, idle: bool) -> None:
        """Continues them; waits briefly for the disk where there is nothing else to do."""
        if self.lower is not None:
            with self._failing_alone():
                self.lower.advance()
                if idle:
                    self.lower.wait(IDLE_SECONDS)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """If the tiers below fail for memory, the device or the disk in a way that they do not handle, requests go on
        without them."""
        try:
            yield
        except torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            logger.error("what is cached below the device is not used any more", exc_info=error)
            lower, self.lower = self.lower, None
            self._tree.changes += 1
            if lower is not None:
                lower.abandon()

    def close(self) -> None:
        """Ends the tiers' work."""
        if self.lower is not None:
            self.lower.close()
