"""The tiers below the device: nodes of the prefix tree as snapshots in host memory and on disk.

A node is copied to the host as soon as its pages are computed, beside what the device does, and from there to the disk:
what is evicted from the device has a copy already. It comes back the same way: from disk as soon as a request that
needs it arrives, from host memory when the request is admitted, layer by layer ahead of its prefill. Everything here is
called on the engine's thread, but for what the disk tier reports.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shadowkv.cache.copies import Copy
from shadowkv.cache.disk import DiskTier
from shadowkv.cache.head import Head
from shadowkv.cache.host import HostTier
from shadowkv.cache.index import Entry
from shadowkv.cache.moving import Mover, StreamArrival
from shadowkv.cache.pages import PageNames
from shadowkv.cache.speeds import Speeds
from shadowkv.cache.stats import TierCounts, TierStats
from shadowkv.cache.tree import Node, PrefixTree
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.outline import Link
from shadowkv.kvcache.reading import Reading
from shadowkv.kvcache.restoring import Restoring
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.snapshot import SnapshotHeader
from shadowkv.kvcache.spec import PAGE

logger = logging.getLogger(__name__)

FETCH_SECONDS = 1.0
"""How long requests wait at the least for what is read from the disk: one that hangs is not waited for."""

OPENING_SECONDS = 5.0
"""How long requests wait, after the start, to know what the disk has of them."""

CLOSING_SECONDS = 0.001
"""Between two looks at the last copies."""

STEP_BYTES = 2**28
"""Launched at a time while others decode, at the most: 5 ms of a bus of 50 GB/s."""


@dataclass(frozen=True)
class Step:
    """A node of a chain, and the page up to which it is used."""

    node: Node
    stop: int


@dataclass(eq=False)
class _Job:
    """A copy that is on its way to the host."""

    node: Node
    copy: Copy
    reading: Reading
    moves: Iterator[int]


class LowerTiers:
    """Copies of a tree's nodes.

    Args:
        tree: whose nodes are copied; nodes of snapshots on disk are added to it.
        host: may be so small that it only holds what is on its way from and to the disk.
        disk: makes the disk tier; None without one.
        counts, speeds: to add to.

    Attributes:
        disk: the disk tier, if there is one.
    """

    def __init__(
        self,
        cache: KVCache,
        tree: PrefixTree,
        host: HostTier,
        disk: Callable[[Callable[[str, Entry], None]], DiskTier] | None,
        counts: TierCounts,
        speeds: Speeds,
    ) -> None:
        self._cache, self._tree, self._host = cache, tree, host
        self._mover = Mover(host, cache.device)
        self._clock = itertools.count(1)
        self._waiting: deque[tuple[Node, Copy, Reading]] = deque()
        self._job: _Job | None = None
        self._copies: set[Node] = set()
        self._arriving: list[tuple[StreamArrival, Restoring, list[Node], int]] = []
        self._moving: set[Node] = set()
        self._by_uid: dict[str, Node] = {}
        self._asked: dict[Node, float] = {}
        self._events: deque[tuple[str, Entry]] = deque()
        self._orphans: dict[str, list[tuple[Entry, Future[np.ndarray]]]] = {}
        self._named: deque[tuple[Entry, Future[np.ndarray]]] = deque()
        self.speeds, self.counts = speeds, counts
        self.disk = None if disk is None else disk(self._report)
        self._opened, self._opening_until = self.disk is None, time.monotonic() + OPENING_SECONDS

    # -- down ------------------------------------------------------------------------------------------------------

    def store(self, node: Node, sequence: Sequence, token_ids: list[int]) -> None:
        """Has a node copied that ``sequence`` has all pages of; ``token_ids`` begin with the prompt's first."""
        if node.copy is not None or not self._host.num_slabs or (node.parent and node.parent.copy is None):
            return
        start, stop = node.first * PAGE, node.end * PAGE
        try:
            reading = self._cache.open_reading(sequence, start, tail=False)
        except (ValueError, torch.OutOfMemoryError) as error:
            logger.warning("a cached prompt is not copied to the host: %s", error)
            return
        if reading.header.length != stop:
            reading.close()
            return
        node.copy = Copy(reading.header, np.asarray(token_ids[start:stop], np.uint32))
        self._copies.add(node)
        self._by_uid[node.uid] = node
        self._touch(node)
        self._waiting.append((node, node.copy, reading))

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has something to do, or to wait for."""
        return bool(self._job or self._waiting or self._arriving or self._moving or self._events or self._named)

    def advance(self, most: int = STEP_BYTES) -> None:
        """Launches copies of up to ``most`` bytes, and sees to what has arrived."""
        self._take_events()
        self._see_arrivals()
        while most > 0 and (self._job is not None or self._begin()):
            assert self._job is not None
            try:
                moved = next(self._job.moves, None)
            except torch.OutOfMemoryError as error:
                logger.warning("a cached prompt is not copied to the host: %s", error)
                self._end(done=False)
                continue
            if moved is None:
                self._end(done=True)
            elif not moved:
                return
            else:
                most -= moved

    def _begin(self) -> bool:
        """Starts to copy the next node that there is room for."""
        while self._waiting:
            node, copy, reading = self._waiting[0]
            copy.slabs = self._room(reading.header.nbytes)
            self._waiting.popleft()
            if copy.slabs is None:
                reading.close()
                self._drop(node)
                self.counts.refused += 1
                continue
            copy.users += 1
            self._job = _Job(node, copy, reading, self._mover.down(reading, copy.slabs))
            return True
        return False

    def _end(self, done: bool) -> None:
        job, self._job = self._job, None
        assert job is not None
        if not done:
            self._mover.finish()
        job.reading.close()
        job.copy.ready = done
        if done:
            self.counts.copied_bytes += job.copy.header.nbytes
            if self.disk is not None:
                self._write(self.disk, job.node, job.copy)
        else:
            self.counts.refused += 1
        self._leave(job.node)

    def _write(self, disk: DiskTier, node: Node, copy: Copy) -> None:
        """Queues a copy for the disk."""
        header, parent = copy.header, node.parent
        assert copy.slabs is not None
        copy.entry = disk.lookup(node.names[-1])
        if copy.entry is not None:
            if copy.entry.head.uid != node.uid:
                copy.entry = None  # of the same tokens, computed elsewhere
            return
        head = Head.new(
            disk.key,
            name=node.names[-1],
            origin=node.origin,
            start=header.start,
            length=header.length,
            layers=header.num_layers,
            layer_bytes=header.layer_bytes,
            header=json.loads(header.to_json()),
            parent=parent.names[-1] if parent else "",
            parent_uid=parent.uid if parent else "",
            uid=node.uid,
        )
        buffers = [buffer.numpy() for buffer in self._host.buffers(copy.slabs, header.nbytes)]
        copy.users += 1
        copy.writing = disk.put(head, copy.token_ids, buffers)
        self._moving.add(node)

    # -- up --------------------------------------------------------------------------------------------------------

    def chain(self, node: Node, stop: int) -> tuple[list[Step], Sequence | None] | None:
        """What has to be restored for the pages of ``node`` up to ``stop``, in order, and the sequence on the device
        that has all before it; None where something is missing."""
        self._take_events()
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
                if held >= stop and self._cache.fork_point(sequence, stop * PAGE) == stop * PAGE:
                    return steps, sequence
        return None

    @property
    def opening(self) -> bool:
        """Whether what the disk had at the start is still being found out; that is waited for, but not for long."""
        if not self._opened:
            assert self.disk is not None
            scanned = self.disk.wait_scanned(0)
            self._take_events()
            self._opened = (scanned and not self._named) or time.monotonic() > self._opening_until
        return not self._opened

    def links(self, steps: Items[Step]) -> list[Link]:
        """A chain as the cache takes it."""
        return [Link(step.node.copy.header, step.stop * PAGE) for step in steps if step.node.copy is not None]

    def seconds(self, steps: list[Step]) -> float:
        """What restoring a chain takes, by what it has taken."""
        copies = [step.node.copy for step in steps if step.node.copy is not None]
        on_disk = sum(copy.header.nbytes for copy in copies if not copy.on_host)
        return self.speeds.host_seconds(sum(copy.header.nbytes for copy in copies)) + self.speeds.disk_seconds(on_disk)

    def fetch(self, steps: list[Step], patience: float) -> bool | None:
        """Begins to bring a chain to host memory, as far as it is not there; returns whether it is, None where there is
        no room for it or the disk takes more seconds than ``patience`` and ``FETCH_SECONDS``."""
        there, since = True, time.monotonic() - max(FETCH_SECONDS, patience)
        for step in steps:
            copy = step.node.copy
            assert copy is not None
            self._touch(step.node)
            if copy.on_host:
                continue
            there = False
            if copy.fetching is not None:
                if self._asked[step.node] < since:
                    return None
                continue
            if self.disk is None or copy.entry is None:
                return None
            copy.slabs = copy.slabs or self._room(copy.header.nbytes, {one.node for one in steps})
            if copy.slabs is None:
                return None
            copy.users += 1
            buffers = [buffer.numpy() for buffer in self._host.buffers(copy.slabs, copy.header.nbytes)]
            self._asked[step.node] = time.monotonic()
            copy.fetching = self.disk.read(copy.entry, buffers, copy.token_ids)
            self._moving.add(step.node)
        return there

    def restore(self, steps: list[Step], start: int, capacity: int, parent: Sequence | None) -> Sequence:
        """A sequence of a chain in host memory; raises as ``KVCache.restore``."""
        restoring = self._cache.restore(self.links(steps), start, capacity, parent)
        copies = [step.node.copy for step in steps if step.node.copy is not None]
        parts = [(one.header.num_layers, one.header.layer_bytes, one.slabs or []) for one in copies]
        began, nbytes = time.monotonic(), sum(one.header.nbytes for one in copies)
        try:
            arrival = self._mover.up(restoring, parts)
        except BaseException:
            self._mover.finish()
            self._cache.release(restoring.sequence)
            raise
        for step, copy in zip(steps, copies, strict=True):
            tier = "disk" if copy.fetched else "host"
            self.counts.hit_tokens[tier] += (step.stop - step.node.first) * PAGE
            copy.fetched = False
        if parent is not None:
            self.counts.hit_tokens["device"] += steps[0].node.first * PAGE
        if arrival is None:
            self.speeds.host(nbytes, time.monotonic() - began)
            self.counts.restored(nbytes, time.monotonic() - began)
        else:
            restoring.sequence.arrival = arrival
            for copy in copies:
                copy.users += 1
            self._arriving.append((arrival, restoring, [step.node for step in steps], nbytes))
        return restoring.sequence

    def _see_arrivals(self) -> None:
        for one in [one for one in self._arriving if one[0].done]:
            self._arriving.remove(one)
            arrival, _, nodes, nbytes = one
            for node in nodes:
                self._leave(node)
            self.speeds.host(nbytes, arrival.seconds)
            self.counts.restored(nbytes, arrival.seconds)
        for node in list(self._moving):
            copy = node.copy
            assert copy is not None, "what uses a copy keeps it"
            if copy.fetching is not None and copy.fetching.done():
                self._moving.discard(node)
                self._fetched(node, copy, copy.fetching)
            elif copy.writing is not None and copy.writing.done():
                self._moving.discard(node)
                copy.writing = None
                self._leave(node)

    def _fetched(self, node: Node, copy: Copy, done: Future[None]) -> None:
        copy.fetching, seconds = None, time.monotonic() - self._asked.pop(node)
        if done.cancelled() or done.exception() is not None:
            copy.entry = None  # the disk tier has said why
        else:
            copy.ready = copy.fetched = True
            self.speeds.disk(copy.header.nbytes, seconds)
        self._leave(node)

    def wait(self, seconds: float) -> None:
        """Waits for what is on its way, so long at the most."""
        copies = [node.copy for node in self._moving if node.copy]
        futures: list[Future[Any]] = [x for one in copies for x in (one.fetching, one.writing) if x is not None]
        if futures:
            wait(futures, seconds, FIRST_COMPLETED)
        elif self.busy or not self._opened:
            time.sleep(seconds)

    # -- what is there ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, TierStats]:
        """What each tier has and has done; may be asked for on any thread."""
        host, counts = self._host, self.counts
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
            )
        return tiers

    def _room(self, nbytes: int, spare: set[Node] | None = None) -> list[int] | None:
        """Slabs for a copy; others make room, least recently used first."""
        if self._host.slabs_of(nbytes) > self._host.num_slabs:
            return None
        while (slabs := self._host.take(nbytes)) is None:
            old = [
                node
                for node in self._copies
                if node.copy and node.copy.on_host and not node.copy.users and node not in (spare or ())
            ]
            if not old:
                return None
            victim = min(old, key=lambda node: node.copy.used if node.copy else 0)
            self._leave_host(victim)
        return slabs

    def _leave_host(self, node: Node) -> None:
        copy = node.copy
        assert copy is not None and copy.slabs is not None and not copy.users
        self._host.give(copy.slabs)
        copy.slabs, copy.ready = None, False
        self.counts.host_evictions += 1
        if copy.entry is None:
            self._drop(node)

    def _leave(self, node: Node) -> None:
        """Notes that a use of a node's copy is over."""
        copy = node.copy
        assert copy is not None
        copy.users -= 1
        if not copy.users and not copy.ready:
            if copy.slabs is not None:
                self._host.give(copy.slabs)
                copy.slabs = None
            if copy.entry is None:
                self._drop(node)

    def _drop(self, node: Node) -> None:
        """Forgets a node's copy, which nobody uses."""
        copy = node.copy
        assert copy is not None and not copy.users
        if copy.slabs is not None:
            self._host.give(copy.slabs)
        node.copy = None
        self._copies.discard(node)
        del self._by_uid[node.uid]
        self._tree.prune(node)

    def _touch(self, node: Node | None) -> None:
        """Notes a use of a node's copy and of all that it continues: these later, so that they stay longer."""
        while node is not None:
            if node.copy is not None:
                node.copy.used = next(self._clock)
            node = node.parent

    # -- what the disk says ----------------------------------------------------------------------------------------

    def _report(self, kind: str, entry: Entry) -> None:
        """Told by the disk tier, on its threads."""
        self._events.append((kind, entry))

    def _take_events(self) -> None:
        while self._events:
            kind, entry = self._events.popleft()
            assert self.disk is not None
            if entry.head.key != self.disk.key.digest:
                continue  # another model's
            node = self._by_uid.get(entry.head.uid)
            if kind in ("found", "stored"):
                if node is None:
                    self._named.append((entry, self.disk.token_ids(entry)))
                elif node.copy is not None:
                    node.copy.entry = entry
            elif node is not None and node.copy is not None:
                node.copy.entry = None
                if node.copy.slabs is None and not node.copy.users:
                    self._drop(node)
        while self._named and self._named[0][1].done():  # in the order in which they were asked for
            entry, ids = self._named.popleft()
            if not ids.cancelled() and ids.exception() is None:
                self._plant(entry, ids)

    def _plant(self, entry: Entry, ids: Future[np.ndarray]) -> None:
        """Adds the node of a file that some other process has written, or this one before it was started anew."""
        head = entry.head
        if head.uid in self._by_uid or head.start % PAGE or head.length % PAGE:
            return
        parent = self._by_uid.get(head.parent_uid) if head.parent else None
        if head.parent and parent is None:
            self._orphans.setdefault(head.parent_uid, []).append((entry, ids))
            return
        first = head.start // PAGE
        if parent is not None and not parent.first < first <= parent.end:
            return
        try:
            header = SnapshotHeader.from_json(json.dumps(dict(head.header)))
        except ValueError as error:
            logger.warning("the snapshot %s is not served: %s", entry.name, error)
            return
        size = header.start, header.length, header.num_layers, header.layer_bytes
        if size != (head.start, head.length, head.layers, head.layer_bytes) or header.form != self._cache.form:
            logger.warning("the snapshot %s is not served: its header is of another", entry.name)
            return
        tokens = ids.result()
        names = list(
            PageNames(parent.names[first - parent.first - 1] if parent else head.origin).extend_to(tokens.tolist())
        )
        if names[-1] != entry.name:
            logger.warning("the snapshot %s is not served: it has not the tokens of its name", entry.name)
            return
        node = self._tree.plant(parent, first, names, bool(header.segments), head.origin)
        node.uid, node.copy = head.uid, Copy(header, tokens, entry=entry)
        self._copies.add(node)
        self._by_uid[node.uid] = node
        for waiting in self._orphans.pop(node.uid, ()):
            self._plant(*waiting)

    def abandon(self) -> None:
        """Lets go of all that it reads on the device, whatever state it is in; nothing of it is used any more."""
        readings = [reading for _, _, reading in self._waiting] + ([] if self._job is None else [self._job.reading])
        with suppress(Exception):
            self._mover.finish()
        for reading in readings:
            reading.close()
        if self.disk is not None:
            self.disk.close(0.0)

    def close(self, seconds: float = 10.0) -> None:
        """Ends: copies on their way to the disk are written, as far as that takes no longer."""
        deadline = time.monotonic() + seconds
        try:
            while (self._job or self._waiting) and time.monotonic() < deadline:
                self.advance()
                if self._job is not None:
                    time.sleep(CLOSING_SECONDS)
            if self._job is not None:
                self._end(done=False)
        finally:
            while self._waiting:
                node, _, reading = self._waiting.popleft()
                reading.close()
                self._drop(node)
            if self.disk is not None:
                self.disk.close(max(0.1, deadline - time.monotonic()))
