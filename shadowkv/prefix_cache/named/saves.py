"""Prompts saved and restored by name: requests that wait until the prompt is on the disk or back in host memory.

Nothing here blocks: the engine's thread polls between its steps, and disk work is done on the disk's threads.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.copies.chains import MAX_FETCH_SECONDS, Chains
from shadowkv.prefix_cache.copies.copy import Copies
from shadowkv.prefix_cache.copies.disk_reports import DiskReports
from shadowkv.prefix_cache.copies.offload import Offload
from shadowkv.prefix_cache.device.matches import Step
from shadowkv.prefix_cache.device.tree import Node, PrefixTree
from shadowkv.prefix_cache.disk.files import SnapshotGone
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.disk.names import Save
from shadowkv.prefix_cache.disk.tier import DiskTier
from shadowkv.prefix_cache.protocol import Answer, ComputedTwice, NotDone, Saved, SaveError, settle

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Saving:
    """A prompt on its way to the disk.

    Attributes:
        name: to be kept under; None where no name is to keep it.
        pages: number of its pages that were cached when it was requested.
        nodes: those that have the last of these.
        again: nodes that were queued for the disk once more.
        keeping: what is recorded under the name, and the answer to that, once all files are there.
    """

    name: str | None
    pages: int
    nodes: list[Node]
    answer: Answer
    again: set[Node] = field(default_factory=set)
    keeping: tuple[Saved, Future[None]] | None = None


@dataclass(eq=False)
class _Restoring:
    """A prompt on its way to host memory.

    Attributes:
        asked: whether its files have been requested.
    """

    name: str
    kept: Future[tuple[Save, list[Entry]]]
    answer: Answer
    asked: bool = False


class Saves:
    """Requests by name that are not done yet; to be used on the engine's thread.

    Args:
        tree, copies, reports: where a prompt's nodes are.
        offload, chains: bring them down and up.
        disk: stores them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        copies: Copies,
        reports: DiskReports,
        offload: Offload,
        chains: Chains,
        disk: DiskTier,
    ) -> None:
        self._tree, self._copies, self._reports = tree, copies, reports
        self._offload, self._chains, self._disk = offload, chains, disk
        self._saving: list[_Saving] = []
        self._restoring: list[_Restoring] = []

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._saving or self._restoring)

    def save(self, name: str | None, pages: list[str], answer: Answer) -> None:
        """Has the cached part of a prompt kept on the disk, or, without a name, only written there; ``pages`` are names
        of those that can be shared."""
        along = list(self._tree.along(pages))
        reached = max((end for _, end in along), default=0)
        nodes = [node for node, end in along if end == reached]
        self._saving.append(_Saving(name, reached, nodes, answer))

    def restore(self, name: str, answer: Answer) -> None:
        """Has what a name keeps brought to host memory."""
        self._restoring.append(_Restoring(name, self._disk.kept(name), answer))

    def advance(self) -> None:
        """Checks the progress of every request; call it right after the tiers' own ``advance``."""
        if self.busy:
            self._reports.take()  # so that a finished write is seen as there before it is seen as no longer on its way
            self._saving = [one for one in self._saving if not self._ended(one.answer, self._save(one))]
            self._restoring = [one for one in self._restoring if not self._ended(one.answer, self._restore(one))]

    @staticmethod
    def _ended(answer: Answer, outcome: Saved | SaveError | None) -> bool:
        if outcome is None:
            return answer.cancelled()
        settle(answer, outcome)
        return True

    def _save(self, saving: _Saving) -> Saved | SaveError | None:
        """The result, None while it is on its way."""
        if saving.keeping is not None:
            saved, keeping = saving.keeping
            if not keeping.done():
                return None
            if keeping.cancelled() or not isinstance(keeping.exception(), SnapshotGone):
                return _failure(keeping, f"{saving.name!r} cannot be written") or saved
            saving.keeping = None  # a file was removed: it may be written once more
        for node in saving.nodes:
            if chain := self._disk.chain(node.names[-1]):
                names = tuple(entry.name for entry in chain)
                saved = Saved(saving.pages * PAGE, sum(entry.file_bytes for entry in chain), names)
                if saving.name is None:
                    return saved
                saving.keeping = saved, self._disk.keep(saving.name, saved.tokens, chain)
                return None
        if (problem := self._disk.problem) is not None:
            return NotDone(f"the {saving.pages * PAGE} cached tokens cannot be written to the disk: {problem}")
        if any(self._comes(node, saving.again) for node in saving.nodes):
            return None
        kind = ComputedTwice if any(self._is_anothers(node) for node in saving.nodes) else NotDone
        return kind(
            f"the {saving.pages * PAGE} cached tokens could not be written: there is no room for them "
            "in host memory (--kv-offload-gib) or, beside what names keep, on the disk (--kv-disk-gib), or "
            "the disk fails; the server's log says more"
        )

    def _comes(self, node: Node, again: set[Node]) -> bool:
        """Whether a node and all that it continues are on the disk or on their way there."""
        return all(self._comes_alone(link, again) for link in [*reversed([*node.ancestors]), node])

    def _comes_alone(self, node: Node, again: set[Node]) -> bool:
        copy = self._copies.of.get(node)
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
        entry = self._disk.lookup(node.names[-1])
        return entry is not None and entry.head.uid == node.uid

    def _is_anothers(self, node: Node) -> bool:
        """Whether the disk holds the same tokens with other bytes, for a node or for one that it continues."""
        return any(self._disk.lookup(link.names[-1]) and not self._is_there(link) for link in (node, *node.ancestors))

    def _restore(self, restoring: _Restoring) -> Saved | SaveError | None:
        """The result, None while it is on its way."""
        if not restoring.kept.done():
            return None
        if (failure := _failure(restoring.kept, f"{restoring.name!r} cannot be read")) is not None:
            return failure
        save, chain = restoring.kept.result()
        copies = [copy for entry in chain if (copy := self._copies.by_uid.get(entry.head.uid)) is not None]
        if len(copies) < len(chain):
            if self._reports.busy:
                return None
            return NotDone(f"what is saved as {restoring.name!r} cannot be read; the server's log says why")
        if not restoring.asked:
            restoring.asked = True
            for copy in copies:
                copy.again = 0.0  # a request by name need not wait
        stops = [*(copy.node.first for copy in copies[1:]), save.tokens // PAGE]
        steps = [Step(copy.node, stop) for copy, stop in zip(copies, stops, strict=True)]
        if self._chains.fetch(steps, MAX_FETCH_SECONDS) == 0.0:
            return Saved(save.tokens, sum(entry.file_bytes for entry in chain))
        if any(copy.fetching is not None for copy in copies):
            return None  # as long as the caller is patient
        return NotDone(
            f"what is saved as {restoring.name!r} could not be brought back: there is no room for it in host memory "
            "(--kv-offload-gib), or its files cannot be read; the server's log says more"
        )

    def abandon(self) -> None:
        """Answers all requests: nothing more is done for them."""
        for answer in [one.answer for one in self._saving] + [one.answer for one in self._restoring]:
            settle(answer, NotDone("the tiers below the device have failed; the server's log says why"))
        self._saving, self._restoring = [], []


def _failure(done: Future[Any], what: str) -> SaveError | None:
    """Why a finished future has failed, if it has."""
    if done.cancelled():
        return NotDone(f"{what}: the server is stopping")
    error = done.exception()
    if error is None or isinstance(error, SaveError):
        return error
    logger.warning("%s", what, exc_info=error)
    return NotDone(f"{what}: {(isinstance(error, OSError) and error.strerror) or error}")
