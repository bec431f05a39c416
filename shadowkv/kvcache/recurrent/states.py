"""``RecurrentStates``: the states of all sequences, and checkpoints of them. ``SequencePools`` and ``KVCache`` use it.

A state cannot be cut to fewer tokens. To fork or continue a sequence after fewer tokens than it has, there must be a
*checkpoint*: a copy of the state after that many tokens. Checkpoints use the memory that growing sequences leave free.
The least recently used checkpoint is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from shadowkv.kvcache.memory.arenas import OutOfBlocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.recurrent.layout import CHECKPOINT_EVERY, RING, RecurrentLayout


@dataclass(eq=False)
class Checkpoint:
    """The state after the first ``position`` tokens. Sequences that begin with these tokens share it.

    Attributes:
        row: the row of the states; None after the checkpoint was dropped.
        users: number of sequences and readings that use the checkpoint.
        readings: number of snapshots for which the checkpoint is being read. It is not dropped before these readings
            end.
    """

    position: int
    row: int | None
    users: int = 1
    readings: int = 0


@dataclass(eq=False)
class RecurrentSequence:
    """The states of one sequence.

    Attributes:
        ring: rows of the newest states: the state after n tokens is in row ``ring[n % len(ring)]``. There are ``RING``
            rows, and more after a step with drafted tokens. Empty while the sequence does not grow.
        since: the smallest number of tokens after which the ring can have a state. Removing tokens does not change
            which states the ring has.
        checkpoints: the checkpoints, by ascending position. Some of them may have been dropped (``row`` is None).
        pending: checkpoints that a running prefill writes.
        keeps: whether prefills write checkpoints, from which other sequences can begin.
    """

    ring: list[int] = field(default_factory=list)
    since: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    pending: list[Checkpoint] = field(default_factory=list)
    keeps: bool = True

    def row(self, length: int) -> int:
        """The row of the state after ``length`` tokens, which is one of the newest states or the one that is written
        next."""
        return self.ring[length % len(self.ring)]

    @property
    def restored_rows(self) -> list[int]:
        """The rows that a restored state is written to: a row of the ring, from which the sequence continues, and the
        row of a checkpoint if there is one."""
        return [self.row(self.since), *(one.row for one in self.pending if one.row is not None)]

    def at(self, position: int) -> Checkpoint | None:
        """The checkpoint after ``position`` tokens; None if there is none."""
        return next((one for one in self.checkpoints if one.position == position and one.row is not None), None)

    @property
    def exists(self) -> bool:
        """Whether the sequence has recurrent states."""
        return bool(self.ring or self.checkpoints)

    def find(self, position: int, length: int) -> int | None:
        """The row of the state after ``position`` tokens of a sequence of ``length``; None if there is none."""
        if (kept := self.at(position)) is not None:
            return kept.row
        return self.row(position) if self.ring and self.fixed(length) <= position <= length else None

    def fixed(self, length: int) -> int:
        """Number of first tokens that cannot be removed from a sequence of ``length``. It is ``length + 1`` if the
        state after all tokens is not kept either, so that the sequence cannot be continued."""
        if self.ring:
            return max(self.since, length - len(self.ring) + 1)
        return length if self.at(length) is not None else length + 1

    def fork_point(self, length: int) -> int:
        """The largest number of tokens up to ``length``, in whole pages, that has a checkpoint; else 0."""
        return max(self.positions(length), default=0)

    def positions(self, length: int) -> list[int]:
        """The positions of the checkpoints up to ``length`` tokens that are at page boundaries, in ascending order."""
        kept = {one.position for one in self.checkpoints if one.row is not None}
        return sorted(at for at in kept if at <= length and at % PAGE == 0)


class RecurrentStates:
    """The memory of recurrent states, and what each row is used for.

    Args:
        sequences: number of sequences that the cache can hold.

    Attributes:
        arrays: the states by name, [layers, rows, *shape]. The last row is for padding.
        padding: the last row.
        reserved: number of checkpoints that memory is reserved for. Further checkpoints use rows that sequences leave
            free while they do not grow.
        changes: number of times that checkpoints were added or dropped.
    """

    def __init__(self, layout: RecurrentLayout, sequences: int, device: torch.device) -> None:
        self.layout, count = layout, layout.num_states(sequences)
        self.arrays = {
            field.name: torch.zeros(len(layout.layers), count + 1, *field.shape, dtype=field.dtype, device=device)
            for field in layout.fields
        }
        self.padding, self.changes = count, 0
        self.reserved = layout.num_checkpoints(sequences)
        self._room = self.reserved  # number of further checkpoints that can be written or read at the same time
        self._of_ends = self._room // 2  # the part of the room that is kept for ends of prompts
        self._free = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[Checkpoint, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of the states in use, checkpoints included."""
        return (self.padding - len(self._free)) * self.layout.state_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoints, which are part of ``used_bytes``."""
        return (len(self._kept) + self.reserved - self._room) * self.layout.state_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all states."""
        return self.padding * self.layout.state_bytes

    def begin(self, parent: RecurrentSequence | None, shared: int, length: int) -> RecurrentSequence:
        """Makes the states of a new sequence of ``length`` tokens, which shares its first ``shared`` tokens with
        ``parent``.

        The sequence also shares the parent's checkpoints at page boundaries within these tokens. If none of these is
        the state after ``length`` tokens, and ``length`` is not 0, the caller writes that state to ``restored_rows``.
        Other sequences can use the written state after the next prefill.
        """
        before = [] if parent is None else parent.checkpoints
        whole = [one for one in before if one.position <= shared and one.position % PAGE == 0]
        sequence = RecurrentSequence([], length, [one for one in whole if one.row is not None])
        for one in sequence.checkpoints:
            one.users += 1
            self._touch(one)
        if source := sequence.at(length):
            self._resume(sequence, source)
            return sequence
        sequence.ring = self._take()
        if not length:
            self._clear(sequence.row(0))
        elif self._room and length % PAGE == 0:
            self._room -= 1
            sequence.pending.append(Checkpoint(length, self._take_row()))
        return sequence

    def resume(self, sequence: RecurrentSequence, length: int) -> None:
        """Makes a sequence of ``length`` tokens grow again. Its last state stays a checkpoint if other sequences can
        begin with it."""
        if sequence.ring:
            return
        source = sequence.at(length)
        assert source is not None and source.row is not None, f"no checkpoint after {length} tokens"
        if length % PAGE == 0 or source.readings:
            return self._resume(sequence, source)
        sequence.checkpoints.remove(source)
        del self._kept[source]
        sequence.ring, sequence.since = [source.row] * RING, length
        sequence.ring[(length + 1) % RING] = self._take_row()
        self.changes += 1

    def pause(self, sequence: RecurrentSequence, length: int) -> None:
        """Keeps a checkpoint of a sequence of ``length`` tokens, which does not grow until ``resume``."""
        if not sequence.ring:
            return
        row = sequence.row(length)
        self._free += [other for other in sequence.ring if other != row]
        sequence.ring = []
        self._keep(sequence, Checkpoint(length, row))

    def release(self, sequence: RecurrentSequence) -> None:
        """Frees the rows that no other sequence uses."""
        self._free += sequence.ring
        self._discard(sequence)
        for one in sequence.checkpoints:
            self._leave(one)
        sequence.ring, sequence.checkpoints = [], []

    def open_reading(self, checkpoint: Checkpoint) -> None:
        """Begins to read a checkpoint, which is then not dropped before ``close_reading``. Raises OutOfBlocks if there
        is no room beside the checkpoints that running prefills write and other readings read."""
        if not checkpoint.readings:
            if not self._room:
                raise OutOfBlocks("all checkpoints of recurrent states are being written or read")
            self._room -= 1
            del self._kept[checkpoint]
        checkpoint.readings += 1
        checkpoint.users += 1

    def close_reading(self, checkpoint: Checkpoint) -> None:
        """Ends what ``open_reading`` has begun."""
        checkpoint.readings -= 1
        if not checkpoint.readings:
            self._room += 1
            self._kept[checkpoint] = None
        self._leave(checkpoint)

    def plan_checkpoints(
        self, sequence: RecurrentSequence, start: int, last: int, between: bool = True
    ) -> list[Checkpoint]:
        """Plans the checkpoints that a prefill writes, as far as there is room. Returns them by ascending position. One
        is after the first ``last`` tokens. If ``between``, there is also one every ``CHECKPOINT_EVERY`` tokens between
        ``start`` and ``last``; these leave room for the ends of other prompts.

        Args:
            last: the largest number of tokens after which the sequence can be forked once the prompt is computed: where
                the next turn or another question can begin.
        """
        regular = range(start // CHECKPOINT_EVERY * CHECKPOINT_EVERY + CHECKPOINT_EVERY, last, CHECKPOINT_EVERY)
        wanted = (last, *(reversed(regular) if between else ())) if sequence.keeps else ()
        for position in wanted:
            if position > start and self._room > (0 if position == last else self._of_ends):
                self._room -= 1
                sequence.pending.append(Checkpoint(position, self._take_row()))
        sequence.pending.sort(key=lambda one: one.position)
        return list(sequence.pending)

    def resize(self, sequence: RecurrentSequence, length: int, size: int = RING) -> None:
        """Resizes the ring of a growing sequence of ``length`` tokens to ``size`` rows, at least ``RING``. The newest
        states stay. Besides ``RING`` rows for each sequence, there are ``StateSettings.drafted`` rows for all
        sequences together."""
        sequence.since = sequence.fixed(length)
        newest_first = [sequence.row(length - age) for age in range(len(sequence.ring))]
        self._free += newest_first[size:]
        rows = newest_first[:size] + [self._take_row() for _ in range(size - len(newest_first))]
        sequence.ring = [rows[(length - place) % size] for place in range(size)]

    def end_prefill(self, sequence: RecurrentSequence, length: int) -> None:
        """Keeps the checkpoints that a prefill up to ``length`` tokens has written."""
        self._room += len(sequence.pending)
        for one in sequence.pending:
            self._keep(sequence, one)
        sequence.pending, sequence.since = [], length

    def adopt(self, sequence: RecurrentSequence, other: RecurrentStates, source: RecurrentSequence) -> None:
        """Copies the newest state of ``source``, a sequence of another cache that has computed the prefill for both
        caches. Checkpoints are not copied."""
        self._discard(sequence)
        for name, array in self.arrays.items():
            array[:, sequence.row(source.since)] = other.arrays[name][:, source.row(source.since)]

    def _discard(self, sequence: RecurrentSequence) -> None:
        """Frees the rows of checkpoints that the prefill was to write but will not."""
        self._free += [one.row for one in sequence.pending if one.row is not None]
        self._room += len(sequence.pending)
        sequence.pending = []

    def _copy(self, source: int, target: int) -> None:
        for array in self.arrays.values():
            array[:, target] = array[:, source]

    def _clear(self, row: int) -> None:
        for array in self.arrays.values():
            array[:, row] = 0

    def _resume(self, sequence: RecurrentSequence, source: Checkpoint) -> None:
        row = source.row
        assert row is not None
        self._touch(source)  # so ``_take`` drops ``source`` last, and then no one writes to its row before the copy
        sequence.ring, sequence.since = self._take(), source.position
        self._copy(row, sequence.row(source.position))

    def _take(self) -> list[int]:
        """Takes rows for a ring. There is room for the rings of all sequences."""
        return [self._take_row() for _ in range(RING)]

    def _take_row(self) -> int:
        """Takes a free row. If there is none, drops the least recently used checkpoint and takes its row."""
        if not self._free:
            self._drop(next(iter(self._kept)))
        return self._free.pop()

    def _keep(self, sequence: RecurrentSequence, checkpoint: Checkpoint) -> None:
        sequence.checkpoints = [*(one for one in sequence.checkpoints if one.row is not None), checkpoint]
        self._kept[checkpoint] = None
        self.changes += 1

    def _touch(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.readings:
            self._kept.move_to_end(checkpoint)

    def _leave(self, checkpoint: Checkpoint) -> None:
        checkpoint.users -= 1
        if not checkpoint.users and checkpoint.row is not None:
            self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.row is not None
        self._free.append(checkpoint.row)
        checkpoint.row = None
        del self._kept[checkpoint]
        self.changes += 1
