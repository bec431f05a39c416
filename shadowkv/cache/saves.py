"""Prompts saved and restored by name: requests that wait until the prompt is on the disk or back in host memory.

Nothing here blocks: the engine's thread polls between its steps, and disk work is done on the disk's threads.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from shadowkv.cache.chains import MOST_FETCH_SECONDS, Chains, Step
from shadowkv.cache.copying import Copying
from shadowkv.cache.disk import DiskTier
from shadowkv.cache.errors import ComputedTwice, NotDone, SaveError, SnapshotGone
from shadowkv.cache.findings import Findings
from shadowkv.cache.index import Entry
from shadowkv.cache.kept_copies import KeptCopies
from shadowkv.cache.names import Save
from shadowkv.cache.tree import Node, PrefixTree
from shadowkv.kvcache.policy.spec import PAGE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """What was saved or restored.

    Attributes:
        tokens: number of the prompt's tokens, from its first on.
        nbytes: of the files that hold them.
        snapshots: names of their snapshots, each after the one that it continues.
    """

    tokens: int
    nbytes: int
    snapshots: tuple[str, ...] = ()


Answer = Future[Saved]
"""Raises SaveError; a caller that cancels it has given up."""


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
        tree, copies, findings: where a prompt's nodes are.
        copying, chains: bring them down and up.
        disk: stores them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        copies: KeptCopies,
        findings: Findings,
        copying: Copying,
        chains: Chains,
        disk: DiskTier,
    ) -> None:
        self._tree, self._copies, self._findings = tree, copies, findings
        self._copying, self._chains, self._disk = copying, chains, disk
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
            self._findings.take()  # so that a finished write is seen as there before it is seen as no longer on its way
            self._saving = [one for one in self._saving if not self._ended(one.answer, self._save(one))]
            self._restoring = [one for one in self._restoring if not self._ended(one.answer, self._restore(one))]

    @staticmethod
    def _ended(answer: Answer, found: Saved | SaveError | None) -> bool:
        if found is None:
            return answer.cancelled()
        settle(answer, found)
        return True

    def _save(self, one: _Saving) -> Saved | SaveError | None:
        """The result, None while it is on its way."""
        if one.keeping is not None:
            saved, keeping = one.keeping
            if not keeping.done():
                return None
            if keeping.cancelled() or not isinstance(keeping.exception(), SnapshotGone):
                return _failure(keeping, f"{one.name!r} cannot be written") or saved
            one.keeping = None  # a file was removed: it may be written once more
        for node in one.nodes:
            if chain := self._disk.chain(node.names[-1]):
                names = tuple(entry.name for entry in chain)
                saved = Saved(one.pages * PAGE, sum(entry.file_bytes for entry in chain), names)
                if one.name is None:
                    return saved
                one.keeping = saved, self._disk.keep(one.name, saved.tokens, chain)
                return None
        if any(self._comes(node, one.again) for node in one.nodes):
            return None
        kind = ComputedTwice if any(self._is_anothers(node) for node in one.nodes) else NotDone
        return kind(
            f"the {one.pages * PAGE} cached tokens could not be written to {self._disk.directory}: there is no room "
            "for them in host memory (--kv-offload-gib) or, beside what names keep, on the disk (--kv-disk-gib), or "
            "the disk fails; the server's log says more"
        )

    def _comes(self, node: Node, again: set[Node]) -> bool:
        """Whether a node and all that it continues are on the disk or on their way there."""
        return all(self._comes_alone(one, again) for one in [*reversed([*node.ancestors]), node])

    def _comes_alone(self, node: Node, again: set[Node]) -> bool:
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
        self._copying.write(node, evicted=True)
        return copy.writing is not None or self._is_there(node)

    def _is_there(self, node: Node) -> bool:
        entry = self._disk.lookup(node.names[-1])
        return entry is not None and entry.head.uid == node.uid

    def _is_anothers(self, node: Node) -> bool:
        """Whether the disk holds the same tokens with other bytes, for a node or for one that it continues."""
        return any(self._disk.lookup(one.names[-1]) and not self._is_there(one) for one in (node, *node.ancestors))

    def _restore(self, one: _Restoring) -> Saved | SaveError | None:
        """The result, None while it is on its way."""
        if not one.kept.done():
            return None
        if (failure := _failure(one.kept, f"{one.name!r} cannot be read")) is not None:
            return failure
        save, chain = one.kept.result()
        nodes = [node for entry in chain if (node := self._copies.by_uid.get(entry.head.uid)) is not None]
        if len(nodes) < len(chain):
            if self._findings.busy:
                return None
            return NotDone(f"what is saved as {one.name!r} cannot be read; the server's log says why")
        if not one.asked:
            one.asked = True
            for node in nodes:
                if node.copy is not None:
                    node.copy.again = 0.0  # a request by name need not wait
        stops = [*(node.first for node in nodes[1:]), save.tokens // PAGE]
        steps = [Step(node, stop) for node, stop in zip(nodes, stops, strict=True)]
        if self._chains.fetch(steps, MOST_FETCH_SECONDS) == 0.0:
            return Saved(save.tokens, sum(entry.file_bytes for entry in chain))
        if any(node.copy is not None and node.copy.fetching is not None for node in nodes):
            return None  # as long as the caller is patient
        return NotDone(
            f"what is saved as {one.name!r} could not be brought back: there is no room for it in host memory "
            "(--kv-offload-gib), or its files cannot be read; the server's log says more"
        )

    def abandon(self) -> None:
        """Answers all requests: nothing more is done for them."""
        for answer in [one.answer for one in self._saving] + [one.answer for one in self._restoring]:
            settle(answer, NotDone("the tiers below the device have failed; the server's log says why"))
        self._saving, self._restoring = [], []


def settle(answer: Future[Any], found: object) -> None:
    """Sets a result, or an exception, unless the future is done or the caller has given up."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _failure(done: Future[Any], what: str) -> SaveError | None:
    """Why a finished future has failed, if it has."""
    if done.cancelled():
        return NotDone(f"{what}: the server is stopping")
    error = done.exception()
    if error is None or isinstance(error, SaveError):
        return error
    logger.warning("%s", what, exc_info=error)
    return NotDone(f"{what}: {(isinstance(error, OSError) and error.strerror) or error}")
