"""Copies nodes downwards: from the device to host memory, alongside its computing, and from there to the disk."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from shadowkv.cache.copies import Copy
from shadowkv.cache.disk import DiskTier
from shadowkv.cache.head import Head
from shadowkv.cache.kept_copies import KeptCopies
from shadowkv.cache.moving import Mover
from shadowkv.cache.stats import TierCounts
from shadowkv.cache.tree import Node
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.layers import Reading

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 0.001
"""Seconds between two polls for the last copies."""


@dataclass(eq=False)
class Job:
    """A copy on its way to the host."""

    node: Node
    copy: Copy
    reading: Reading
    moves: Iterator[int]


class Copying:
    """Copies to be made, in the order of the requests.

    Attributes:
        job: the one on its way to the host.
    """

    def __init__(
        self, cache: KVCache, copies: KeptCopies, mover: Mover, disk: DiskTier | None, counts: TierCounts
    ) -> None:
        self._cache, self._copies, self._mover, self._disk, self._counts = cache, copies, mover, disk, counts
        self._waiting: deque[tuple[Node, Copy, Reading]] = deque()
        self._writing: set[Node] = set()
        self._too_large = 0
        self.job: Job | None = None

    def store(self, node: Node, sequence: CachedSequence, token_ids: list[int]) -> None:
        """Has a node copied whose pages ``sequence`` all has; ``token_ids`` begin with the prompt's first."""
        if node.copy is not None or not self._copies.host.num_slabs or (node.parent and node.parent.copy is None):
            return
        start, stop = node.first * PAGE, node.end * PAGE
        try:
            reading = self._cache.snapshots.open_reading(sequence, start, stop)
        except (ValueError, torch.OutOfMemoryError) as error:
            logger.warning("a cached prompt is not copied to the host: %s", error)
            return
        copy = Copy(reading.header, np.asarray(token_ids[start:stop], np.uint32), users=1)
        self._copies.add(node, copy)
        self._copies.eviction.touch(node)
        self._waiting.append((node, copy, reading))

    def write(self, node: Node, evicted: bool = False) -> None:
        """Queues a copy that is only in host memory for the disk: it was refused, could not be written or was lost, but
        what it continues is there. One that the disk has ``evicted`` is written again only if so."""
        copy, parent = node.copy, node.parent and node.parent.copy
        if self._disk is None or copy is None or not copy.on_host or copy.entry or copy.writing:
            return
        if copy.evicted and not evicted:
            return
        if node.parent is None or (parent and (parent.entry or parent.writing)):
            self._write(self._disk, node, copy)

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has work to do or wait for."""
        return bool(self.job or self._waiting or self._writing)

    @property
    def futures(self) -> list[Future[bool]]:
        """The writes in progress."""
        return [node.copy.writing for node in self._writing if node.copy and node.copy.writing]

    def advance(self, most: int) -> None:
        """Launches copies of up to ``most`` bytes, and handles what has been written."""
        for node in list(self._writing):
            copy = node.copy
            assert copy is not None, "what uses a copy keeps it"
            if copy.writing is None or copy.writing.done():
                self._writing.discard(node)
                copy.writing = None
                self._copies.leave(node)
        while most > 0 and (self.job is not None or self._begin()):
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
                most -= moved

    def _begin(self) -> bool:
        """Starts to copy the next node that there is room for."""
        while self._waiting:
            node, copy, reading = self._waiting[0]
            if node.parent is None or node.parent.copy is not None:
                copy.slabs = self._copies.room(reading.header.nbytes, set(node.ancestors))
            self._waiting.popleft()
            if copy.slabs is None:
                nbytes, there = reading.header.nbytes, self._copies.host.total_bytes
                if nbytes > max(there, self._too_large):
                    self._too_large = nbytes
                    logger.warning(
                        "a cached prompt of %d bytes is not copied: --kv-offload-gib leaves room for %d",
                        nbytes,
                        there,
                    )
                reading.close()
                self._copies.leave(node)
                self._counts.refused += 1
                continue
            self.job = Job(node, copy, reading, self._mover.down(reading, copy.slabs))
            return True
        return False

    def _end(self, done: bool) -> None:
        job, self.job = self.job, None
        assert job is not None
        if not done:
            self._mover.finish()
        job.reading.close()
        job.copy.ready = done
        if done:
            self._counts.copied_bytes += job.copy.header.nbytes
            if self._disk is not None:
                self._write(self._disk, job.node, job.copy)
        else:
            self._counts.refused += 1
        self._copies.leave(job.node)

    def _write(self, disk: DiskTier, node: Node, copy: Copy) -> None:
        """Queues a copy for the disk."""
        header, parent = copy.header, node.parent
        assert copy.slabs is not None
        copy.entry = disk.lookup(node.names[-1])
        if copy.entry is not None:
            if copy.entry.head.uid != node.uid:
                copy.entry = None  # same tokens, computed elsewhere
            return
        head = Head.new(
            disk.key,
            name=node.names[-1],
            origin=node.origin,
            start=header.start,
            length=header.length,
            layers=header.runs[0],
            layer_bytes=header.runs[1],
            header=json.loads(header.to_json()),
            parent=parent.names[-1] if parent else "",
            parent_uid=parent.uid if parent else "",
            uid=node.uid,
        )
        buffers = [buffer.numpy() for buffer in self._copies.host.buffers(copy.slabs, header.nbytes)]
        copy.users += 1
        copy.writing = disk.put(head, copy.token_ids, buffers)
        self._writing.add(node)

    def finish(self, deadline: float) -> None:
        """Makes all copies that there is time for; nothing is read on the device afterwards."""
        try:
            while (self.job or self._waiting) and time.monotonic() < deadline:
                self.advance(2**62)
                if self.job is not None:
                    time.sleep(CLOSING_SECONDS)
            if self.job is not None:
                self._end(done=False)
        finally:
            while self._waiting:
                node, _, reading = self._waiting.popleft()
                reading.close()
                self._copies.leave(node)

    def abandon(self) -> None:
        """Drops all reads on the device, whatever state it is in."""
        readings = [reading for _, _, reading in self._waiting] + ([] if self.job is None else [self.job.reading])
        with suppress(RuntimeError):
            self._mover.finish()
        for reading in readings:
            reading.close()
