"""Lifetimes of a cache's sequences: each is one in every group of layers, taken and given back together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shadowkv.kvcache.memory.arenas import Blocks, OutOfBlocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline


class SequencePools:
    """The pools of all groups.

    Args:
        pools: those of the layout's groups, in order.
    """

    def __init__(self, layout: Layout, pools: Sequence[SequencePool]) -> None:
        self.layout, self.pools = layout, list(pools)

    @property
    def total(self) -> Blocks:
        """All blocks, by kind."""
        return self.layout.joined(pool.total for pool in self.pools)

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds, by kind."""
        return self.layout.joined(pool.free for pool in self.pools)

    @property
    def changes(self) -> int:
        """Grows whenever a sequence takes something, shares it or gives it back."""
        return sum(blocks.changes for pool in self.pools for blocks in pool.pools.values())

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Blocks that ``sequence`` lacks to be extended to ``start`` tokens by a prompt, then to ``capacity``."""
        return self.layout.joined(
            pool.growth(sequence.of_group(number), start, capacity) for number, pool in enumerate(self.pools)
        )

    def demand(self, outlines: Sequence[Outline], start: int, capacity: int) -> Blocks:
        """Blocks that ``restore`` takes."""
        return self.layout.joined(
            pool.demand(outline, start, capacity) for pool, outline in zip(self.pools, outlines, strict=True)
        )

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released: those that only they hold."""
        held = list(sequences)
        return self.layout.joined(
            pool.held(sequence.of_group(number) for sequence in held) for number, pool in enumerate(self.pools)
        )

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        """A new, empty sequence; raises OutOfBlocks, with nothing taken, if anything is lacking."""
        return self.restore([Outline()] * len(self.pools), start, capacity)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked in every group."""
        while True:
            point = length
            for number, pool in enumerate(self.pools):
                point = pool.fork_point(sequence.of_group(number), point)
            if point == length or len(self.pools) == 1:
                return point
            length = point

    def can_fork(self, sequence: CachedSequence, length: int) -> bool:
        """Whether ``sequence`` can be forked after that many tokens."""
        return self.fork_point(sequence, length) == length

    def can_follow(self, sequence: CachedSequence, length: int) -> bool:
        """Whether what comes after that many tokens can follow a fork there: windows may have left them behind."""
        return (
            length <= sequence.length
            and length % PAGE == 0
            and all(
                pool.layout.window is not None or pool.fork_point(sequence.of_group(number), length) == length
                for number, pool in enumerate(self.pools)
            )
        )

    def forked(self, parent: CachedSequence, length: int) -> list[Outline]:
        """What a fork of ``parent`` begins with, in each group; raises ValueError where it cannot be forked there."""
        return [pool.forked(parent.of_group(number), length) for number, pool in enumerate(self.pools)]

    def fork(self, parent: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """A new sequence that begins with the first ``length`` tokens of ``parent``, which it shares with it.

        Nothing is copied but page numbers. Raises OutOfBlocks, with nothing taken, if anything is lacking, and
        ValueError where the parent cannot be forked there (see ``fork_point``).
        """
        return self.restore(self.forked(parent, length), start, capacity, parent)

    def restore(
        self, outlines: Sequence[Outline], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> CachedSequence:
        """A sequence that begins as ``outlines`` say, one for each group; otherwise as ``SequencePool.restore``."""
        if len(self.pools) > 1:
            self._require(self.demand(outlines, start, capacity))
        in_groups: list[CachedSequence] = []
        try:
            for number, (pool, outline) in enumerate(zip(self.pools, outlines, strict=True)):
                of_parent = None if parent is None else parent.of_group(number)
                in_groups.append(pool.restore(outline, start, capacity, of_parent))
        except BaseException:
            for pool, sequence in zip(self.pools, in_groups):
                pool.release(sequence)
            raise
        first, *other_groups = in_groups
        first.other_groups = tuple(other_groups)
        if parent is not None and any(outline.copied for outline in outlines):
            self.await_layers(parent)
            for number, (pool, outline) in enumerate(zip(self.pools, outlines, strict=True)):
                if outline.copied:
                    pool.copy_window(parent.of_group(number), in_groups[number], outline.copied)
        return first

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfBlocks, with nothing taken, if anything is lacking."""
        if len(self.pools) > 1:
            self._require(self.growth(sequence, start, capacity))
        for number, pool in enumerate(self.pools):
            pool.extend(sequence.of_group(number), start, capacity)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forgets the newest tokens; those that are ``fixed`` cannot be forgotten (ValueError)."""
        for number, pool in enumerate(self.pools):
            pool.truncate(sequence.of_group(number), length)

    def trim(self, sequence: CachedSequence) -> None:
        """Gives back what a finished sequence holds for future tokens; it can be extended again."""
        for number, pool in enumerate(self.pools):
            pool.trim(sequence.of_group(number))

    def release(self, sequence: CachedSequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        for number, pool in enumerate(self.pools):
            pool.release(sequence.of_group(number))

    def await_layers(self, sequence: CachedSequence) -> None:
        """Makes subsequent work on the current stream wait for everything on its way to a restored sequence."""
        self.pools[0].await_layers(sequence)

    def _require(self, need: Blocks) -> None:
        if not need.within(self.free):
            raise OutOfBlocks(f"the sequence needs {need}, free are {self.free}")
