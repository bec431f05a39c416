"""``PrefixCache``: finds prefixes of prompts in running sequences, in finished sequences that are kept, and in lower
tiers.

A request that continues nearly all of a kept sequence takes over the sequence, including its last tokens, which are
still exact. Other requests fork a sequence: any number of them share pages of running and kept sequences. The scheduler
calls this module.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.chains import Speeds
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import Mover
from shadowkv.prefix_cache.lower_tiers import STEP_BYTES, LowerTiers
from shadowkv.prefix_cache.matches import Lookups, Match, Prompt
from shadowkv.prefix_cache.saves import Saves
from shadowkv.prefix_cache.stats import Counts, TierStats
from shadowkv.prefix_cache.tree import Node, PrefixTree

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""Seconds between two polls for copies in progress, while the engine is otherwise idle."""


@dataclass(frozen=True)
class PrefixSegment:
    """Describes a node of the prefix tree to clients. The node has pages that were computed together.

    Attributes:
        uid: identifies the segment as long as it is in any tier. It does not depend on the tokens.
        first: position of the first token.
        tokens: number of tokens.
        compressed: whether the pages are in the policy's compressed form rather than exact.
        running: whether a running request uses the pages.
        tiers: which of the tiers ``device``, ``host`` and ``disk`` hold the pages.
    """

    uid: str
    first: int
    tokens: int
    compressed: bool
    running: bool
    tiers: tuple[str, ...]


