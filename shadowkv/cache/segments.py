"""Where cached prefixes are: runs of pages, each in one tier or in several."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shadowkv.cache.tree import Node
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.spec import PAGE


@dataclass(frozen=True)
class PrefixSegment:
    """A run of pages that was computed in one go.

    Attributes:
        uid: names it as long as it is anywhere; it says nothing of its tokens.
        first: position of its first token.
        tokens: how many it has.
        sealed: whether they are in the policy's own form, or exact.
        running: whether a request that runs has them.
        tiers: where they are, of ``device``, ``host`` and ``disk``.
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
        kept: finished sequences that the prefix cache keeps; other holders of a node run.
        most: of more segments those are told that are nearest to the device.
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
