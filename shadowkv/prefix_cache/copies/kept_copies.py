"""Which nodes of the prefix tree have copies, and room for these in host memory, which others make."""

from __future__ import annotations

from shadowkv.prefix_cache.copies.copy import Copy
from shadowkv.prefix_cache.copies.host import HostTier
from shadowkv.prefix_cache.device.eviction import Eviction
from shadowkv.prefix_cache.device.tree import Node, PrefixTree
from shadowkv.prefix_cache.stats import TierCounts


class KeptCopies:
    """Nodes with copies in host memory, on disk or on their way there.

    Args:
        eviction: says which copies go first.

    Attributes:
        nodes: all of them.
        by_uid: the same, by the uid of their bytes.
    """

    def __init__(self, tree: PrefixTree, host: HostTier, counts: TierCounts, eviction: Eviction) -> None:
        self.host, self._tree, self._counts, self.eviction = host, tree, counts, eviction
        self.nodes: set[Node] = set()
        self.by_uid: dict[str, Node] = {}

    def add(self, node: Node, copy: Copy) -> None:
        """Records that a node has a copy."""
        node.copy = copy
        self._tree.changes += 1
        self.nodes.add(node)
        self.by_uid[node.uid] = node

    def room(self, nbytes: int, spare: set[Node] | None = None) -> list[int] | None:
        """Slabs for a copy; unused copies that are not to ``spare`` are evicted, if that makes enough room."""
        slabs = self.host.take(nbytes)
        if slabs is not None or self.host.slabs_of(nbytes) > self.host.num_slabs:
            return slabs
        others = {
            node: len(node.copy.slabs or ())
            for node in self.nodes
            if node.copy and node.copy.on_host and not node.copy.users and node not in (spare or ())
        }
        lacking = self.host.slabs_of(nbytes) - self.host.free_slabs
        if sum(others.values()) < lacking:
            return None
        for victim in self.eviction.order(others):
            if lacking <= 0:
                break
            self.leave_host(victim)
            lacking -= others[victim]
        return self.host.take(nbytes)

    def leave_host(self, node: Node) -> None:
        """Drops an unused copy from host memory."""
        copy = node.copy
        assert copy is not None and copy.slabs is not None and not copy.users
        self._tree.changes += 1
        self.host.give(copy.slabs)
        copy.slabs, copy.ready = None, False
        self._counts.host_evictions += 1
        if copy.entry is None:
            self.drop(node)

    def leave(self, node: Node) -> None:
        """Records that a use of a node's copy is over."""
        copy = node.copy
        assert copy is not None
        self._tree.changes += 1
        copy.users -= 1
        if not copy.users and not copy.ready:
            if copy.slabs is not None:
                self.host.give(copy.slabs)
                copy.slabs = None
            if copy.entry is None:
                self.drop(node)

    def drop(self, node: Node) -> None:
        """Forgets a node's copy, which must be unused."""
        copy = node.copy
        assert copy is not None and not copy.users
        self._tree.changes += 1
        if copy.slabs is not None:
            self.host.give(copy.slabs)
        node.copy = None
        self.nodes.discard(node)
        if self.by_uid.get(node.uid) is node:  # else a file of it has become a separate node
            del self.by_uid[node.uid]
        self._tree.prune(node)