class PrefixCache:
    """Finds cached prefixes of prompts, and keeps finished sequences. It evicts the least recently used of these.

    Args:
        mover: copies between the device and the host tier; None without tiers below the device.
        disk: returns the disk tier, given the callback that receives its events. None if there is no disk tier.
        eviction: the order in which copies are evicted from host memory.
        step_bytes: maximum number of bytes of copies to host memory that a step launches.

    Attributes:
        version: counts additions to the cache. Until it changes, a prompt without a match need not be looked up again.
        counts: hits and evictions on the device.
        lower: the tiers below the device; None without them, or after they have failed.
    """

    def __init__(
        self,
        cache: KVCache,
        mover: Mover | None = None,
        disk: Callable[[Callable[[str, FileHeader], None]], DiskTier] | None = None,
        eviction: Eviction | None = None,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._cache, self._tree = cache, PrefixTree()
        self._kept: OrderedDict[CachedSequence, Prompt] = OrderedDict()
        self._lookups = Lookups()
        self.version, self.counts, self.speeds = 0, Counts(), Speeds()
        self.lower: LowerTiers | None = None
        if mover is not None:
            eviction = eviction or Eviction()
            self.lower = LowerTiers(cache, self._tree, mover, disk, self.counts, self.speeds, eviction, step_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def changes(self) -> int:
        """Counts all changes that may change a prompt's match, or the blocks that the match needs."""
        return self._tree.changes + self._cache.changes

    def look_up(self, prompt: Prompt) -> Match | None:
        """Returns the match of a waiting prompt. Calls ``match`` again only if ``changes`` has grown, or if a read from
        the disk is late.

        ``Lookups.hold`` keeps the match's copies in host memory. Call ``forget`` when the prompt no longer waits.
        """
        if not self._lookups.current(prompt, self.changes):
            match = self.match(prompt)
            if self.lower is not None:
                self._lookups.hold(prompt, match, self.lower.copies)
            self._lookups.note(prompt, match, self.changes)
        return self._lookups.match(prompt)

    @property
    def deferred(self) -> int:
        """Number of waiting prompts for which snapshots are being read from the disk. Any thread may read it."""
        return self._lookups.deferred

    def forget(self, prompt: Prompt) -> None:
        """Drops what ``look_up`` has recorded for a prompt."""
        self._lookups.forget(prompt, None if self.lower is None else self.lower.copies)

    def match(self, prompt: Prompt) -> Match | None:
        """Returns the longest cached prefix of ``prompt``, or None. Of equally long ones it prefers a sequence that the
        request can take over."""
        best, along = self._continued(prompt), list(self._tree.along(prompt.shareable))
        for node, end in along:
            for sequence, held in node.holders.items():
                shared = min(end, held) * PAGE
                if best is None or shared > best.tokens:
                    tokens = self._cache.fork_point(sequence, shared)
                    if tokens > (best.tokens if best else 0):
                        best = Match(sequence, tokens)
        if self.lower is not None:
            with self._failing_alone():
                return self._restorable(self.lower, along, best)
        return best

    def _restorable(self, lower: LowerTiers, along: list[tuple[Node, int]], best: Match | None) -> Match | None:
        """Returns the longest match from the lower tiers that is longer than ``best`` and takes less time to restore
        than to compute. Returns ``best`` if there is none. Starts to read the match's copies that are only on disk."""
        reached = best.tokens if best else 0
        candidates = [(end, node) for node, end in along if end * PAGE > reached]
        for end, node in sorted(candidates, key=lambda candidate: -candidate[0]):
            if (chain := lower.chain(node, end)) is None:
                continue
            steps, sequence = chain
            computing = self.speeds.computing_seconds(end * PAGE - reached)
            if lower.chains.seconds(steps) > computing:
                continue
            try:
                self._cache.snapshots.demand(lower.chains.links(steps), end * PAGE, end * PAGE, sequence)
            except ValueError:  # the policy cannot cut sequences there
                continue
            until = lower.chains.fetch(steps, computing)
            if until is not None:
                return Match(sequence, end * PAGE, steps=tuple(steps), until=until)
        return best

    def _continued(self, prompt: Prompt) -> Match | None:
        """Returns a match with the kept sequence that a prompt continues, or None.

        The prompt must have all full pages of the sequence. Otherwise a conversation with an edited history would take
        over the original conversation's sequence. The prompt must also have the sequence's compressed and shared
        tokens, because these cannot be cut off.
        """
        best, limit = None, len(prompt.token_ids) - 1
        for sequence, kept in self._kept.items():
            pages = len(kept.token_ids) // PAGE
            if kept.pages.origin != prompt.pages.origin or pages > len(prompt.pages):
                continue
            if pages and kept.pages[pages - 1] != prompt.pages[pages - 1]:
                continue
            tokens = pages * PAGE
            for kept_id, prompt_id in zip(kept.token_ids[tokens:], prompt.token_ids[tokens:limit]):
                if kept_id != prompt_id:
                    break
                tokens += 1
            usable = max(1, sequence.fixed, len(kept.token_ids) // 2) <= tokens <= limit
            if usable and (best is None or tokens > best.tokens):
                best = Match(sequence, tokens, True)
        return best

    def computed(self, sequence: CachedSequence, prompt: Prompt) -> None:
        """Records that ``sequence``, which is running, has the pages of a prompt. Other requests can then fork it."""
        # The last token is left out: the sequence may drop it again, and a request for the same prompt computes at
        # least one token anyway.
        points = self._cache.fork_points(sequence, len(prompt.token_ids) - 1)
        self.version += 1
        path = self._tree.hold(sequence, prompt.pages, [point // PAGE for point in points])
        if self.lower is not None:
            with self._failing_alone():
                for node in path:
                    if node.copy is not None:
                        self.lower.offload.write(node.copy)
                    elif (source := self._source(node, sequence, prompt)) is not None:
                        self.lower.offload.store(node, *source)

    def _source(self, node: Node, sequence: CachedSequence, prompt: Prompt) -> tuple[CachedSequence, list[int]] | None:
        """Returns a sequence that has all pages of ``node``, and its token ids. It is ``sequence`` or a kept one."""
        for holder, held in node.holders.items():
            own = prompt if holder is sequence else self._kept.get(holder)
            if own is not None and held == node.end:
                return holder, own.token_ids
        return None

    def keep(self, sequence: CachedSequence, prompt: Prompt) -> None:
        """Keeps a finished sequence for reuse. Its cached tokens are the first tokens of ``prompt``."""
        self._cache.trim(sequence)
        self.computed(sequence, prompt)
        self._kept[sequence] = Prompt(prompt.token_ids[: sequence.length], prompt.pages)

    def take(self, match: Match, start: int, capacity: int) -> CachedSequence:
        """Returns a sequence that starts with a match. It has blocks for a prompt of ``start`` tokens, and for growth
        to ``capacity`` tokens by decoding.

        Raises OutOfBlocks, and the errors of restoring ``match.steps``. After an error no blocks stay taken.
        """
        taken = self._take(match, start, capacity)
        if self.lower is not None:
            self.lower.hit(self._tree.path_of(taken))
        return taken

    def _take(self, match: Match, start: int, capacity: int) -> CachedSequence:
        sequence, cache = match.sequence, self._cache
        if sequence is not None and sequence in self._kept and not match.takes_over:
            self._kept.move_to_end(sequence)
        if match.steps:
            assert self.lower is not None
            child = self.lower.chains.restore(list(match.steps), start, capacity, sequence)
            if sequence is not None:
                self._tree.fork(child, sequence, match.steps[0].copy.node.first)
            for step in match.steps:
                self._tree.join(child, step.copy.node, step.stop)
            return child
        assert sequence is not None
        self.counts.add(hit_tokens=match.tokens)
        if not match.takes_over:
            child = cache.fork(sequence, match.tokens, start, capacity)
            self._tree.fork(child, sequence, match.tokens // PAGE)
            return child
        cache.truncate(sequence, match.tokens)
        self._tree.cut(sequence, match.tokens // PAGE)
        cache.extend(sequence, start, capacity)
        del self._kept[sequence]
        return sequence

    def growth(self, match: Match, start: int, capacity: int) -> Blocks:
        """Returns the numbers of blocks that ``take`` needs for the same arguments."""
        sequence, cache = match.sequence, self._cache
        if match.steps:
            assert self.lower is not None
            return cache.snapshots.demand(self.lower.chains.links(match.steps), start, capacity, sequence)
        assert sequence is not None
        if match.takes_over:
            return cache.growth(sequence, start, capacity)
        return cache.fork_demand(sequence, match.tokens, start, capacity)

    def release(self, sequence: CachedSequence) -> None:
        """Frees a sequence that is not kept."""
        self._tree.forget(sequence)
        self._cache.release(sequence)

    def blocks(self, spare: CachedSequence | None = None) -> Blocks:
        """Returns the numbers of blocks that would be free if all kept sequences but ``spare`` were evicted.

        Any thread may call it.
        """
        return self._cache.held(sequence for sequence in [*self._kept] if sequence is not spare)

    def evict(self, spare: CachedSequence | None = None) -> bool:
        """Releases the least recently used kept sequence other than ``spare``. Returns False if there is none."""
        victim = next((sequence for sequence in self._kept if sequence is not spare), None)
        if victim is None:
            return False
        del self._kept[victim]
        self.release(victim)
        self.counts.add(evictions=1)
        return True

    @property
    def saves(self) -> Saves | None:
        """Requests to save and restore prompts by name; None without a disk tier, or after it has failed."""
        return None if self.lower is None else self.lower.saves

    @contextmanager
    def on_the_device_alone(self) -> Iterator[None]:
        """A context in which prompts are neither copied to the lower tiers nor restored from them."""
        lower, self.lower = self.lower, None
        self._tree.changes += 1
        try:
            yield
        finally:
            self.lower = lower
            self._tree.changes += 1

    def stats(self) -> dict[str, TierStats]:
        """Statistics of each tier. Any thread may call it."""
        use = self._cache.use()["device"]
        device = self.counts.now(use.used_bytes, use.total_bytes)
        lower = self.lower  # the engine's thread may set it to None meanwhile
        return {"device": device, **({} if lower is None else lower.stats())}

    def segments(self, limit: int) -> tuple[list[PrefixSegment], int]:
        """Returns at most ``limit`` segments of cached prompts in order of their positions, and the number of all
        segments. Call it on the engine's thread.

        If there are more than ``limit``, segments on the device are preferred to those in host memory, and these to
        those on disk. Within a tier, the most recently used are preferred.
        """

        def distance(node: Node) -> tuple[bool, bool, float]:
            return not node.holders, node.copy is None or not node.copy.on_host, -node.used

        nearest = sorted(self._tree, key=distance)
        shown = sorted(nearest[:limit], key=lambda node: node.first)
        return [self._segment(node) for node in shown], len(nearest)

    def _segment(self, node: Node) -> PrefixSegment:
        copy = node.copy
        places = {
            "device": bool(node.holders),
            "host": copy is not None and copy.on_host,
            "disk": copy is not None and copy.file is not None,
        }
        running = any(sequence not in self._kept for sequence in node.holders)
        tiers = tuple(tier for tier, is_there in places.items() if is_there)
        return PrefixSegment(node.uid, node.first * PAGE, len(node.hashes) * PAGE, node.compressed, running, tiers)

    @property
    def opening(self) -> bool:
        """Whether requests should wait for the initial scan of the disk."""
        return self.lower is not None and self.lower.opening

    @property
    def busy(self) -> bool:
        """Whether copies between tiers are in progress."""
        return self.lower is not None and self.lower.busy

    def advance(self, idle: bool) -> None:
        """Continues copies between tiers. If ``idle``, it waits briefly for the disk."""
        if self.lower is not None:
            with self._failing_alone():
                self.lower.advance()
                if idle:
                    self.lower.wait(IDLE_SECONDS)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """A context in which errors of the lower tiers do not fail requests. After an error the cache goes on without
        these tiers. Errors of the accelerator are raised."""
        try:
            yield
        except torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            logger.error("cached prompts in host memory and on disk are not used any more", exc_info=error)
            lower, self.lower = self.lower, None
            self._tree.changes += 1
            if lower is not None:
                lower.abandon()

    def close(self) -> None:
        """Closes the lower tiers."""
        if self.lower is not None:
            self.lower.close()
