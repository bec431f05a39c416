"""The tiers below the device: nodes of the prefix tree as snapshots in host memory and on disk.

A node is copied to the host as soon as its pages are computed, alongside the device's work, and from there to the disk:
what is evicted from the device already has a copy. It comes back the same way: from disk as soon as a request that
needs it arrives, from host memory when the request is admitted, layer by layer ahead of its prefill. Everything here is
called on the engine's thread, except the disk tier's reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shadowkv.cache.arrivals import Arrivals
from shadowkv.cache.chains import Chains, Step
from shadowkv.cache.copying import Copying
from shadowkv.cache.disk import DiskTier
from shadowkv.cache.eviction import Eviction
from shadowkv.cache.findings import Findings
from shadowkv.cache.host import HostTier
from shadowkv.cache.index import Entry
from shadowkv.cache.kept_copies import KeptCopies
from shadowkv.cache.moving import Mover
from shadowkv.cache.saves import Saves
from shadowkv.cache.speeds import Speeds
from shadowkv.cache.stats import TierCounts, TierStats
from shadowkv.cache.tree import Node, PrefixTree
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link

STEP_BYTES = 2**28
"""Most bytes launched at a time while others decode: 5 ms on a bus of 50 GB/s."""


class LowerTiers:
    """Copies of a tree's nodes.

    Args:
        tree: whose nodes are copied; nodes for snapshots on disk are added to it.
        host: may be so small that it only holds what is in transit from and to the disk.
        disk: makes the disk tier; None without one.
        counts, speeds: updated here.
        eviction: says which copies in host memory go first.
        step_bytes: most bytes of copies launched in a step.

    Attributes:
        copies: all copies there are.
        copying: those on their way down.
        chains: those on their way up.
        disk: the tier; None without one.
        saves: what is saved and restored by name; None without a disk tier.
        arrivals: what is expected from other servers; None without a disk tier.
    """

    def __init__(
        self,
        cache: KVCache,
        tree: PrefixTree,
        host: HostTier,
        disk: Callable[[Callable[[str, Entry], None]], DiskTier] | None,
        counts: TierCounts,
        speeds: Speeds,
        eviction: Eviction,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._step_bytes = step_bytes
        self._mover, self._counts = Mover(host, cache.device), counts
        self.copies = KeptCopies(tree, host, counts, eviction)
        self._findings = Findings(tree, self.copies, cache.snapshots.form)
        self.disk = self._findings.disk = None if disk is None else disk(self._findings.report)
        self.copying = Copying(cache, self.copies, self._mover, self.disk, counts)
        self.chains = Chains(cache, self.copies, self._mover, self.disk, counts, speeds)
        self.saves: Saves | None = None
        self.arrivals: Arrivals | None = None
        if self.disk is not None:
            self.arrivals = Arrivals(self.copies, self._findings, self.disk, speeds)
            self.saves = Saves(tree, self.copies, self._findings, self.copying, self.chains, self.disk)

    def store(self, node: Node, sequence: CachedSequence, token_ids: list[int]) -> None:
        """Has a node copied whose pages ``sequence`` all has; ``token_ids`` begin with the prompt's first."""
        self.copying.store(node, sequence, token_ids)

    def write(self, node: Node) -> None:
        """Has a copy that is only in host memory written to the disk."""
        self.copying.write(node)

    def hit(self, way: list[Node]) -> None:
        """Records that a request need not compute these nodes, wherever they were found: their copies stay longer."""
        if way:
            self.copies.eviction.touch(way[-1], hits=1)

    @property
    def opening(self) -> bool:
        """Whether the initial scan of the disk is still running, which is waited for, but not for long."""
        return self._findings.opening

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has work to do or wait for."""
        asked = (self.saves is not None and self.saves.busy) or (self.arrivals is not None and self.arrivals.busy)
        return asked or self.copying.busy or self.chains.busy or self._findings.busy

    def advance(self) -> None:
        """Launches copies, and handles what has arrived."""
        self._findings.take()
        self.chains.advance()
        self.copying.advance(self._step_bytes)
        if self.saves is not None:
            self.saves.advance()
        if self.arrivals is not None:
            self.arrivals.advance()

    def wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for what is on its way."""
        futures: list[Future[Any]] = [*self.chains.futures, *self.copying.futures]
        if futures:
            wait(futures, seconds, FIRST_COMPLETED)
        elif self.busy or self.opening:
            time.sleep(seconds)

    def chain(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
        self._findings.take()
        return self.chains.find(node, stop)

    def links(self, steps: Sequence[Step]) -> list[Link]:
        """A chain as the cache takes it."""
        return self.chains.links(steps)

    def seconds(self, steps: list[Step]) -> float:
        """The time to restore a chain, estimated from earlier restores."""
        return self.chains.seconds(steps)

    def fetch(self, steps: list[Step], patience: float) -> float | None:
        """Begins to bring a chain to host memory; see ``Chains.fetch``."""
        return self.chains.fetch(steps, patience)

    def restore(self, steps: list[Step], start: int, capacity: int, parent: CachedSequence | None) -> CachedSequence:
        """A sequence restored from a chain in host memory; raises as ``Snapshots.restore`` does."""
        return self.chains.restore(steps, start, capacity, parent)

    def stats(self) -> dict[str, TierStats]:
        """What each tier holds and has done; may be called from any thread."""
        host, counts = self.copies.host, self._counts
        tiers = {
            "host": TierStats(
                host.used_bytes,
                host.total_bytes,
                counts.hit_tokens["host"],
                counts.host_evictions,
                counts.copied_bytes,
                counts.refused,
                counts.restores,
                counts.restored_bytes,
                counts.restore_seconds,
            )
        }
        if self.disk is not None:
            disk = self.disk.stats()
            tiers["disk"] = TierStats(
                disk.bytes,
                self.disk.limit_bytes,
                counts.hit_tokens["disk"],
                disk.evictions,
                disk.written_bytes,
                disk.refused,
                disk.hits,
                disk.restored_bytes,
                disk.restore_seconds,
                disk.corrupt,
                disk.write_errors,
                disk.read_errors,
                disk.pinned_bytes,
            )
        return tiers

    def abandon(self) -> None:
        """Drops all reads on the device, whatever state it is in; nothing of it is used any more."""
        self.copying.abandon()
        if self.saves is not None:
            self.saves.abandon()
        if self.arrivals is not None:
            self.arrivals.abandon()
        if self.disk is not None:
            self.disk.close(0.0)

    def close(self, seconds: float = 10.0) -> None:
        """Closes the tiers: copies on their way to the disk are written, within ``seconds``."""
        deadline = time.monotonic() + seconds
        try:
            self.copying.finish(deadline)
        finally:
            if self.disk is not None:
                self.disk.close(max(0.1, deadline - time.monotonic()))
