"""Copies of a node's pages below the device: one snapshot, in host memory, on disk or both."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shadowkv.cache.index import Entry
from shadowkv.kvcache.snapshots.header import SnapshotHeader


@dataclass(eq=False)
class Copy:
    """A snapshot of a node's pages.

    Attributes:
        header: what it holds.
        token_ids: uint32 [length - start].
        slabs: in the host tier; None where it is not there.
        entry: in the disk tier; None where it is not there.
        ready: whether ``slabs`` hold its bytes, which may still be on their way from the device or the disk.
        users: how many read or write its slabs, or wait to.
        fetched: whether it has come from the disk since its last use.
        evicted: whether the disk had it and has evicted it: it is not written there again.
        fetching: the read from the disk while it is in progress.
        again: when the disk may be tried next, by ``time.monotonic``: later where it could not be read.
        writing: the write to the disk while it is in progress.
    """

    header: SnapshotHeader
    token_ids: npt.NDArray[np.uint32]
    slabs: list[int] | None = None
    entry: Entry | None = None
    ready: bool = False
    users: int = 0
    fetched: bool = False
    evicted: bool = False
    fetching: Future[float] | None = None
    again: float = 0.0
    writing: Future[bool] | None = None

    @property
    def on_host(self) -> bool:
        """Whether all its bytes are in host memory."""
        return self.ready and self.slabs is not None

    @property
    def usable(self) -> bool:
        """Whether it is there, or will be once requested."""
        return self.on_host or (self.entry is not None and time.monotonic() >= self.again)
