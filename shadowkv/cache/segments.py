"""Where cached prefixes are: runs of pages, each in one tier or in several."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shadowkv.cache.tree import Node
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence


@dataclass(frozen=True)
class PrefixSegment:
    """A run of pages that was computed together.

    Attributes:
        uid: identifies it as long as it is in any tier; it says nothing about its tokens.
        first: position of its first token.
        tokens: their number.
        sealed: whether they are in the policy's compressed form rather than exact.
        running: whether a running request uses them.
        tiers: where they are, out of ``device``, ``host`` and ``disk``.
    """

    uid: str
    first: int
    tokens: int
    sealed: bool
    running: bool
    tiers: tuple[str, ...]


def segments_of(nodes: Iterable[Node], kept: Collection[CachedSequence], most: int) -> tuple[list[PrefixSegment], int]:
    """The segments of ``nodes`` in order of their positions, and how many there are in all.

    Args:
        kept: finished sequences that the prefix cache keeps; a node's other holders are running.
        most: limit on their number; those nearest to the device are returned first.
    """
    every = list(nodes)
    nearest = sorted(every, key=lambda node: (not node.holders, node.copy is None or not node.copy.on_host, -node.used))
    told = sorted(nearest[:most], key=lambda node: node.first)
    return [_segment(node, kept) for node in told], len(every)


def _segment(node: Node, kept: Collection[CachedSequence]) -> PrefixSegment:
    copy = node.copy
    there = {
        "device": bool(node.holders),
        "host": copy is not None and copy.on_host,
        "disk": copy is not None and copy.entry is not None,
    }
    running = any(one not in kept for one in node.holders)
    tiers = tuple(tier for tier, is_there in there.items() if is_there)
    return PrefixSegment(node.uid, node.first * PAGE, len(node.names) * PAGE, node.sealed, running, tiers)
