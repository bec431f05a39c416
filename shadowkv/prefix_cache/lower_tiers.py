"""``LowerTiers``: snapshots of the prefix tree's nodes in host memory and on disk, the tiers below the device.

A node is copied to host memory as soon as its pages are computed, while the device goes on, and from there to the disk.
So evicted nodes already have a copy. A node comes back in two steps. It is read from the disk when a request that needs
it arrives, and copied to the device when the request is admitted. Each layer arrives before prefill computes that
layer. All calls are on the engine's thread, except the disk tier's reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.prefix_cache.chains import Chains, Speeds
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.disk_reports import DiskReports
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import Mover
from shadowkv.prefix_cache.matches import Step
from shadowkv.prefix_cache.offload import Offload
from shadowkv.prefix_cache.saves import Saves
from shadowkv.prefix_cache.stats import Counts, TierStats
from shadowkv.prefix_cache.tree import Node, PrefixTree

STEP_BYTES = 2**28
"""Maximum number of bytes of copies that a step launches. They take 5 ms on a bus of 50 GB/s."""


class LowerTiers:
    """Copies a tree's nodes to lower tiers and restores them.

    Args:
        tree: the prefix tree. Snapshots found on disk are added as nodes.
        mover: copies between the device and the host tier. The host tier may be so small that it only has room for
            copies on their way to and from the disk.
        disk: returns the disk tier, given the callback that receives its events. None if there is no disk tier.
        device_counts, speeds: statistics of the device and measured speeds, updated here.
        eviction: the order in which copies are evicted from host memory.
        step_bytes: maximum number of bytes of copies that a step launches.

    Attributes:
        copies: all copies.
        offload: moves copies down.
        chains: brings copies back.
        disk: the disk tier; None without one.
        saves: requests to save and restore prompts, and prompts expected from other servers; None without a disk tier.
    """

    def __init__(
        self,
        cache: KVCache,
        tree: PrefixTree,
        mover: Mover,
        disk: Callable[[Callable[[str, FileHeader], None]], DiskTier] | None,
        device_counts: Counts,
        speeds: Speeds,
        eviction: Eviction,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._step_bytes, self._counts = step_bytes, Counts()
        self.copies = Copies(tree, mover.host, self._counts, eviction, mover.parts)
        self._reports = DiskReports(self.copies, cache.snapshots.form)
        self.disk = self._reports.disk = None if disk is None else disk(self._reports.report)
        counts = {"device": device_counts, "host": self._counts}
        if self.disk is not None:
            counts["disk"] = self.disk.counts
        self.offload = Offload(self.copies, mover, self.disk)
        self.chains = Chains(cache, self.copies, mover, self.disk, counts, speeds)
        self.saves: Saves | None = None
        if self.disk is not None:
            self.saves = Saves(self.copies, self._reports, self.offload, self.chains, self.disk, speeds)

    def hit(self, path: list[Node]) -> None:
        """Records a hit of these nodes, in whichever tier they were found. Their copies then stay longer."""
        if path:
            self.copies.eviction.touch(path[-1], hits=1)

    @property
    def opening(self) -> bool:
        """As ``DiskReports.opening``."""
        return self._reports.opening

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has work to do or to wait for."""
        asked = self.saves is not None and self.saves.busy
        return asked or self.offload.busy or self.chains.busy or self._reports.busy

    def advance(self) -> None:
        """Launches copies, and handles copies that have arrived."""
        self._reports.take()
        self.chains.advance()
        self.offload.advance(self._step_bytes)
        if self.saves is not None:
            self.saves.advance()

    def wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for reads and writes in progress."""
        futures: list[Future[Any]] = [*self.chains.futures, *self.offload.futures]
        if futures:
            wait(futures, seconds, FIRST_COMPLETED)
        elif self.busy or self.opening:
            time.sleep(seconds)

    def chain(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """As ``Chains.find``, after processing the disk tier's reports."""
        self._reports.take()
        return self.chains.find(node, stop)

    def stats(self) -> dict[str, TierStats]:
        """Statistics of each tier. Any thread may call it."""
        host = self.copies.host
        tiers = {"host": self._counts.now(host.used_bytes, host.total_bytes)}
        return tiers if self.disk is None else tiers | {"disk": self.disk.stats()}

    def abandon(self) -> None:
        """Gives up all copies from the device, even if the device has failed, and closes the disk tier. Do not use the
        tiers afterwards."""
        self.offload.abandon()
        if self.saves is not None:
            self.saves.abandon()
        if self.disk is not None:
            self.disk.close(0.0)

    def close(self, seconds: float = 10.0) -> None:
        """Closes the tiers. Copies on their way to the disk are written within ``seconds``."""
        deadline = time.monotonic() + seconds
        try:
            self.offload.finish(deadline)
        finally:
            if self.disk is not None:
                self.disk.close(max(0.1, deadline - time.monotonic()))
