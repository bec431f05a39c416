"""``DiskReports``: processes the disk tier's events. Found files become nodes of the prefix tree, and removed files
leave it."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.prefix_cache.copies import Copies, pieces
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.page_hashes import PageHashes

logger = logging.getLogger(__name__)

OPENING_SECONDS = 5.0
"""Maximum time in seconds that requests wait after the start for the initial scan of the disk."""


class DiskReports:
    """Queues the disk tier's events and processes them on the engine's thread.

    Args:
        copies: copies of the prefix tree's nodes.
        form: the form that snapshots must share with the cache (``Snapshots.form``).

    Attributes:
        disk: the disk tier, set before reports are processed; None without one.
    """

    def __init__(self, copies: Copies, form: str) -> None:
        self._tree, self._copies, self._form = copies.tree, copies, form
        self.disk: DiskTier | None = None
        self._events: deque[tuple[str, FileHeader]] = deque()
        self._orphans: dict[str, list[tuple[FileHeader, Future[np.ndarray]]]] = {}
        self._named: deque[tuple[FileHeader, Future[np.ndarray]]] = deque()
        self._opened, self._opening_until = False, time.monotonic() + OPENING_SECONDS

    def report(self, kind: str, file: FileHeader) -> None:
        """Queues an event. The disk tier calls it on its own threads."""
        self._events.append((kind, file))

    @property
    def busy(self) -> bool:
        """Whether there are reports to process."""
        return bool(self._events or self._named)

    @property
    def opening(self) -> bool:
        """Whether requests should wait for the initial scan of the disk. They wait at most ``OPENING_SECONDS``."""
        if not self._opened and self.disk is not None:
            scanned = self.disk.wait_scanned(0)
            self.take()
            self._opened = (scanned and not self._named) or time.monotonic() > self._opening_until
        return self.disk is not None and not self._opened

    def take(self) -> None:
        """Processes queued events."""
        while self._events:
            kind, file = self._events.popleft()
            assert self.disk is not None
            if file.key != self.disk.key.digest:
                continue  # of another model, policy or number of ranks
            copy, stored = self._copies.by_uid.get(file.uid), kind in ("found", "stored")
            if copy is None:
                if stored:
                    self._named.append((file, self.disk.token_ids(file)))
            elif copy.node.hashes[-1] == file.name:  # else the file has fewer or more of the node's pages
                self._tree.changes += 1
                copy.file, copy.evicted = file if stored else None, kind == "evicted"
                if not stored and copy.slabs is None and not copy.users:
                    self._copies.drop(copy)
        while self._named and self._named[0][1].done():  # in the order in which the token ids were requested
            file, ids = self._named.popleft()
            if not ids.cancelled() and ids.exception() is None:
                self._plant_all(file, ids)

    def _plant_all(self, file: FileHeader, ids: Future[np.ndarray]) -> None:
        """Adds the node of a file, and the nodes of its descendants whose files were found earlier."""
        waiting = [(file, ids)]
        while waiting:
            file, ids = waiting.pop()
            if self._plant(file, ids):
                waiting += self._orphans.pop(file.uid, ())

    def _plant(self, file: FileHeader, ids: Future[np.ndarray]) -> bool:
        """Adds the node of a file. Another process wrote the file, or this server wrote it before a restart. Returns
        whether the node could be added."""
        if file.uid in self._copies.by_uid or file.start % PAGE or file.length % PAGE:
            return False
        behind = self._copies.by_uid.get(file.parent_uid) if file.parent else None
        if file.parent and behind is None:
            self._orphans.setdefault(file.parent_uid, []).append((file, ids))
            return False
        parent, first = None if behind is None else behind.node, file.start // PAGE
        if parent is not None and not parent.first < first <= parent.end:
            return False
        try:
            header = SnapshotHeader.from_plain(file.contents)
            parts = self._copies.parts(header)
        except ValueError as error:
            logger.warning("the snapshot %s is not served: %s", file.name, error)
            return False
        size = header.start, header.length, *pieces(header, parts)
        if size != (file.start, file.length, file.layers, file.layer_bytes) or header.form != self._form:
            logger.warning("the snapshot %s is not served: its header belongs to another snapshot", file.name)
            return False
        tokens = ids.result()
        hashes = list(
            PageHashes(parent.hashes[first - parent.first - 1] if parent else file.origin).extend_to(tokens.tolist())
        )
        if hashes[-1] != file.name:
            logger.warning("the snapshot %s is not served: its tokens do not match its name", file.name)
            return False
        node = self._tree.plant(parent, first, hashes, bool(header.segments), file.origin)
        node.uid = file.uid
        self._copies.add(node, header, tokens, file=file)
        return True
