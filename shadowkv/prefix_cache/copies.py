"""``Copies``: the copies of nodes below the device, and room for them in host memory. ``Offload`` makes copies, and
``Chains`` restores sequences from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.prefix_cache.disk.header import FileHeader
from shadowkv.prefix_cache.eviction import Eviction
from shadowkv.prefix_cache.host import HostTier
from shadowkv.prefix_cache.stats import Counts
from shadowkv.prefix_cache.tree import Copy, Node, PrefixTree


def pieces(header: SnapshotHeader, parts: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of equal pieces in a copy's file, and the bytes of each. With one rank these are
    ``SnapshotHeader.pieces``. With several ranks the file is one piece, which has the parts of all ranks."""
    return header.pieces if len(parts) == 1 else (1, sum(parts))


class Copies:
    """Copies of a tree's nodes in host memory, on disk or on their way there. Only the engine's thread uses them.

    Args:
        tree: the tree.
        host: the host tier.
        counts: statistics of host memory, to which evictions are added here.
        eviction: the order in which copies are evicted.
        parts: returns the parts of a copy with this header (``Copy.parts``).

    Attributes:
        by_uid: all copies, by the uids of their nodes.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostTier,
        counts: Counts,
        eviction: Eviction,
        parts: Callable[[SnapshotHeader], tuple[int, ...]],
    ) -> None:
        self.parts = parts
        self.host, self.tree, self.counts, self.eviction = host, tree, counts, eviction
        self.by_uid: dict[str, Copy] = {}

    def add(
        self,
        node: Node,
        header: SnapshotHeader,
        token_ids: npt.NDArray[np.uint32],
        *,
        file: FileHeader | None = None,
        users: int = 0,
    ) -> Copy:
        """Adds a copy of a node that has none. Arguments as for ``Copy``."""
        self.tree.changes += 1
        parts = self.parts(header)
        node.copy = self.by_uid[node.uid] = Copy(node, header, token_ids, parts, file=file, users=users)
        return node.copy

    def drop(self, copy: Copy) -> None:
        """Removes a copy, which must not be in use."""
        assert not copy.users
        self.tree.changes += 1
        if copy.slabs is not None:
            self.host.give(copy.slabs)
        copy.node.copy = None
        if self.by_uid.get(copy.node.uid) is copy:  # another node with the same uid may have been added since
            del self.by_uid[copy.node.uid]
        self.tree.prune(copy.node)

    def leave(self, copy: Copy) -> None:
        """Ends one use of a copy. After the last use, an incomplete copy gives back its slabs, and is removed if it has
        no file."""
        self.tree.changes += 1
        copy.users -= 1
        if not copy.users and not copy.ready:
            if copy.slabs is not None:
                self.host.give(copy.slabs)
                copy.slabs = None
            if copy.file is None:
                self.drop(copy)

    def room(self, nbytes: int, spare: set[Node] | None = None) -> list[int] | None:
        """Takes slabs for a copy of ``nbytes`` bytes. Evicts unused copies if that makes enough room, but never copies
        of nodes in ``spare``. Returns None, and evicts nothing, if there cannot be enough room."""
        slabs = self.host.take(nbytes)
        if slabs is not None or self.host.slabs_of(nbytes) > self.host.num_slabs:
            return slabs
        others = {
            node: copy
            for node in self.tree
            if (copy := node.copy) is not None and copy.on_host and not copy.users and node not in (spare or ())
        }
        lacking = self.host.slabs_of(nbytes) - self.host.free_slabs
        if sum(len(copy.slabs or ()) for copy in others.values()) < lacking:
            return None
        for victim in self.eviction.order(others):
            if lacking <= 0:
                break
            lacking -= len(others[victim].slabs or ())
            self.evict(others[victim])
        return self.host.take(nbytes)

    def evict(self, copy: Copy) -> None:
        """Evicts a copy from host memory. It must be there and not in use."""
        assert copy.slabs is not None and not copy.users
        self.tree.changes += 1
        self.host.give(copy.slabs)
        copy.slabs, copy.ready = None, False
        self.counts.add(evictions=1)
        if copy.file is None:
            self.drop(copy)

    def buffers(self, copy: Copy) -> list[npt.NDArray[np.uint8]]:
        """Returns the bytes of a copy in its slabs, as uint8 arrays in order. The disk tier reads or writes them."""
        assert copy.slabs is not None
        return [part.numpy() for part, _ in self.host.pieces(copy.slabs, 0, copy.nbytes)]
