"""What the disk tier reports: files that are found become nodes of the prefix tree, and what is gone leaves it."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.prefix_cache.copies.copy import Copies
from shadowkv.prefix_cache.device.tree import PrefixTree
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.page_names import PageNames

logger = logging.getLogger(__name__)

OPENING_SECONDS = 5.0
"""How long requests wait after the start to learn what the disk has of them."""


class DiskReports:
    """Reports of the disk tier, processed on the engine's thread.

    Args:
        form: what snapshots and the cache must have in common.

    Attributes:
        disk: to be set before reports are processed; None without one.
    """

    def __init__(self, tree: PrefixTree, copies: Copies, form: str) -> None:
        self._tree, self._copies, self._form = tree, copies, form
        self.disk: DiskTier | None = None
        self._events: deque[tuple[str, Entry]] = deque()
        self._orphans: dict[str, list[tuple[Entry, Future[np.ndarray]]]] = {}
        self._named: deque[tuple[Entry, Future[np.ndarray]]] = deque()
        self._opened, self._opening_until = False, time.monotonic() + OPENING_SECONDS

    def report(self, kind: str, entry: Entry) -> None:
        """Called by the disk tier, on its threads."""
        self._events.append((kind, entry))

    @property
    def busy(self) -> bool:
        """Whether there are reports to process."""
        return bool(self._events or self._named)

    @property
    def opening(self) -> bool:
        """Whether the initial scan of the disk is still running, which is waited for, but not for long."""
        if not self._opened and self.disk is not None:
            scanned = self.disk.wait_scanned(0)
            self.take()
            self._opened = (scanned and not self._named) or time.monotonic() > self._opening_until
        return self.disk is not None and not self._opened

    def take(self) -> None:
        """Processes what has been reported."""
        while self._events:
            kind, entry = self._events.popleft()
            assert self.disk is not None
            if entry.head.key != self.disk.key.digest:
                continue  # another model's
            copy, stored = self._copies.by_uid.get(entry.head.uid), kind in ("found", "stored")
            if copy is None:
                if stored:
                    self._named.append((entry, self.disk.token_ids(entry)))
            elif copy.node.names[-1] == entry.name:  # else of fewer or more of its pages
                if stored:
                    copy.found(entry)
                else:
                    copy.removed(evicted=kind == "evicted")
        while self._named and self._named[0][1].done():  # in the order in which they were requested
            entry, ids = self._named.popleft()
            if not ids.cancelled() and ids.exception() is None:
                self._plant_all(entry, ids)

    def _plant_all(self, entry: Entry, ids: Future[np.ndarray]) -> None:
        """Adds the node of a file, and those of all that continues it and was found before it."""
        waiting = [(entry, ids)]
        while waiting:
            entry, ids = waiting.pop()
            if self._plant(entry, ids):
                waiting += self._orphans.pop(entry.head.uid, ())

    def _plant(self, entry: Entry, ids: Future[np.ndarray]) -> bool:
        """Adds the node of a file that another process wrote, or this server before a restart; returns whether that was
        possible."""
        head = entry.head
        if head.uid in self._copies.by_uid or head.start % PAGE or head.length % PAGE:
            return False
        behind = self._copies.by_uid.get(head.parent_uid) if head.parent else None
        if head.parent and behind is None:
            self._orphans.setdefault(head.parent_uid, []).append((entry, ids))
            return False
        parent, first = None if behind is None else behind.node, head.start // PAGE
        if parent is not None and not parent.first < first <= parent.end:
            return False
        try:
            header = SnapshotHeader.from_json(json.dumps(dict(head.header)))
        except ValueError as error:
            logger.warning("the snapshot %s is not served: %s", entry.name, error)
            return False
        size = header.start, header.length, *header.pieces
        if size != (head.start, head.length, head.layers, head.layer_bytes) or header.form != self._form:
            logger.warning("the snapshot %s is not served: its header is of another", entry.name)
            return False
        tokens = ids.result()
        names = list(
            PageNames(parent.names[first - parent.first - 1] if parent else head.origin).extend_to(tokens.tolist())
        )
        if names[-1] != entry.name:
            logger.warning("the snapshot %s is not served: it has not the tokens of its name", entry.name)
            return False
        node = self._tree.plant(parent, first, names, bool(header.segments), head.origin)
        node.uid = head.uid
        self._copies.add(node, header, tokens, entry=entry)
        return True
