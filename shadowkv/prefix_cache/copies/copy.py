"""Copies of nodes below the device: a snapshot each, in host memory, on disk or both; and room for them."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.prefix_cache.copies.host import HostTier
from shadowkv.prefix_cache.device.eviction import Eviction
from shadowkv.prefix_cache.device.tree import Node, PrefixTree
from shadowkv.prefix_cache.disk.head import Head
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.stats import TierCounts

RETRY_SECONDS = 30.0
"""After how long a file that could not be read is tried again."""


@dataclass(eq=False)
class Copy:
    """A snapshot of a node's pages, and what becomes of it.

    ::

        waits ── take_slabs ── is read from the device ── ready ──────┐
                                                                      on_host ── write ── end_write: on_host and entry
        entry ── fetch ─────── is read from the disk ──── end_fetch ──┘

    It leaves host memory by ``leave_host`` and the disk by ``removed``. Where it is in neither and nobody uses it, its
    node has no copy any more.

    Attributes:
        copies: those that it is among.
        node: whose pages it has.
        header: what it holds.
        token_ids: uint32 [length - start].
        slabs: in the host tier; None where it is not there.
        entry: in the disk tier; None where it is not there.
        ready: whether ``slabs`` hold its bytes, which may still be on their way from the device or the disk.
        users: how many read or write its slabs, or wait to.
        from_disk: whether it has come from the disk since its last use.
        evicted: whether the disk had it and has evicted it: it is not written there again.
        fetching: the read from the disk while it is in progress.
        again: when the disk may be tried next, by ``time.monotonic``: later where it could not be read.
        writing: the write to the disk while it is in progress.
    """

    copies: Copies = field(repr=False)
    node: Node
    header: SnapshotHeader
    token_ids: npt.NDArray[np.uint32]
    slabs: list[int] | None = None
    entry: Entry | None = None
    ready: bool = False
    users: int = 0
    from_disk: bool = False
    evicted: bool = False
    fetching: Future[float] | None = None
    again: float = 0.0
    writing: Future[bool] | None = None

    @property
    def parent(self) -> Copy | None:
        """The copy of what its node continues."""
        return None if self.node.parent is None else self.copies.of.get(self.node.parent)

    @property
    def on_host(self) -> bool:
        """Whether all its bytes are in host memory."""
        return self.ready and self.slabs is not None

    @property
    def usable(self) -> bool:
        """Whether it is there, or will be once requested."""
        return self.on_host or (self.entry is not None and time.monotonic() >= self.again)

    def use(self) -> None:
        """Records one more that reads or writes its slabs, or waits to."""
        self.users += 1

    def leave(self) -> None:
        """Records that a use is over."""
        self.copies.tree.changes += 1
        self.users -= 1
        if not self.users and not self.ready:
            if self.slabs is not None:
                self.copies.host.give(self.slabs)
                self.slabs = None
            if self.entry is None:
                self.copies.drop(self)

    def take_slabs(self, spare: set[Node]) -> bool:
        """Takes slabs for it, for which no copy of a node to ``spare`` is evicted; returns whether there were any."""
        self.slabs = self.copies.room(self.header.nbytes, spare)
        return self.slabs is not None

    def leave_host(self) -> None:
        """Leaves host memory; it must be there, and unused."""
        assert self.slabs is not None and not self.users
        self.copies.tree.changes += 1
        self.copies.host.give(self.slabs)
        self.slabs, self.ready = None, False
        self.copies.counts.host_evictions += 1
        if self.entry is None:
            self.copies.drop(self)

    def buffers(self) -> list[npt.NDArray[np.uint8]]:
        """Its slabs, as the disk tier takes them."""
        assert self.slabs is not None
        return [buffer.numpy() for buffer in self.copies.host.buffers(self.slabs, self.header.nbytes)]

    def can_be_written(self, evicted: bool) -> bool:
        """Whether it is only in host memory, and what it continues is on the disk or on its way there. One that the
        disk has ``evicted`` is written again only if so."""
        if not self.on_host or self.entry or self.writing or (self.evicted and not evicted):
            return False
        parent = self.parent
        return self.node.parent is None or (parent is not None and bool(parent.entry or parent.writing))

    def write(self, disk: DiskTier) -> bool:
        """Queues it for the disk, unless its tokens are there already; returns whether it is on its way."""
        node, header, parent = self.node, self.header, self.node.parent
        self.entry = disk.lookup(node.names[-1])
        if self.entry is not None:
            if self.entry.head.uid != node.uid:
                self.entry = None  # same tokens, computed elsewhere
            return False
        head = Head.new(
            disk.key,
            name=node.names[-1],
            origin=node.origin,
            start=header.start,
            length=header.length,
            layers=header.pieces[0],
            layer_bytes=header.pieces[1],
            header=json.loads(header.to_json()),
            parent=parent.names[-1] if parent else "",
            parent_uid=parent.uid if parent else "",
            uid=node.uid,
        )
        buffers = self.buffers()
        self.use()
        self.writing = disk.put(head, self.token_ids, buffers)
        return True

    def end_write(self) -> None:
        """Handles a write that is over; the disk tier reports what it has stored."""
        self.writing = None
        self.leave()

    def fetch(self, disk: DiskTier, entry: Entry, spare: set[Node]) -> bool:
        """Begins to read it from the disk; returns whether there is room for it, as ``take_slabs`` makes it."""
        if self.slabs is None and not self.take_slabs(spare):
            return False
        self.use()
        self.fetching = disk.read(entry, self.buffers(), self.token_ids)
        return True

    def end_fetch(self, done: Future[float]) -> float | None:
        """Handles a read that is over; returns its seconds, None where it has failed."""
        self.fetching, seconds = None, None
        if not done.cancelled() and isinstance(done.exception(), OSError):
            self.again = time.monotonic() + RETRY_SECONDS  # the disk tier has logged why
        elif done.cancelled() or done.exception() is not None:
            self.entry = None
        else:
            self.ready = self.from_disk = True
            seconds = done.result()
        self.leave()
        return seconds

    def found(self, entry: Entry) -> None:
        """Records that the disk has it."""
        self.entry, self.evicted = entry, False
        self.copies.tree.changes += 1

    def removed(self, evicted: bool) -> None:
        """Records that the disk has it no longer, or has ``evicted`` it."""
        self.entry, self.evicted = None, evicted
        self.copies.tree.changes += 1
        if self.slabs is None and not self.users:
            self.copies.drop(self)


class Copies:
    """Copies in host memory, on disk or on their way there.

    Args:
        tree: whose nodes have them.
        counts: of evictions, updated here.
        eviction: says which copies go first.

    Attributes:
        of: all of them, by their nodes.
        by_uid: the same, by the uid of their bytes.
    """

    def __init__(self, tree: PrefixTree, host: HostTier, counts: TierCounts, eviction: Eviction) -> None:
        self.host, self.tree, self.counts, self.eviction = host, tree, counts, eviction
        self.of: dict[Node, Copy] = {}
        self.by_uid: dict[str, Copy] = {}

    def add(
        self,
        node: Node,
        header: SnapshotHeader,
        token_ids: npt.NDArray[np.uint32],
        *,
        entry: Entry | None = None,
        users: int = 0,
    ) -> Copy:
        """A copy of a node that has none; see ``Copy``."""
        copy = Copy(self, node, header, token_ids, entry=entry, users=users)
        node.copied = True
        self.tree.changes += 1
        self.of[node] = self.by_uid[node.uid] = copy
        return copy

    def room(self, nbytes: int, spare: set[Node] | None = None) -> list[int] | None:
        """Slabs for a copy; unused copies of nodes that are not to ``spare`` are evicted, if that makes enough room."""
        slabs = self.host.take(nbytes)
        if slabs is not None or self.host.slabs_of(nbytes) > self.host.num_slabs:
            return slabs
        others = {
            node: len(copy.slabs or ())
            for node, copy in self.of.items()
            if copy.on_host and not copy.users and node not in (spare or ())
        }
        lacking = self.host.slabs_of(nbytes) - self.host.free_slabs
        if sum(others.values()) < lacking:
            return None
        for victim in self.eviction.order(others):
            if lacking <= 0:
                break
            self.of[victim].leave_host()
            lacking -= others[victim]
        return self.host.take(nbytes)

    def drop(self, copy: Copy) -> None:
        """Forgets a copy, which must be unused."""
        assert not copy.users
        self.tree.changes += 1
        if copy.slabs is not None:
            self.host.give(copy.slabs)
        copy.node.copied = False
        del self.of[copy.node]
        if self.by_uid.get(copy.node.uid) is copy:  # else a file of it has become a separate node
            del self.by_uid[copy.node.uid]
        self.tree.prune(copy.node)
