"""Chains of copies on the way back: from the disk to host memory, and from there to a new sequence on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from shadowkv.cache.copies import Copy
from shadowkv.cache.disk import DiskTier
from shadowkv.cache.kept_copies import KeptCopies
from shadowkv.cache.moving import Mover, StreamArrival
from shadowkv.cache.speeds import Speeds
from shadowkv.cache.stats import TierCounts
from shadowkv.cache.tree import Node
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link
from shadowkv.kvcache.snapshots.layers import Restoring

FETCH_SECONDS, MOST_FETCH_SECONDS = 1.0, 30.0
"""Minimum and maximum seconds that requests wait for what is read from the disk, which may hang."""

RETRY_SECONDS = 30.0
"""After how long a file that could not be read is tried again."""


@dataclass(frozen=True)
class Step:
    """A node of a chain, and the page up to which it is used."""

    node: Node
    stop: int


class Chains:
    """Brings chains back.

    Attributes:
        arriving: those on their way to the device, with what their kernels read, and their sizes in bytes.
    """

    def __init__(
        self,
        cache: KVCache,
        copies: KeptCopies,
        mover: Mover,
        disk: DiskTier | None,
        counts: TierCounts,
        speeds: Speeds,
    ) -> None:
        self._cache, self._copies, self._mover, self._disk = cache, copies, mover, disk
        self._counts, self._speeds = counts, speeds
        self.arriving: list[tuple[StreamArrival, Restoring, list[Node], int]] = []
        self._fetching: dict[Node, float] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self.arriving or self._fetching)

    @property
    def futures(self) -> list[Future[float]]:
        """The reads in progress."""
        return [node.copy.fetching for node in self._fetching if node.copy and node.copy.fetching]

    def find(self, node: Node, stop: int) -> tuple[list[Step], CachedSequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
        steps: list[Step] = []
        at: Node | None = node
        while at is not None:
            if at.copy is None or not at.copy.usable or PAGE * stop > at.copy.header.length:
                return None
            steps.insert(0, Step(at, stop))
            parent, stop = at.parent, at.first
            if parent is None:
                return steps, None
            at = parent
            for sequence, held in at.holders.items():
                alike = held >= stop and bool(sequence.path) == at.sealed
                if alike and self._cache.fork_point(sequence, stop * PAGE) == stop * PAGE:
                    return steps, sequence
        return None

    def links(self, steps: Sequence[Step]) -> list[Link]:
        """A chain as the cache takes it."""
        return [Link(step.node.copy.header, step.stop * PAGE) for step in steps if step.node.copy is not None]

    def seconds(self, steps: list[Step]) -> float:
        """The time to restore a chain, estimated from earlier restores."""
        copies = [step.node.copy for step in steps if step.node.copy is not None]
        on_disk = sum(copy.header.nbytes for copy in copies if not copy.on_host)
        return self._speeds.host_seconds(sum(copy.header.nbytes for copy in copies)) + self._speeds.disk_seconds(
            on_disk
        )

    def fetch(self, steps: list[Step], patience: float) -> float | None:
        """Begins to bring a chain to host memory, where it is not there already.

        Returns until when it is worth waiting for, by ``time.monotonic``: 0 where it is there, None where there is no
        room for it or the disk takes more seconds than ``patience``, within those bounds.
        """
        until, now = 0.0, time.monotonic()
        seconds = min(max(FETCH_SECONDS, patience), MOST_FETCH_SECONDS)
        self._copies.eviction.touch(steps[-1].node)
        for step in steps:
            copy = step.node.copy
            assert copy is not None
            if copy.on_host:
                continue
            late = self._fetching.get(step.node, now) + seconds
            if late < now:
                return None
            until = min(until or late, late)
            if copy.fetching is not None:
                continue
            if self._disk is None or copy.entry is None or now < copy.again:
                return None
            copy.slabs = copy.slabs or self._copies.room(copy.header.nbytes, {one.node for one in steps})
            if copy.slabs is None:
                return None
            copy.users += 1
            buffers = [buffer.numpy() for buffer in self._copies.host.buffers(copy.slabs, copy.header.nbytes)]
            self._fetching[step.node] = now
            copy.fetching = self._disk.read(copy.entry, buffers, copy.token_ids)
        return until

    def restore(self, steps: list[Step], start: int, capacity: int, parent: CachedSequence | None) -> CachedSequence:
        """A sequence restored from a chain in host memory; raises as ``Snapshots.restore`` does."""
        restoring = self._cache.snapshots.restore(self.links(steps), start, capacity, parent)
        copies = [step.node.copy for step in steps if step.node.copy is not None]
        parts = [(one.header, one.slabs or []) for one in copies]
        began, nbytes = time.monotonic(), sum(one.header.nbytes for one in copies)
        try:
            arrival = self._mover.up(restoring, parts)
        except BaseException:
            self._mover.finish()
            self._cache.release(restoring.sequence)
            raise
        for step, copy in zip(steps, copies, strict=True):
            tier = "disk" if copy.fetched else "host"
            self._counts.hit_tokens[tier] += (step.stop - step.node.first) * PAGE
            copy.fetched = False
        if parent is not None:
            self._counts.hit_tokens["device"] += steps[0].node.first * PAGE
        if arrival is None:
            self._speeds.host(nbytes, time.monotonic() - began)
            self._counts.restored(nbytes, time.monotonic() - began)
        else:
            restoring.sequence.pending_layers = arrival
            for copy in copies:
                copy.users += 1
            self.arriving.append((arrival, restoring, [step.node for step in steps], nbytes))
        return restoring.sequence

    def advance(self) -> None:
        """Handles what has arrived."""
        for one in [one for one in self.arriving if one[0].done]:
            self.arriving.remove(one)
            arrival, _, nodes, nbytes = one
            for node in nodes:
                self._copies.leave(node)
            self._speeds.host(nbytes, arrival.seconds)
            self._counts.restored(nbytes, arrival.seconds)
        for node in list(self._fetching):
            copy = node.copy
            assert copy is not None, "what uses a copy keeps it"
            if copy.fetching is not None and copy.fetching.done():
                self._fetched(node, copy, copy.fetching)

    def _fetched(self, node: Node, copy: Copy, done: Future[float]) -> None:
        copy.fetching = None
        del self._fetching[node]
        if not done.cancelled() and isinstance(done.exception(), OSError):
            copy.again = time.monotonic() + RETRY_SECONDS  # the disk tier has logged why
        elif done.cancelled() or done.exception() is not None:
            copy.entry = None
        else:
            copy.ready = copy.fetched = True
            self._speeds.disk(copy.header.nbytes, done.result())
        self._copies.leave(node)
