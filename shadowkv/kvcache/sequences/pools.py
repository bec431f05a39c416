"""``SequencePools``: lifetimes of a cache's sequences, over all groups of layers. ``KVCache`` and snapshots use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shadowkv.kvcache.memory.arenas import Blocks, OutOfBlocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.recurrent.states import RecurrentStates
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline


class SequencePools:
    """The pools of all groups of layers. A sequence is taken and released in all groups together.

    Args:
        pools: the pools of the layout's groups, in order.
        recurrent: the recurrent states; None if no layer has one.
    """

    def __init__(self, layout: Layout, pools: Sequence[SequencePool], recurrent: RecurrentStates | None = None) -> None:
        self.layout, self.pools, self.recurrent = layout, list(pools), recurrent
        self._drafted = list[CachedSequence]()  # sequences with states of drafted tokens

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
        """A counter that grows whenever a sequence takes, shares or frees blocks, and whenever a checkpoint is added or
        dropped."""
        recurrent = 0 if self.recurrent is None else self.recurrent.changes
        return recurrent + sum(blocks.changes for pool in self.pools for blocks in pool.pools.values())

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Additional blocks that ``sequence`` needs to grow to ``start`` tokens by a prompt, then to ``capacity`` by
        decoding."""
        return self.layout.joined(
            pool.growth(sequence.of_group(number), start, capacity) for number, pool in enumerate(self.pools)
        )

    def demand(self, outlines: Sequence[Outline], start: int, capacity: int) -> Blocks:
        """Blocks that ``restore`` takes for these arguments."""
        return self.layout.joined(
            pool.demand(outline, start, capacity) for pool, outline in zip(self.pools, outlines, strict=True)
        )

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released, because only they hold them."""
        held = list(sequences)
        return self.layout.joined(
            pool.held(sequence.of_group(number) for sequence in held) for number, pool in enumerate(self.pools)
        )

    def allocate(self, start: int, capacity: int, checkpoints: bool = True) -> CachedSequence:
        """Makes a new, empty sequence. ``checkpoints`` says whether its prompts leave checkpoints of recurrent states.
        Raises OutOfBlocks and then takes nothing."""
        sequence = self.restore([Outline()] * len(self.pools), start, capacity)
        sequence.recurrent.keeps = checkpoints
        return sequence

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked in every group."""
        while True:
            point = length
            for number, pool in enumerate(self.pools):
                point = pool.fork_point(sequence.of_group(number), point)
            if self.recurrent is not None:
                point = sequence.recurrent.fork_point(point)
            if point == length or (len(self.pools) == 1 and self.recurrent is None):
                return point
            length = point

    def fork_points(self, sequence: CachedSequence, length: int) -> list[int]:
        """Implements ``KVCache.fork_points``."""
        last = self.fork_point(sequence, length)
        earlier = sequence.recurrent.positions(last - 1)
        return [at for at in (*earlier, last) if at and self.fork_point(sequence, at) == at]

    def can_end(self, sequence: CachedSequence, length: int) -> bool:
        """Whether the pages of ``sequence`` allow a fork after ``length`` tokens. There may be no recurrent state for
        this fork."""
        points = (pool.fork_point(sequence.of_group(number), length) for number, pool in enumerate(self.pools))
        return all(point == length for point in points)

    def can_follow(self, sequence: CachedSequence, length: int) -> bool:
        """Whether the pages after ``length`` tokens can be restored into a fork at ``length``. Unlike at a fork point,
        windows of ``sequence`` may have dropped the tokens before ``length``."""
        return (
            length <= sequence.length
            and length % PAGE == 0
            and all(
                pool.layout.window is not None or pool.fork_point(sequence.of_group(number), length) == length
                for number, pool in enumerate(self.pools)
            )
        )

    def forked(self, parent: CachedSequence, length: int) -> list[Outline]:
        """The outline of a fork of ``parent``, in each group. Raises ValueError if ``length`` is not a fork point."""
        if self.recurrent is not None and parent.recurrent.fork_point(length) != length:
            raise ValueError(f"a sequence of {parent.length} tokens has no state to be forked after {length}")
        return [pool.forked(parent.of_group(number), length) for number, pool in enumerate(self.pools)]

    def fork(self, parent: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """Makes a new sequence that shares its first ``length`` tokens with ``parent``.

        Only page ids, windows and a recurrent state are copied. Raises OutOfBlocks and then takes nothing; raises
        ValueError if ``length`` is not a fork point (``fork_point``).
        """
        return self.restore(self.forked(parent, length), start, capacity, parent)

    def restore(
        self, outlines: Sequence[Outline], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> CachedSequence:
        """Makes a new sequence that begins with ``outlines``, one for each group. Arguments and errors are those of
        ``SequencePool.restore``."""
        if len(self.pools) > 1:
            self._require(self.demand(outlines, start, capacity))
        in_groups: list[CachedSequence] = []
        try:
            for number, (pool, outline) in enumerate(zip(self.pools, outlines, strict=True)):
                of_parent = None if parent is None else parent.of_group(number)
                in_groups.append(pool.restore(outline, start, capacity, of_parent))
            first, *other_groups = in_groups
            first.other_groups = tuple(other_groups)
            if parent is not None and (self.recurrent is not None or any(outline.copied for outline in outlines)):
                self.await_layers(parent)  # its windows or its recurrent state are copied
            for number, (pool, outline) in enumerate(zip(self.pools, outlines, strict=True)):
                if parent is not None and outline.copied:
                    pool.copy_window(parent.of_group(number), in_groups[number], outline.copied)
            if self.recurrent is not None:
                shared, states = outlines[0].shared, None if parent is None else parent.recurrent
                first.recurrent = self.recurrent.begin(states, shared, first.length)
        except BaseException:
            for pool, sequence in zip(self.pools, in_groups):
                pool.release(sequence)
            raise
        return first

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` the blocks of ``growth``. Raises OutOfBlocks and then takes nothing."""
        if len(self.pools) > 1:
            self._require(self.growth(sequence, start, capacity))
        for number, pool in enumerate(self.pools):
            pool.extend(sequence.of_group(number), start, capacity)
        if self.recurrent is not None:
            self.recurrent.resume(sequence.recurrent, sequence.length)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Removes the tokens after the first ``length``. Raises ValueError unless ``length`` is from
        ``CachedSequence.fixed`` to the sequence's length."""
        if sequence.recurrent.ring:
            sequence.recurrent.since = sequence.recurrent.fixed(sequence.length)
        for number, pool in enumerate(self.pools):
            pool.truncate(sequence.of_group(number), length)

    def step_states(self, sequences: Sequence[CachedSequence], counts: Sequence[int] | None) -> np.ndarray | None:
        """Returns the rows of recurrent states, int64 [2, B], that a decode step reads and writes; None if no layer has
        a recurrent state. ``counts`` is as for ``KVCache.plan_decode``.

        A sequence keeps a row for the state before the step and one for the state after each new token, until the next
        step is planned. So drafted tokens can be removed after the step, and no state is lost if the step fails. Raises
        ValueError if there are not enough rows for the drafted tokens.
        """
        if (states := self.recurrent) is None:
            return None
        counts = counts or [1] * len(sequences)
        lengths = self.pools[0].tables.length[[sequence.slot for sequence in sequences]].tolist()
        drafted, most = sum(counts) - len(counts), states.layout.settings.drafted
        if drafted > most:
            raise ValueError(f"{drafted} drafted tokens need a recurrent state each; there is room for {most}")
        for sequence in self._drafted:
            if sequence.recurrent.ring:
                states.resize(sequence.recurrent, sequence.length)
        self._drafted = []
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            if count > 1:
                self._drafted.append(sequence)
                states.resize(sequence.recurrent, length, count + 1)
                sequence.recurrent.since = length
        rings = [sequence.recurrent.ring for sequence in sequences]
        rows = [
            (ring[at % len(ring)], ring[(at + 1) % len(ring)])
            for ring, length, count in zip(rings, lengths, counts, strict=True)
            for at in range(length, length + count)
        ]
        return np.ascontiguousarray(np.array(rows, np.int64).T)

    def trim(self, sequence: CachedSequence) -> None:
        """Frees the blocks that a finished sequence holds for future tokens. The sequence can be extended again."""
        for number, pool in enumerate(self.pools):
            pool.trim(sequence.of_group(number))
        if self.recurrent is not None:
            self.recurrent.pause(sequence.recurrent, sequence.length)

    def release(self, sequence: CachedSequence) -> None:
        """Frees all blocks of a sequence. The sequence must not be used again."""
        if self.recurrent is not None:
            self.recurrent.release(sequence.recurrent)
        for number, pool in enumerate(self.pools):
            pool.release(sequence.of_group(number))

    def await_layers(self, sequence: CachedSequence) -> None:
        """Makes later work on the current stream wait until all layers of a restored sequence have arrived."""
        self.pools[0].await_layers(sequence)

    def _require(self, need: Blocks) -> None:
        if not need.within(self.free):
            raise OutOfBlocks(f"the sequence needs {need}; {self.free} are free")
