"""``SequencePool``: lifetimes of sequences in a group of layers. It takes and frees blocks, slots and states, from
admission to release.

From the start, a sequence holds all that it can need up to its capacity. So decoding never allocates and never runs out
of memory. Sequences can share compressed pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from shadowkv.kvcache.memory.arenas import BlockPool, Blocks, OutOfBlocks
from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS, SegmentState
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import PageCount
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline, Segment, Tables
from shadowkv.kvcache.sequences.store import GroupStore, exact_rows


class SequencePool:
    """The slots, states and pages of all sequences in a group of layers.

    Args:
        store: memory of the group.
        slots: number of sequences that the pool can hold.
        max_model_len: longest sequence, in tokens.

    Attributes:
        tables: the page tables, and the numbers of all sequences and segments.
        pools: pools of blocks by name: the tiers, ``segment_slots`` and ``sequences``.
    """

    def __init__(self, store: GroupStore, slots: int, max_model_len: int) -> None:
        self.store, self.layout, self.max_model_len = store, store.layout, max_model_len
        fixed, longest = self.layout.fixed_blocks(slots), self.layout.most_pages(max_model_len)
        self.pools: dict[str, BlockPool] = {
            **store.tiers,
            **{name: BlockPool(name, fixed[name]) for name in ("segment_slots", "sequences")},
        }
        per_block = self.layout.exact_per_block
        spec, later = self.layout.spec, MAX_SEGMENTS - 1 if self.layout.growth.learns else 0
        exact = max(longest.dense + per_block, spec.static_pages + later * spec.outlier_pages + longest.ring)
        spare_state = store.tiers["states"].spare
        self.tables = Tables(
            slots, fixed["segment_slots"], exact, max(1, longest.compressed), spare_state, store.compute
        )
        self.tables.exact[self.tables.padding_slot, 0] = store.tiers["device"].spare
        self.tables.pages[self.tables.padding_segment_slot, 0] = store.tiers["device"].spare
        values = store.tiers["host" if self.layout.host_fields else "device"]
        self.tables.value_pages[self.tables.padding_segment_slot, 0] = values.spare

    @property
    def total(self) -> Blocks:
        """All blocks, by kind."""
        return Blocks({name: pool.num_blocks for name, pool in self.pools.items()})

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds, by kind."""
        return Blocks({name: pool.free_blocks for name, pool in self.pools.items()})

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Additional blocks that ``sequence`` needs to grow to ``start`` tokens by a prompt, then to ``capacity`` by
        decoding."""
        return self.layout.blocks(self._lacking(sequence, start, capacity))

    def demand(self, outline: Outline, start: int, capacity: int) -> Blocks:
        """Blocks that ``restore`` takes for these arguments."""
        shared = sum(span.first < outline.shared for span in outline.spans)
        return self.layout.blocks(self._pages_of(outline, start, capacity)) + Blocks(sequences=1, segment_slots=shared)

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        """Makes a new, empty sequence. Raises OutOfBlocks and then takes nothing."""
        return self.restore(Outline(), start, capacity)

    def fork(self, parent: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """Makes a new sequence that shares its first ``length`` tokens with ``parent``.

        Only page ids are copied. Raises OutOfBlocks and then takes nothing; raises ValueError if ``length`` is not a
        fork point (``fork_point``).
        """
        return self.restore(self.forked(parent, length), start, capacity, parent)

    def forked(self, parent: CachedSequence, length: int) -> Outline:
        """The outline of a fork of ``parent``. Raises ValueError if ``length`` is not a fork point."""
        if not length or self.fork_point(parent, length) != length:
            raise ValueError(f"a sequence of {parent.length} tokens cannot be forked after {length}")
        if self.layout.window is not None:  # a window is copied and not shared
            return Outline(length=length, copied=length)
        return Outline.fork(parent, length)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked. It is a page boundary.

        With outliers, a fork cannot divide the pages that were compressed when their segment was fitted, because the
        segment's outliers are chosen from all of these pages.
        """
        if not sequence.path:
            point = min(length, sequence.length) // PAGE * PAGE
            return point if not sequence.oldest or point >= sequence.oldest + (sequence.window or 0) else 0
        point = min(length, sequence.compressed) // PAGE * PAGE
        if self.layout.spec.outliers:
            ends = (min(point, segment.compressed) for segment in sequence.path if segment.fitted <= point)
            return max(ends, default=0)
        return point

    def restore(
        self, outline: Outline, start: int, capacity: int, parent: CachedSequence | None = None
    ) -> CachedSequence:
        """Makes a new sequence that begins with ``outline`` and has room for a prompt up to ``start`` tokens, and for
        ``capacity`` tokens in all. The caller writes the contents of its pages, except for those that it shares with
        ``parent``.

        Raises OutOfBlocks and then takes nothing; raises ValueError if the sequence would be too long.
        """
        if not outline.length <= start <= capacity <= self.max_model_len:
            length, limit = outline.length, self.max_model_len
            raise ValueError(f"{length=} <= {start=} <= {capacity=} <= max_model_len={limit} does not hold")
        new, need = self._pages_of(outline, start, capacity), self.demand(outline, start, capacity)
        exact = new.ring + sum(-(-span.static_tokens // PAGE) for span in outline.spans)
        widths = self.tables.exact.shape[1], self.tables.pages.shape[1]
        if exact > widths[0] or outline.compressed > PAGE * widths[1]:
            raise ValueError(
                f"{outline.compressed} compressed tokens and {exact} exact pages are more than the "
                f"{PAGE * widths[1]} and {widths[0]} that a sequence of this cache can have"
            )
        if not need.within(self.free):
            raise OutOfBlocks(f"the sequence needs {need}; {self.free} are free")
        (slot,) = self.pools["sequences"].allocate(1)
        sequence = CachedSequence(self.tables, slot, capacity, window=self.layout.window)
        if parent is not None and outline.shared:
            self._share(parent, sequence, outline.shared)
        self._take(sequence, new)
        if self.layout.window is not None:
            sequence.begin = sequence.window_start(outline.length)
        for number, span in enumerate(outline.spans):
            if number == len(sequence.path):
                self._begin(sequence, span.first, span.end, span.valid_until, span.static_tokens)
            segment = sequence.path[number]
            segment.end, segment.valid_until, segment.fitted = span.end, span.valid_until, span.fitted
            self._use_reserve(sequence, span.num_pages - len(segment.pages))
        self.tables.length[slot] = outline.length
        self._write(sequence)
        return sequence

    def copy_window(self, parent: CachedSequence, child: CachedSequence, length: int) -> None:
        """Copies the window of ``parent`` before position ``length`` to the fork ``child``, because each of the two
        sequences will overwrite its window."""
        numbers, first = Numbers(), parent.window_start(length)
        rows = [exact_rows(numbers, sequence.dense, first, length) for sequence in (parent, child)]
        on_device, layers = numbers.on(self.store.compute), slice(0, self.layout.shape.num_layers)
        source, target = (locate(on_device) for locate in rows)
        self.store.write_tokens(layers, target, *self.store.read_exact(layers, source))

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` the blocks of ``growth``. Raises OutOfBlocks and then takes nothing."""
        if not start <= capacity <= self.max_model_len:
            raise ValueError(f"{start=} <= {capacity=} <= max_model_len={self.max_model_len} does not hold")
        if sequence.path and max(sequence.readings, default=0) > sequence.compressed:
            raise ValueError("the sequence cannot be extended while its exact tail is read")
        self._take(sequence, self._lacking(sequence, start, capacity))
        sequence.capacity = capacity
        self._write(sequence)

    def await_layers(self, sequence: CachedSequence) -> None:
        """Makes later work on the current stream wait until all layers of a restored sequence have arrived."""
        if sequence.pending_layers is not None:
            sequence.pending_layers.wait(self.layout.model_layers - 1)
            sequence.pending_layers = None

    def begin_segment(self, sequence: CachedSequence, end: int) -> None:
        """Appends a segment after the compressed tokens. Its state is to be fitted on tokens up to ``end``.

        The segment uses only reserves, which the sequence has held from the start. So an answer does not depend on
        other sequences.
        """
        spec, first, number = self.layout.spec, sequence.compressed, len(sequence.path) + 1
        tokens = spec.static_tokens if number == 1 else spec.outliers * spec.chunk
        self._begin(sequence, first, end, self.layout.growth.valid_until(number, first, end), tokens)

    def _begin(self, sequence: CachedSequence, first: int, end: int, valid_until: int, static_tokens: int) -> None:
        static = -(-static_tokens // PAGE)
        segment = Segment(
            slot=sequence.slot_reserve.pop(0),
            state=sequence.state_reserve.pop(0) if self.layout.growth.learns else None,
            first=first,
            end=end,
            valid_until=valid_until,
            static=sequence.static_reserve[:static],
            static_tokens=static_tokens,
        )
        del sequence.static_reserve[:static]
        sequence.path.append(segment)
        if self.store.buffer is not None:
            self.store.buffer.reset(segment.slot)  # enough once: a segment's compressed chunks never change

    def drop_segment(self, sequence: CachedSequence) -> None:
        """Undoes ``begin_segment``."""
        segment = sequence.path.pop()
        sequence.slot_reserve.insert(0, segment.slot)
        if segment.state is not None:
            sequence.state_reserve.insert(0, segment.state)
        sequence.static_reserve[:0] = segment.static

    def compress(self, sequence: CachedSequence, compressed: int) -> None:
        """Records that tokens up to position ``compressed`` are compressed. The pages that hold them move from the
        reserve to the last segment."""
        last = sequence.path[-1]
        new = not last.pages
        self._use_reserve(sequence, (compressed - last.compressed) // PAGE)
        if not new:
            self.tables.compressed[sequence.slot] = self.tables.end[last.slot] = compressed
            return
        last.fitted = compressed
        self.pools["device"].release(self.pools["device"].blocks_of(sequence.dense))
        sequence.dense = []
        self._write(sequence)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Removes the tokens after the first ``length``. Raises ValueError unless ``length`` is from
        ``CachedSequence.fixed`` to the sequence's length."""
        if not sequence.fixed <= length <= sequence.length:
            raise ValueError(
                f"cannot cut the sequence to {length} tokens: it has {sequence.length}, of which {sequence.fixed} are "
                "compressed or shared, or needed by its windows or recurrent state"
            )
        sequence.begin = 0 if sequence.window is None else sequence.oldest
        self.tables.length[sequence.slot] = length

    def trim(self, sequence: CachedSequence) -> None:
        """Frees the blocks that a finished sequence holds for future tokens. The sequence can be extended again."""
        self.await_layers(sequence)
        sequence.capacity, sequence.observed = (length := sequence.length), False
        unused = slice(-(-length // PAGE), None)
        spare, sequence.dense[unused] = sequence.dense[unused], []
        exact = sequence.static_reserve
        if not sequence.path:
            exact, sequence.ring = exact + sequence.ring, []
        more, sequence.compressed_reserve, sequence.static_reserve = self._drop(
            sequence, spare, sequence.compressed_reserve, exact
        )
        sequence.dense += more
        for kind, reserve in (
            ("segment_slots", sequence.slot_reserve),
            ("states", sequence.state_reserve),
            ("host", sequence.host_reserve),
        ):
            self.pools[kind].release(reserve)
            reserve.clear()
        self._write(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Frees all blocks of a sequence. The sequence must not be used again."""
        if sequence.pending_layers is not None:
            sequence.pending_layers.end()
        self.pools["device"].release(self.pools["device"].blocks_of(sequence.device_pages()))
        for kind, held in self._counted(sequence):
            self.pools[kind].release(held)
        self.tables.clear(sequence.slot)
        self.pools["sequences"].release([sequence.slot])

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released, because only they hold them."""
        blocks: dict[str, Counter[int]] = {kind: Counter() for kind in self.pools}
        for sequence in sequences:
            blocks["sequences"].update([sequence.slot])
            blocks["device"].update(self.pools["device"].blocks_of(sequence.device_pages()))
            for kind, held in self._counted(sequence):
                blocks[kind].update(held)
        return Blocks(
            {
                kind: sum(count == self.pools[kind].references(block) for block, count in counts.items())
                for kind, counts in blocks.items()
            }
        )

    def _counted(self, sequence: CachedSequence) -> list[tuple[str, list[int]]]:
        """The blocks of a sequence that hold one item each: segment slots, states and host pages. Blocks of the device
        tier can hold several pages."""
        path, host = sequence.path, self.layout.host_fields
        return [
            ("segment_slots", sequence.slot_reserve + [segment.slot for segment in path]),
            ("states", sequence.state_reserve + [segment.state for segment in path if segment.state is not None]),
            ("host", sequence.host_reserve + [page_id for one in path if host for page_id in one.value_pages]),
        ]

    def _drop(self, sequence: CachedSequence, *reserves: list[int]) -> list[list[int]]:
        """Frees the blocks that hold only pages of ``reserves``. Returns the remaining pages of each reserve."""
        device = self.pools["device"]
        kept = set(device.blocks_of(sequence.device_pages(reserves=False)))
        dropped = [block for block in device.blocks_of(chain.from_iterable(reserves)) if block not in kept]
        device.release(dropped)
        return [[page_id for page_id in part if device.block_of(page_id) in kept] for part in reserves]

    def _share(self, parent: CachedSequence, child: CachedSequence, length: int) -> None:
        """Makes ``child`` share the first ``length`` tokens of ``parent``. If the parent's layers are still being
        restored, the child waits for them too."""
        child.pending_layers = parent.pending_layers
        segments = [segment for segment in parent.path if segment.first < length]
        slots = self.pools["segment_slots"].allocate(len(segments))
        child.path = [segment.prefix(slot, length) for segment, slot in zip(segments, slots)]
        child.dense = parent.dense[: length // PAGE] if not segments else []
        parent.shared, child.shared = max(parent.shared, length), length
        self.tables.length[child.slot] = length
        self.pools["device"].retain(self.pools["device"].blocks_of(child.device_pages()))
        for kind, shared in self._counted(child):
            if kind != "segment_slots":
                self.pools[kind].retain(shared)
        if self.store.buffer is not None:
            for slot in slots:
                self.store.buffer.reset(slot)

    def _use_reserve(self, sequence: CachedSequence, count: int) -> None:
        """Moves the first ``count`` pages of the reserve to the last segment."""
        last = sequence.path[-1]
        last.pages += sequence.compressed_reserve[:count]
        last.value_pages += (sequence.host_reserve if self.layout.host_fields else sequence.compressed_reserve)[:count]
        del sequence.compressed_reserve[:count], sequence.host_reserve[:count]

    def _take(self, sequence: CachedSequence, new: PageCount) -> None:
        """Adds the pages of ``new`` to the reserves. Raises OutOfBlocks and then takes nothing."""
        count = self.layout.blocks(new)
        if not count.within(self.free):
            raise OutOfBlocks(f"the sequence needs {count}; {self.free} are free")
        device, per_block = self.pools["device"], self.layout.exact_per_block
        sequence.dense += self.store.exact_page_ids(device.allocate(-(-new.dense // per_block)))
        exact = self.store.exact_page_ids(device.allocate(-(-(new.static + new.ring) // per_block)))
        self._widen_ring(sequence, exact[: new.ring])
        sequence.static_reserve += exact[new.ring :]
        compressed = -(-new.compressed // self.layout.compressed_per_block) if new.compressed else 0
        sequence.compressed_reserve += self.store.compressed_page_ids(device.allocate(compressed))
        sequence.host_reserve += self.pools["host"].allocate(count["host"])
        sequence.slot_reserve += self.pools["segment_slots"].allocate(count["segment_slots"])
        sequence.state_reserve += self.pools["states"].allocate(count["states"])

    def _lacking(self, sequence: CachedSequence, start: int, capacity: int) -> PageCount:
        at = sequence.segment_state
        return self.layout.pages(self._prompted(at, sequence.length, start), capacity, at).lacking(sequence.owned)

    def _pages_of(self, outline: Outline, start: int, capacity: int) -> PageCount:
        """Pages of a sequence that begins with ``outline``, without the shared ones."""
        if self.layout.window is not None:
            return self.layout.pages(start, capacity)
        compressed, shared, spans = outline.compressed // PAGE, outline.shared // PAGE, outline.spans
        own = [span for span in spans if span.first >= outline.shared]
        has = PageCount(
            dense=0 if spans else -(-outline.length // PAGE),
            ring=-(-(outline.length - outline.compressed + 1) // PAGE) if spans else 0,  # with the next token
            compressed=compressed,
            host=compressed if self.layout.host_fields else 0,
        )
        at = outline.segment_state
        lacking = self.layout.pages(self._prompted(at, outline.length, start), capacity, at).lacking(has)
        return lacking + PageCount(
            dense=0 if spans else has.dense - shared,
            static=sum(-(-span.static_tokens // PAGE) for span in own),
            ring=has.ring,
            compressed=compressed - shared if spans else 0,
            host=compressed - shared if has.host else 0,
            segments=len(own),
        )

    def _prompted(self, at: SegmentState, length: int, start: int) -> int:
        """Returns the number of prompt tokens to plan pages for, in a sequence of ``length`` tokens that is extended to
        ``start``. If no prompt follows, it is at most ``dense_limit`` for a dense sequence, because such a sequence can
        stay dense up to ``late_limit``."""
        return start if at.segments or start > length else min(start, self.layout.spec.dense_limit)

    def _widen_ring(self, sequence: CachedSequence, more: list[int]) -> None:
        """Adds pages to the ring. The pages of the tail move to their places in the wider ring."""
        old = sequence.ring
        ring: list[int | None] = [None] * (len(old) + len(more))
        for number in range(sequence.compressed // PAGE, -(-sequence.length // PAGE)) if old and sequence.path else ():
            ring[number % len(ring)] = old[number % len(old)]
        placed = set(ring)
        free = iter([page_id for page_id in (*old, *more) if page_id not in placed])
        sequence.ring = [next(free) if page_id is None else page_id for page_id in ring]

    def _write(self, sequence: CachedSequence) -> None:
        self.tables.write(sequence)
        self.tables.write_exact(sequence)
        self.tables.write_pages(sequence, bool(self.layout.host_fields))
