"""Chains of copies on the way back: from the disk to host memory, and from there to a new sequence on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link
from shadowkv.kvcache.snapshots.layers import Restoring
from shadowkv.prefix_cache.copies.copy import Copies, Copy
from shadowkv.prefix_cache.copies.mover import Mover, StreamArrival
from shadowkv.prefix_cache.copies.speeds import Speeds
from shadowkv.prefix_cache.device.matches import Step
from shadowkv.prefix_cache.device.tree import Node
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.stats import TierCounts

FETCH_SECONDS, MAX_FETCH_SECONDS = 1.0, 30.0
"""Minimum and maximum seconds that requests wait for what is read from the disk, which may hang."""


class Arriving(NamedTuple):
    """A chain on its way to the device: what its kernels read, and its size in bytes."""

    arrival: StreamArrival
    restoring: Restoring
    copies: list[Copy]
    nbytes: int


class Chains:
    """Brings chains back.

    Attributes:
        arriving: those on their way to the device.
    """

    def __init__(
        self,
        cache: KVCache,
        copies: Copies,
        mover: Mover,
        disk: DiskTier | None,
        counts: TierCounts,
        speeds: Speeds,
    ) -> None:
        self._cache, self._copies, self._mover, self._disk = cache, copies, mover, disk
        self._counts, self._speeds = counts, speeds
        self.arriving: list[Arriving] = []
        self._fetching: dict[Copy, float] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self.arriving or self._fetching)

    @property
    def futures(self) -> list[Future[float]]:
        """The reads in progress."""
        return [copy.fetching for copy in self._fetching if copy.fetching]

    def find(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
        steps: list[Step] = []
        at: Node | None = node
        while at is not None:
            copy = self._copies.of.get(at)
            if copy is None or not copy.usable or PAGE * stop > copy.header.length:
                return None
            steps.insert(0, Step(at, stop))
            parent, stop = at.parent, at.first
            if parent is None:
                return steps, None
            at = parent
            for sequence, held in at.holders.items():
                alike = held >= stop and bool(sequence.path) == at.compressed
                if alike and self._cache.fork_point(sequence, stop * PAGE) == stop * PAGE:
                    return steps, sequence
        return None

    def links(self, steps: Sequence[Step]) -> list[Link]:
        """A chain as the cache takes it."""
        return [Link(self._copies.of[step.node].header, step.stop * PAGE) for step in steps]

    def seconds(self, steps: list[Step]) -> float:
        """The time to restore a chain, estimated from earlier restores."""
        copies = [self._copies.of[step.node] for step in steps]
        nbytes = sum(copy.header.nbytes for copy in copies)
        on_disk = sum(copy.header.nbytes for copy in copies if not copy.on_host)
        return self._speeds.host_seconds(nbytes) + self._speeds.disk_seconds(on_disk)

    def fetch(self, steps: list[Step], patience: float) -> float | None:
        """Begins to bring a chain to host memory, where it is not there already.

        Returns until when it is worth waiting for, by ``time.monotonic``: 0 where it is there, None where there is no
        room for it or the disk takes more seconds than ``patience``, within those bounds.
        """
        until, now = 0.0, time.monotonic()
        seconds = min(max(FETCH_SECONDS, patience), MAX_FETCH_SECONDS)
        self._copies.eviction.touch(steps[-1].node)
        for step in steps:
            copy = self._copies.of[step.node]
            if copy.on_host:
                continue
            late = self._fetching.get(copy, now) + seconds
            if late < now:
                return None
            until = min(until or late, late)
            if copy.fetching is not None:
                continue
            if self._disk is None or copy.entry is None or now < copy.again:
                return None
            if not copy.fetch(self._disk, copy.entry, {step.node for step in steps}):
                return None
            self._fetching[copy] = now
        return until

    def restore(self, steps: list[Step], start: int, capacity: int, parent: CachedSequence | None) -> CachedSequence:
        """A sequence restored from a chain in host memory; raises as ``Snapshots.restore`` does."""
        restoring = self._cache.snapshots.restore(self.links(steps), start, capacity, parent)
        copies = [self._copies.of[step.node] for step in steps]
        parts = [(copy.header, copy.slabs or []) for copy in copies]
        began, nbytes = time.monotonic(), sum(copy.header.nbytes for copy in copies)
        try:
            arrival = self._mover.up(restoring, parts)
        except BaseException:
            self._mover.finish()
            self._cache.release(restoring.sequence)
            raise
        for step, copy in zip(steps, copies, strict=True):
            tier = "disk" if copy.from_disk else "host"
            self._counts.hit_tokens[tier] += (step.stop - step.node.first) * PAGE
            copy.from_disk = False
        if parent is not None:
            self._counts.hit_tokens["device"] += steps[0].node.first * PAGE
        if arrival is None:
            self._speeds.host(nbytes, time.monotonic() - began)
            self._counts.restored(nbytes, time.monotonic() - began)
        else:
            restoring.sequence.pending_layers = arrival
            for copy in copies:
                copy.use()
            self.arriving.append(Arriving(arrival, restoring, copies, nbytes))
        return restoring.sequence

    def advance(self) -> None:
        """Handles what has arrived."""
        for arriving in [arriving for arriving in self.arriving if arriving.arrival.done]:
            self.arriving.remove(arriving)
            for copy in arriving.copies:
                copy.leave()
            self._speeds.host(arriving.nbytes, arriving.arrival.seconds)
            self._counts.restored(arriving.nbytes, arriving.arrival.seconds)
        for copy in list(self._fetching):
            if copy.fetching is not None and copy.fetching.done():
                del self._fetching[copy]
                seconds = copy.end_fetch(copy.fetching)
                if seconds is not None:
                    self._speeds.disk(copy.header.nbytes, seconds)
