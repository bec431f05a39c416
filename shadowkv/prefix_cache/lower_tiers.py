"""The tiers below the device: nodes of the prefix tree as snapshots in host memory and on disk.

A node is copied to the host as soon as its pages are computed, alongside the device's work, and from there to the disk:
what is evicted from the device already has a copy. It comes back the same way: from disk as soon as a request that
needs it arrives, from host memory when the request is admitted, layer by layer ahead of its prefill. Everything here is
called on the engine's thread, except the disk tier's reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.chains import Chains, Speeds
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.disk_reports import DiskReports
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import HostTier, Mover
from shadowkv.prefix_cache.matches import Step
from shadowkv.prefix_cache.offload import Offload
from shadowkv.prefix_cache.saves import Saves
from shadowkv.prefix_cache.stats import Counts, TierStats
from shadowkv.prefix_cache.tree import Node, PrefixTree

STEP_BYTES = 2**28
"""Most bytes launched at a time while others decode: 5 ms on a bus of 50 GB/s."""


class LowerTiers:
    """Copies of a tree's nodes.

    Args:
        tree: whose nodes are copied; nodes for snapshots on disk are added to it.
        host: may be so small that it only holds what is in transit from and to the disk.
        disk: makes the disk tier; None without one.
        device_counts, speeds: updated here.
        eviction: says which copies in host memory go first.
        step_bytes: most bytes of copies launched in a step.

    Attributes:
        copies: all copies there are.
        offload: makes them; those on their way down.
        chains: brings them back; those on their way up.
        disk: the tier; None without one.
        saves: what is saved, restored by name or expected from other servers; None without a disk tier.
    """

    def __init__(
        self,
        cache: KVCache,
        tree: PrefixTree,
        host: HostTier,
        disk: Callable[[Callable[[str, FileHeader], None]], DiskTier] | None,
        device_counts: Counts,
        speeds: Speeds,
        eviction: Eviction,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._step_bytes, self._counts = step_bytes, Counts()
        self.copies = Copies(tree, host, self._counts, eviction)
        self._reports = DiskReports(self.copies, cache.snapshots.form)
        self.disk = self._reports.disk = None if disk is None else disk(self._reports.report)
        counts = {"device": device_counts, "host": self._counts}
        if self.disk is not None:
            counts["disk"] = self.disk.counts
        mover = Mover(host, cache.device)
        self.offload = Offload(cache, self.copies, mover, self.disk)
        self.chains = Chains(cache, self.copies, mover, self.disk, counts, speeds)
        self.saves: Saves | None = None
        if self.disk is not None:
            self.saves = Saves(self.copies, self._reports, self.offload, self.chains, self.disk, speeds)

    def hit(self, path: list[Node]) -> None:
        """Records that a request need not compute these nodes, wherever they were found: their copies stay longer."""
        if path:
            self.copies.eviction.touch(path[-1], hits=1)

    @property
    def opening(self) -> bool:
        """Whether the initial scan of the disk is still running, which is waited for, but not for long."""
        return self._reports.opening

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has work to do or wait for."""
        asked = self.saves is not None and self.saves.busy
        return asked or self.offload.busy or self.chains.busy or self._reports.busy

    def advance(self) -> None:
        """Launches copies, and handles what has arrived."""
        self._reports.take()
        self.chains.advance()
        self.offload.advance(self._step_bytes)
        if self.saves is not None:
            self.saves.advance()

    def wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for what is on its way."""
        futures: list[Future[Any]] = [*self.chains.futures, *self.offload.futures]
        if futures:
            wait(futures, seconds, FIRST_COMPLETED)
        elif self.busy or self.opening:
            time.sleep(seconds)

    def chain(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
        self._reports.take()
        return self.chains.find(node, stop)

    def stats(self) -> dict[str, TierStats]:
        """What each tier holds and has done; may be called from any thread."""
        host = self.copies.host
        tiers = {"host": self._counts.now(host.used_bytes, host.total_bytes)}
        return tiers if self.disk is None else tiers | {"disk": self.disk.stats()}

    def abandon(self) -> None:
        """Drops all reads on the device, whatever state it is in; nothing of it is used any more."""
        self.offload.abandon()
        if self.saves is not None:
            self.saves.abandon()
        if self.disk is not None:
            self.disk.close(0.0)

    def close(self, seconds: float = 10.0) -> None:
        """Closes the tiers: copies on their way to the disk are written, within ``seconds``."""
        deadline = time.monotonic() + seconds
        try:
            self.offload.finish(deadline)
        finally:
            if self.disk is not None:
                self.disk.close(max(0.1, deadline - time.monotonic()))
