"""A radix tree over pages of token ids. It records which sequences on the device have the pages, and which copies of
the pages are in lower tiers.

A node has pages that were computed together, and starts after one of its parent's pages. A page's hash depends on all
tokens up to its end, so a prompt finds every node on its path by the hashes of its own pages. Several nodes have the
same tokens if several requests computed these at once. Then the longest match is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.page_hashes import PageHashes, common_pages, new_uid


@dataclass(eq=False)
class Node:
    """Pages ``first`` to ``end`` (excluded) of a prompt.

    Attributes:
        parent: the node that it continues; None at the root.
        hashes: hashes of its pages (``page_hashes.py``).
        compressed: whether the pages are in the policy's compressed form. Dense pages with the same tokens belong to
            another node.
        holders: sequences that have its pages, each with the page (excluded) up to which the sequence has them.
        children: nodes that continue one of its pages.
        origin: the link from which its page hashes start.
        uid: random id of its pages' exact bytes. Its children were computed on these bytes.
        copy: the copy of its pages in lower tiers, or None. A node with a copy stays in the tree, even without a
            holder.
        used: time of its last use, in seconds by the clock of ``Eviction``.
        hits: number of requests that did not have to compute its pages.
    """

    parent: Node | None
    first: int
    hashes: list[str]
    compressed: bool
    holders: dict[CachedSequence, int] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    origin: str = ""
    uid: str = field(default_factory=new_uid)
    copy: Copy | None = None
    used: float = 0.0
    hits: int = 0

    @property
    def end(self) -> int:
        """The page after its last page."""
        return self.first + len(self.hashes)

    @property
    def ancestors(self) -> Iterator[Node]:
        """Yields its parent, the parent's parent, and so on."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(eq=False)
class Copy:
    """A snapshot of a node's pages, in host memory, on disk or both.

    ::

        Offload.store: read from the device ──┐
                                              on_host ── Offload.write ── file
        Chains.fetch: read from the disk ─────┘

    ``Copies.evict`` removes a copy from host memory, and ``DiskReports`` learns when its file is gone. A copy that is
    in neither tier and not in use is removed from its node.

    Attributes:
        node: the node whose pages it has.
        header: says which arrays the bytes of rank 0 hold.
        token_ids: ids of the node's tokens, uint32 [length - start]; both numbers are in ``header``.
        parts: bytes of each tensor-parallel rank's part. The parts follow one another in ``slabs`` and in ``file``.
        slabs: its slabs in the host tier, or None.
        file: its file in the disk tier, or None.
        ready: whether ``slabs`` hold all bytes. Otherwise they are still on their way from the device or the disk.
        users: number of transfers and prompts that use its slabs or wait for them.
        from_disk: whether its bytes were read from the disk, and have not been restored to the device since.
        evicted: whether the disk tier has evicted its file. Then only a request to save the prompt writes the file
            again.
        fetching: the read from the disk that is in progress, or None.
        retry_at: earliest time of the next read from the disk, by ``time.monotonic``. A failed read postpones it.
        writing: the write to the disk that is in progress, or None.
    """

    node: Node
    header: SnapshotHeader
    token_ids: npt.NDArray[np.uint32]
    parts: tuple[int, ...]
    slabs: list[int] | None = None
    file: FileHeader | None = None
    ready: bool = False
    users: int = 0
    from_disk: bool = False
    evicted: bool = False
    fetching: Future[float] | None = None
    retry_at: float = 0.0
    writing: Future[bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts)

    @property
    def on_host(self) -> bool:
        """Whether all its bytes are in host memory."""
        return self.ready and self.slabs is not None

    @property
    def usable(self) -> bool:
        """Whether it is in host memory or can be read from the disk."""
        return self.on_host or (self.file is not None and time.monotonic() >= self.retry_at)

    def can_be_written(self, evicted: bool) -> bool:
        """Whether it is only in host memory, and its parent is on the disk or on its way there. ``evicted`` says
        whether copies that the disk has evicted may be written again."""
        if not self.on_host or self.file or self.writing or (self.evicted and not evicted):
            return False
        parent = self.node.parent
        return parent is None or (parent.copy is not None and bool(parent.copy.file or parent.copy.writing))


