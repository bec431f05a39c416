"""``Offload``: copies nodes from the device to host memory while the device computes, and from there to the disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
import torch

from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.layers import Reading
from shadowkv.prefix_cache.copies import Copies, pieces
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.host import Mover, Place
from shadowkv.prefix_cache.tree import Copy, Node

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 0.001
"""Seconds between two polls for copies in progress, while the tiers are being closed."""


@dataclass(eq=False)
class Job:
    """A copy on its way to host memory. ``moves`` launches it layer by layer (``Mover.down``)."""

    copy: Copy
    reading: Reading
    moves: Iterator[int]


class Offload:
    """A queue of copies to make.

    Attributes:
        job: the copy on its way to host memory; None if there is none.
    """

    def __init__(self, copies: Copies, mover: Mover, disk: DiskTier | None) -> None:
        self._copies, self._mover, self._disk = copies, mover, disk
        self._waiting: deque[tuple[Copy, Reading]] = deque()
        self._writing: set[Copy] = set()
        self._too_large = 0
        self.job: Job | None = None

    def store(self, node: Node, sequence: CachedSequence, token_ids: list[int]) -> None:
        """Queues a node to be copied to host memory. ``sequence`` has all of the node's pages. ``token_ids`` are the
        ids of the whole prompt. Does nothing if the node has a copy, or if its parent has none."""
        if node.copy or not self._copies.host.num_slabs or (node.parent and not node.parent.copy):
            return
        start, stop = node.first * PAGE, node.end * PAGE
        try:
            reading = self._mover.open(sequence, start, stop)
        except OutOfBlocks:
            self._copies.counts.add(refused=1)
            return
        except (ValueError, torch.OutOfMemoryError) as error:
            logger.warning("a cached prompt is not copied to the host: %s", error)
            return
        copy = self._copies.add(node, reading.header, np.asarray(token_ids[start:stop], np.uint32), users=1)
        self._copies.eviction.touch(node)
        self._waiting.append((copy, reading))

    def write(self, copy: Copy, evicted: bool = False) -> None:
        """Queues a copy to be written to the disk again, if ``Copy.can_be_written(evicted)``. Use it for copies that
        the disk tier refused, failed to write, or lost."""
        if self._disk is not None and copy.can_be_written(evicted):
            self._write(self._disk, copy)

    def _write(self, disk: DiskTier, copy: Copy) -> None:
        """Queues a copy to be written to the disk, unless the disk has a snapshot of its tokens."""
        node, header, parent = copy.node, copy.header, copy.node.parent
        there = disk.lookup(node.hashes[-1])
        if there is not None:
            # With another uid, the snapshot is of the same tokens, but was computed by another process.
            copy.file = there if there.uid == node.uid else None
            return
        layers, layer_bytes = pieces(header, copy.parts)
        file = FileHeader(
            name=node.hashes[-1],
            origin=node.origin,
            parent=parent.hashes[-1] if parent else "",
            uid=node.uid,
            parent_uid=parent.uid if parent else "",
            start=header.start,
            length=header.length,
            layers=layers,
            layer_bytes=layer_bytes,
            contents=asdict(header),
            key=disk.key.digest,
            facts=disk.key.facts,
            created=int(time.time()),
        )
        copy.users += 1
        copy.writing = disk.put(file, copy.token_ids, self._copies.buffers(copy))
        self._writing.add(copy)

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has work to do or to wait for."""
        return bool(self.job or self._waiting or self._writing)

    @property
    def futures(self) -> list[Future[bool]]:
        """The writes in progress."""
        return [copy.writing for copy in self._writing if copy.writing]

    def advance(self, limit: int) -> None:
        """Launches copies of up to ``limit`` bytes, and handles finished writes."""
        for copy in list(self._writing):
            if copy.writing is None or copy.writing.done():
                self._writing.discard(copy)
                copy.writing = None  # the disk tier reports what it has stored
                self._copies.leave(copy)
        while limit > 0 and (self.job is not None or self._begin()):
            assert self.job is not None
            try:
                moved = next(self.job.moves, None)
            except torch.OutOfMemoryError as error:
                logger.warning("a cached prompt is not copied to the host: %s", error)
                self._end(done=False)
                continue
            if moved is None:
                self._end(done=True)
            elif not moved:
                return
            else:
                limit -= moved

    def _begin(self) -> bool:
        """Starts to copy the next node for which there is room. Returns whether there is one."""
        while self._waiting:
            copy, reading = self._waiting[0]
            node = copy.node
            if node.parent is None or node.parent.copy is not None:
                copy.slabs = self._copies.room(copy.nbytes, set(node.ancestors))
            self._waiting.popleft()
            if copy.slabs is None:
                self._refuse(copy, reading)
                continue
            self.job = Job(copy, reading, self._mover.down(reading, Place(copy.slabs, copy.parts)))
            return True
        return False

    def _refuse(self, copy: Copy, reading: Reading) -> None:
        """Gives up a copy for which there is no room."""
        nbytes, total = copy.nbytes, self._copies.host.total_bytes
        if nbytes > max(total, self._too_large):
            self._too_large = nbytes
            logger.warning(
                "a cached prompt of %d bytes is not copied: --kv-offload-gib leaves room for %d", nbytes, total
            )
        self._mover.close(reading)
        self._copies.leave(copy)
        self._copies.counts.add(refused=1)

    def _end(self, done: bool) -> None:
        job, self.job = self.job, None
        assert job is not None
        if not done:
            self._mover.finish()
        self._mover.close(job.reading)
        job.copy.ready = done
        if done:
            self._copies.counts.add(copied_bytes=job.copy.nbytes)
            if self._disk is not None:
                self._write(self._disk, job.copy)
        else:
            self._copies.counts.add(refused=1)
        self._copies.leave(job.copy)

    def finish(self, deadline: float) -> None:
        """Makes copies until ``deadline``, and gives up the rest. Nothing is read from the device afterwards."""
        try:
            while (self.job or self._waiting) and time.monotonic() < deadline:
                self.advance(2**62)
                if self.job is not None:
                    time.sleep(CLOSING_SECONDS)
            if self.job is not None:
                self._end(done=False)
        finally:
            while self._waiting:
                copy, reading = self._waiting.popleft()
                self._mover.close(reading)
                self._copies.leave(copy)

    def abandon(self) -> None:
        """Gives up all copies from the device, even if the device has failed."""
        readings = [reading for _, reading in self._waiting] + ([] if self.job is None else [self.job.reading])
        with suppress(RuntimeError):
            self._mover.finish()
        for reading in readings:
            self._mover.close(reading)
