"""``Saves``: requests to save or restore a prompt by name, and requests that wait for snapshots of another server. All
three kinds wait for the disk.

No call blocks. The engine's thread checks the requests' progress between its steps, and the disk tier's threads access
the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.chains import FETCH_SECONDS, MAX_FETCH_SECONDS, Chains, Speeds
from shadowkv.prefix_cache.copies import Copies
from shadowkv.prefix_cache.disk.files import SnapshotGone
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.disk.names import Save
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.disk_reports import DiskReports
from shadowkv.prefix_cache.matches import Step
from shadowkv.prefix_cache.offload import Offload
from shadowkv.prefix_cache.protocol import Answer, NotDone, Saved, SaveError, WrittenByAnotherServer, settle
from shadowkv.prefix_cache.tree import Node

logger = logging.getLogger(__name__)

FAILED = "the tiers below the device have failed; the server's log says why"

LOOK_SECONDS = 0.02
"""Seconds between two searches for an expected file."""


class _Request(NamedTuple):
    """A request in progress.

    Attributes:
        progress: a generator that is advanced once a step until it returns the answer or an exception.
        failure: the answer if the tiers fail.
    """

    answer: Future[Any]
    progress: Generator[None, None, object]
    failure: object


class Saves:
    """Requests in progress. Only the engine's thread uses this class. A caller that has given up cancels its answer.

    Args:
        copies, reports: the copies of nodes, and the disk tier's reports.
        offload, chains: move copies to the disk and back.
        disk: the disk tier.
        speeds: measured speeds, from which ``expect`` computes how long to wait for another server.
    """

    def __init__(
        self,
        copies: Copies,
        reports: DiskReports,
        offload: Offload,
        chains: Chains,
        disk: DiskTier,
        speeds: Speeds,
    ) -> None:
        self._copies, self._reports, self._speeds = copies, reports, speeds
        self._offload, self._chains, self._disk = offload, chains, disk
        self._requests: list[_Request] = []

    @property
    def busy(self) -> bool:
        """Whether there are requests in progress."""
        return bool(self._requests)

    def save(self, name: str | None, pages: list[str], answer: Answer) -> None:
        """Starts to write the cached part of a prompt to the disk, and to save it under ``name`` unless ``name`` is
        None. ``pages`` are the hashes of the prompt's pages that can be reused."""
        along = list(self._copies.tree.along(pages))
        reached = max((end for _, end in along), default=0)
        progress = self._save(name, reached * PAGE, [node for node, end in along if end == reached])
        self._requests.append(_Request(answer, progress, NotDone(FAILED)))

    def restore(self, name: str, answer: Answer) -> None:
        """Starts to read the snapshots of a name to host memory."""
        self._requests.append(_Request(answer, self._restore(name, self._disk.kept(name)), NotDone(FAILED)))

    def expect(self, names: tuple[str, ...], tokens: int, answer: Future[bool]) -> None:
        """Starts to wait for a chain of snapshots with ``tokens`` tokens that another server writes. The request waits
        as long as computing the tokens would take, but at least ``FETCH_SECONDS`` and at most ``MAX_FETCH_SECONDS``.
        The answer is whether the prefix tree has the chain."""
        seconds = min(max(FETCH_SECONDS, self._speeds.computing_seconds(tokens)), MAX_FETCH_SECONDS)
        self._requests.append(_Request(answer, self._expect(names, time.monotonic() + seconds), failure=False))

    def advance(self) -> None:
        """Checks the progress of every request. Call it right after the tiers' own ``advance``."""
        if self._requests:
            self._reports.take()  # before ``_ended``, which must see the files of finished writes
            self._requests = [request for request in self._requests if not self._ended(request)]

    @staticmethod
    def _ended(request: _Request) -> bool:
        try:
            next(request.progress)
        except StopIteration as end:
            settle(request.answer, end.value)
            return True
        return request.answer.cancelled()

    def abandon(self) -> None:
        """Answers all requests with their failure, after the tiers have failed."""
        for request in self._requests:
            settle(request.answer, request.failure)
        self._requests = []

    def _save(self, name: str | None, tokens: int, nodes: list[Node]) -> Generator[None, None, Saved | SaveError]:
        """Returns the result once the files are written, and also the name unless it is None.

        Args:
            tokens: number of the prompt's tokens that were cached at the time of the request.
            nodes: the nodes that have the last of these tokens.
        """
        queued_again = set[Node]()
        while True:
            chain = next((chain for node in nodes if (chain := self._disk.chain(node.hashes[-1]))), None)
            if chain is not None:
                saved = Saved(tokens, sum(file.file_bytes for file in chain), tuple(file.name for file in chain))
                if name is None:
                    return saved
                keeping = self._disk.keep(name, tokens, chain)
                while not keeping.done():
                    yield
                if keeping.cancelled() or not isinstance(keeping.exception(), SnapshotGone):
                    return _failure(keeping, f"{name!r} cannot be written") or saved
                continue  # a file was removed; the next turn of the loop may write it again
            if (problem := self._disk.problem) is not None:
                return NotDone(f"the {tokens} cached tokens cannot be written to the disk: {problem}")
            if not any(self._reaches_disk(node, queued_again) for node in nodes):
                kind = WrittenByAnotherServer if any(self._is_anothers(node) for node in nodes) else NotDone
                return kind(
                    f"the {tokens} cached tokens could not be written: there is no room for them in host memory "
                    "(--kv-offload-gib) or, beside what names keep, on the disk (--kv-disk-gib), or the disk fails; "
                    "the server's log says more"
                )
            yield

    def _reaches_disk(self, node: Node, again: set[Node]) -> bool:
        """Whether a node and its ancestors are on the disk or on their way there. First queues the writes of those that
        are not, at most once for each node."""
        return all(self._node_reaches_disk(link, again) for link in [*reversed([*node.ancestors]), node])

    def _node_reaches_disk(self, node: Node, again: set[Node]) -> bool:
        copy = node.copy
        if self._is_there(node):
            return True
        if copy is None:
            return False
        if copy.writing is not None or (copy.users and not copy.ready):
            return True
        if node in again:
            return False
        again.add(node)
        self._offload.write(copy, evicted=True)
        return copy.writing is not None or self._is_there(node)

    def _is_there(self, node: Node) -> bool:
        file = self._disk.lookup(node.hashes[-1])
        return file is not None and file.uid == node.uid

    def _is_anothers(self, node: Node) -> bool:
        """Whether the disk has another server's snapshot for the tokens of a node or an ancestor."""
        return any(self._disk.lookup(link.hashes[-1]) and not self._is_there(link) for link in (node, *node.ancestors))

    def _restore(
        self, name: str, kept: Future[tuple[Save, list[FileHeader]]]
    ) -> Generator[None, None, Saved | SaveError]:
        """Returns the result once the files of the name's save are read. ``kept`` reads the save and its chain."""
        while not kept.done():
            yield
        if (failure := _failure(kept, f"{name!r} cannot be read")) is not None:
            return failure
        (save, chain), asked = kept.result(), False
        while True:
            copies = [copy for file in chain if (copy := self._copies.by_uid.get(file.uid)) is not None]
            if len(copies) == len(chain):
                if not asked:
                    asked = True
                    for copy in copies:
                        copy.retry_at = 0.0  # a request by name does not wait for the retry
                stops = [*(copy.node.first for copy in copies[1:]), save.tokens // PAGE]
                steps = [Step(copy, stop) for copy, stop in zip(copies, stops, strict=True)]
                if self._chains.fetch(steps, MAX_FETCH_SECONDS) == 0.0:
                    return Saved(save.tokens, sum(file.file_bytes for file in chain))
                if not any(copy.fetching is not None for copy in copies):
                    return NotDone(
                        f"what is saved as {name!r} could not be brought back: there is no room for it in host memory "
                        "(--kv-offload-gib), or its files cannot be read; the server's log says more"
                    )
            elif not self._reports.busy:
                return NotDone(f"what is saved as {name!r} cannot be read; the server's log says why")
            yield  # until the caller gives up

    def _expect(self, names: tuple[str, ...], until: float) -> Generator[None, None, bool]:
        """Returns whether the prefix tree has the snapshots, once it has them or they cannot come any more. Waits until
        ``until``, by ``time.monotonic``."""
        looking: Future[bool] | None = None
        complete, next_look = False, 0.0
        while True:
            now = time.monotonic()
            if looking is not None and looking.done():
                complete = not looking.cancelled() and looking.exception() is None and looking.result()
                looking, next_look = None, now + LOOK_SECONDS
            self._reports.take()  # includes the files that ``looking`` has found
            missing = [name for name in names if not self._is_known(name)]
            # All files exist and were read, but some are unusable, for example because they are of another model.
            useless = complete and not self._reports.busy
            if not missing or useless or now > until:
                return not missing
            if not complete and looking is None and now >= next_look:
                looking = self._disk.look(missing)
            yield

    def _is_known(self, name: str) -> bool:
        file = self._disk.lookup(name)
        return file is not None and file.uid in self._copies.by_uid


def _failure(done: Future[Any], what: str) -> SaveError | None:
    """Returns the error of a finished future; None if it has not failed."""
    if done.cancelled():
        return NotDone(f"{what}: the server is stopping")
    error = done.exception()
    if error is None or isinstance(error, SaveError):
        return error
    logger.warning("%s", what, exc_info=error)
    return NotDone(f"{what}: {(isinstance(error, OSError) and error.strerror) or error}")