class PrefixTree:
    """All nodes, and the path of each sequence through them.

    Attributes:
        changes: counts changes of nodes, their holders and their copies.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._by_first: dict[str, list[Node]] = {}
        self._paths: dict[CachedSequence, list[Node]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def __iter__(self) -> Iterator[Node]:
        return chain.from_iterable(self._by_first.values())

    def path_of(self, sequence: CachedSequence) -> list[Node]:
        """The nodes whose pages a sequence has, in order."""
        return self._paths.get(sequence, [])

    def along(self, hashes: Sequence[str]) -> Iterator[tuple[Node, int]]:
        """Yields the nodes on a prompt's path in order of their first pages, and the page (excluded) up to which each
        matches. ``hashes`` are the hashes of the prompt's pages."""
        reached = 0
        for first, page in enumerate(hashes):
            if first > reached:  # no node matches the previous page, so none can continue it
                return
            for node in self._by_first.get(page, ()):
                end = first + common_pages(node.hashes, hashes, first)
                reached = max(reached, end)
                yield node, end

    def hold(self, sequence: CachedSequence, hashes: PageHashes, ends: Sequence[int]) -> list[Node]:
        """Records that ``sequence`` has the pages up to the last of ``ends``. Returns its path.

        New nodes end at ``ends``, which are page numbers in ascending order. A copy with a recurrent state has it only
        for the end of its node, so such nodes can be restored only up to their ends.
        """
        self.changes += 1
        compressed = bool(sequence.path)
        path = self._paths.setdefault(sequence, [])
        if path and path[0].compressed != compressed:  # it was compressed since, so its dense pages are gone
            self.forget(sequence)
            path = self._paths.setdefault(sequence, [])
        for end in ends:
            node = path[-1] if path else None
            covered = node.holders[sequence] if node else 0
            if covered >= end:
                continue
            if node is None or covered in ends or not self._can_grow(node, covered):
                node = self._insert(Node(node, covered, [], compressed, origin=hashes.origin), hashes[covered])
                path.append(node)
            node.hashes += hashes[covered:end]
            node.holders[sequence] = node.end
        return path

    def plant(self, parent: Node | None, first: int, hashes: list[str], compressed: bool, origin: str) -> Node:
        """Adds a node without holders. The caller must add its copy."""
        return self._insert(Node(parent, first, hashes, compressed, origin=origin), hashes[0])

    @staticmethod
    def _can_grow(node: Node, end: int) -> bool:
        """Whether pages from ``end`` on can be added to the node: it ends at ``end``, and has one holder, no children
        and no copy."""
        return len(node.holders) == 1 and not node.children and node.copy is None and node.end == end

    def fork(self, child: CachedSequence, parent: CachedSequence, pages: int) -> None:
        """Records that ``child`` shares the first ``pages`` pages with ``parent``."""
        self.changes += 1
        self._paths[child] = []
        if bool(child.path) == bool(parent.path):
            for node in self._paths.get(parent, ()):
                if node.first < pages and node.compressed == bool(child.path):
                    self.join(child, node, min(node.holders[parent], pages))

    def join(self, sequence: CachedSequence, node: Node, end: int) -> None:
        """Records that ``sequence`` has the pages of the next node on its path, up to ``end``."""
        self.changes += 1
        self._paths.setdefault(sequence, []).append(node)
        node.holders[sequence] = end

    def cut(self, sequence: CachedSequence, pages: int) -> None:
        """Records that ``sequence`` was cut to its first ``pages`` pages."""
        self.changes += 1
        for node in list(self._paths[sequence]):
            if node.first >= pages:
                self._leave(sequence, node)
            else:
                node.holders[sequence] = min(node.holders[sequence], pages)
                self.prune(node)

    def forget(self, sequence: CachedSequence) -> None:
        """Removes ``sequence`` from all nodes."""
        self.changes += 1
        for node in list(self._paths.get(sequence, ())):
            self._leave(sequence, node)
        self._paths.pop(sequence, None)

    def _leave(self, sequence: CachedSequence, node: Node) -> None:
        self._paths[sequence].remove(node)
        del node.holders[sequence]
        self.prune(node)

    def _insert(self, node: Node, first: str) -> Node:
        self.changes += 1
        self._by_first.setdefault(first, []).append(node)
        if node.parent is not None:
            node.parent.children.append(node)
        return node

    def prune(self, node: Node | None) -> None:
        """Removes those last pages of a node that neither a holder nor a child needs. If no page is left, removes the
        node and prunes its parent. Keeps a node that has a copy."""
        while node is not None and node.copy is None:
            held = [*node.holders.values(), *(child.first for child in node.children)]
            if held:
                del node.hashes[max(held) - node.first :]
                return
            same = self._by_first[node.hashes[0]]
            same.remove(node)
            if not same:
                del self._by_first[node.hashes[0]]
            if node.parent is not None:
                node.parent.children.remove(node)
            node = node.parent
