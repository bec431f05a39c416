"""Snapshots that another server was asked to write: waited for until the prefix tree has them, as long as that pays.

Nothing here blocks: the engine's thread polls between its steps, and files are looked for on a disk thread.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from shadowkv.prefix_cache.copies.chains import FETCH_SECONDS, MAX_FETCH_SECONDS
from shadowkv.prefix_cache.copies.copy import Copies
from shadowkv.prefix_cache.copies.disk_reports import DiskReports
from shadowkv.prefix_cache.copies.speeds import Speeds
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.protocol import settle

LOOK_SECONDS = 0.02
"""Seconds between two looks for a file that was not there yet."""


@dataclass(eq=False)
class _Awaited:
    """A chain of snapshots that a request is waiting for.

    Attributes:
        until: when to stop waiting, by ``time.monotonic``.
        looking: the search for those that are not known, repeated at ``next_look`` if they were not there.
    """

    names: tuple[str, ...]
    until: float
    answer: Future[bool]
    looking: Future[bool] | None = None
    next_look: float = 0.0


class Handovers:
    """The chains being waited for; to be used on the engine's thread.

    Args:
        copies, reports: what the tree has.
        disk: where the snapshots arrive.
        speeds: how long computing a prompt takes, which limits every wait.
    """

    def __init__(self, copies: Copies, reports: DiskReports, disk: DiskTier, speeds: Speeds) -> None:
        self._copies, self._reports, self._disk, self._speeds = copies, reports, disk, speeds
        self._awaited: list[_Awaited] = []

    @property
    def busy(self) -> bool:
        """Whether anything is being waited for."""
        return bool(self._awaited)

    def expect(self, names: tuple[str, ...], tokens: int, answer: Future[bool]) -> None:
        """Waits for a chain of snapshots of ``tokens`` in all; the answer says whether they are there. A caller that
        cancels it has given up."""
        seconds = min(max(FETCH_SECONDS, self._speeds.computing_seconds(tokens)), MAX_FETCH_SECONDS)
        self._awaited.append(_Awaited(names, time.monotonic() + seconds, answer))

    def advance(self) -> None:
        """Checks the progress of every wait."""
        self._awaited = [awaited for awaited in self._awaited if not self._ended(awaited)]

    def _ended(self, awaited: _Awaited) -> bool:
        if awaited.answer.cancelled():
            return True
        now, complete = time.monotonic(), False
        if awaited.looking is not None and awaited.looking.done():
            complete = (
                not awaited.looking.cancelled() and awaited.looking.exception() is None and awaited.looking.result()
            )
            awaited.looking, awaited.next_look = (awaited.looking if complete else None), now + LOOK_SECONDS
        self._reports.take()  # including what has just been found
        missing = [name for name in awaited.names if not self._is_there(name)]
        # All files are there and read, but some are unusable: from another model, for example.
        useless = complete and not self._reports.busy
        if not missing or useless or now > awaited.until:
            settle(awaited.answer, not missing)
            return True
        if awaited.looking is None and now >= awaited.next_look:
            awaited.looking = self._disk.look(missing)
        return False

    def _is_there(self, name: str) -> bool:
        entry = self._disk.lookup(name)
        return entry is not None and entry.head.uid in self._copies.by_uid

    def abandon(self) -> None:
        """Answers all that are still waiting: nothing will arrive any more."""
        for awaited in self._awaited:
            settle(awaited.answer, False)
        self._awaited = []
