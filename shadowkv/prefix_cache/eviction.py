"""The order in which copies are evicted from host memory: the policies of ``--eviction``.

A policy scores nodes of the prefix tree. The node with the lowest score is evicted first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowkv.prefix_cache.tree import Node

Score = Callable[["Node", float], float]
"""Returns a node's score. The second argument is the current time, in seconds by the clock of ``Node.used``."""

EDGE, WEIGHT, HIT, SECOND = 5.0, 2.0, 3.0, 0.01
FIRST_USE, MORE_USE, MAX_USE = 1.0, 0.1, 10.0


def last_use(node: Node, now: float) -> float:
    """Returns the time of a node's last use. So the least recently used node is evicted first."""
    return node.used


def keep_score(node: Node, now: float) -> float:
    """Returns the score of the policy ``graph``: 5 for each edge of the node, 2 times each edge's weight, and 3 for
    each hit, minus 0.01 for each second since the node's last use.

    An edge joins a node to its parent. Its weight is 1, plus 0.1 for each hit of the child, and at most 10.
    This is the score of aither-kvcache's block graph without two of its parts: a block's importance, because attention
    is not tracked for copies in host memory; and the protection of blocks by label, such as system prompts, because
    tokens have no roles here.
    """
    continuing = node.children if node.parent is None else [node, *node.children]
    score = HIT * node.hits - SECOND * (now - node.used)
    for end in continuing:  # a loop is fast enough for the thousands of nodes that are scored at a time
        weight = FIRST_USE + MORE_USE * end.hits
        score += EDGE + WEIGHT * (weight if weight < MAX_USE else MAX_USE)
    return score


POLICIES: dict[str, Score] = {"lru": last_use, "graph": keep_score}


class Eviction:
    """Records uses of nodes, and ranks them.

    Args:
        policy: one of ``POLICIES``.
        clock: time in seconds.
    """

    def __init__(self, policy: str = "lru", clock: Callable[[], float] = time.monotonic) -> None:
        self._score, self._clock, self._last = POLICIES[policy], clock, 0.0

    def _now(self) -> float:
        """Returns a time that increases with every call, even if the clock is coarse."""
        self._last = max(self._clock(), math.nextafter(self._last, math.inf))
        return self._last

    def touch(self, node: Node, hits: int = 0) -> None:
        """Marks a node and its ancestors as used now, and adds ``hits`` to their hit counts. A hit is a request that
        did not have to compute the node's pages."""
        now = self._now()
        for touched in (node, *node.ancestors):
            touched.used = now
            touched.hits += hits

    def order(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the nodes in eviction order. A node comes after its children, which are useless without it."""
        now = self._now()
        deepest_first = sorted(nodes, key=lambda node: -node.first)
        scores = {node: self._score(node, now) for node in deepest_first}
        for node in deepest_first:
            if node.parent in scores:
                scores[node.parent] = max(scores[node.parent], scores[node])
        return sorted(deepest_first, key=scores.__getitem__)
