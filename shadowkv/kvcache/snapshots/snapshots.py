"""Sequences as bytes and back: snapshots of what a cache holds, for caches with any blocks, budgets and places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256

import torch

from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.spec import PREFILLS
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pools import SequencePools
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline
from shadowkv.kvcache.snapshots.contents import GroupContents
from shadowkv.kvcache.snapshots.header import Link, Snapshot, SnapshotHeader
from shadowkv.kvcache.snapshots.layers import Reading, Restoring
from shadowkv.ops.apply_rope.tables import RopeConfig

FORMAT = 1
"""Version of snapshots and of all codecs' bytes: to be incremented when either changes and no shape or dtype of a field
shows it already, as files outlive the program."""


class Snapshots:
    """Snapshots of a cache's sequences, and sequences made from snapshots.

    Attributes:
        form: what another cache must have in common with this one.
    """

    def __init__(self, pools: SequencePools, rope: RopeConfig, device: torch.device) -> None:
        self.pools, self.layout, self.device = pools, pools.layout, device
        self.form = form_of(pools.layout, rope)
        self._contents = [GroupContents(group, self.form) for group in pools.layout.groups]

    def describe(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> SnapshotHeader:
        """What a snapshot of ``sequence`` after its first ``start`` tokens, a fork point or 0, contains; found on the
        host alone. Raises ValueError where it cannot be forked there.

        Args:
            stop: tokens after which it ends, a fork point: it is then that of a fork there, however ``sequence``
                continues, and nothing in it changes any more. None for all there are, with the exact tail.
        """
        for point, possible in ((start, self.pools.can_follow), (stop, self.pools.can_fork)):
            if point and not possible(sequence, point):
                raise ValueError(f"a sequence of {sequence.length} tokens cannot be forked after {point}")
        if stop is not None and stop < start:
            raise ValueError(f"a snapshot from token {start} on cannot end after {stop}")
        first, *other_groups = enumerate(self._contents)
        headers = (contents.header(sequence.of_group(number), start, stop) for number, contents in other_groups)
        return first[1].header(sequence, start, stop, tuple(headers))

    def open_reading(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> Reading:
        """Begins to read what ``describe`` says, layer by layer; holds what it reads until it is closed.

        Raises ValueError as ``describe`` does, and where there is nothing to read.
        """
        header = self.describe(sequence, start, stop)
        if header.length == start:
            raise ValueError(f"the sequence has nothing to read behind {start} tokens")
        self.pools.await_layers(sequence)
        return Reading(self.pools, sequence, header)

    def demand(self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None) -> Blocks:
        """Blocks that ``restore`` takes; raises the same ValueErrors."""
        return self.pools.demand(self._outlines(chain, start, capacity, parent), start, capacity)

    def restore(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Restoring:
        """A new sequence from the used parts of snapshots, which are then to be written, extended to ``start`` tokens
        by a prompt and to ``capacity`` by decoding.

        Raises OutOfBlocks, with nothing taken, and ValueError where this cache stores other bytes, or where the chain
        has gaps.

        Args:
            chain: headers, and the token up to which each is used: the next one starts there. That is a point where the
                sequence can be forked; for the last one also any token that is dense or in its exact tail.
            parent: a sequence that has what comes before the chain, which is shared up to the first header's start.
        """
        outlines = self._outlines(chain, start, capacity, parent)
        if parent is not None:
            self.pools.await_layers(parent)  # the new one waits only for what is written to it
        sequence = self.pools.restore(outlines, start, capacity, parent)
        header, stop = chain[-1]
        for number, of_group in enumerate(header.of_groups):
            in_group = sequence.of_group(number)
            in_group.observed = of_group.cut(stop).observed and bool(in_group.state_reserve)
        try:
            return Restoring(self.pools, chain, sequence)
        except BaseException:  # out of memory, say: the locations to write to are copied to the device
            self.pools.release(sequence)
            raise

    def export(self, sequence: CachedSequence, start: int = 0) -> Snapshot:
        """Everything of ``sequence`` after its first ``start`` tokens (``describe``), as bytes of its own on the
        cache's device."""
        with self.open_reading(sequence, start) as reading:
            header = reading.header
            snapshot = Snapshot(header, torch.empty(header.pieces, dtype=torch.uint8, device=self.device))
            for layer in range(header.num_layers):
                reading.read_layer(layer, snapshot.layer(layer))
        return snapshot

    def load(self, snapshots: Snapshot | Sequence[tuple[Snapshot, int]], capacity: int) -> CachedSequence:
        """A new sequence from a snapshot, or from a chain of them (``restore``), that may grow to ``capacity`` tokens.

        Raises ValueError where this cache stores other bytes, OutOfBlocks, with nothing taken, where it has no room.
        """
        chain = [(snapshots, snapshots.header.length)] if isinstance(snapshots, Snapshot) else snapshots
        links = [Link(snapshot.header, stop) for snapshot, stop in chain]
        restoring = self.restore(links, links[-1].stop, capacity)
        for number, (snapshot, _) in enumerate(chain):
            for layer in range(snapshot.header.num_layers):
                restoring.write_layer(number, layer, snapshot.layer(layer).to(self.device))
        return restoring.sequence

    def stored_alike(self, other: Snapshots, tokens: int) -> bool:
        """Whether what ``other`` exports of a prompt of ``tokens`` can be loaded here."""
        specs = [group.spec for layout in (self.layout, other.layout) for group in layout.groups]
        return self.form == other.form and all(tokens > spec.dense_limit or not spec.compresses for spec in specs)

    def _outlines(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None
    ) -> list[Outline]:
        """What a sequence from a chain begins with in each group; raises ValueError where it cannot be made here."""
        if not chain:
            raise ValueError("a sequence is restored of at least one snapshot")
        for header, _ in chain:
            if header.form != self.form:
                raise ValueError(f"the sequence is stored as form {header.form}, this cache stores form {self.form}")
            if len(header.of_groups) != len(self._contents):
                raise ValueError(
                    f"the snapshot is of {len(header.of_groups)} groups of layers, not {len(self._contents)}"
                )
        before = [Outline()] * len(self._contents)
        if parent is not None:
            before = self.pools.forked(parent, chain[0][0].start)
        return [
            contents.outline([Link(header.of_groups[number], stop) for header, stop in chain], own, start, capacity)
            for number, (contents, own) in enumerate(zip(self._contents, before, strict=True))
        ]


def form_of(layout: Layout, rope: RopeConfig) -> str:
    """A digest, in 64 hexadecimal digits, of format, sizes, RoPE, fields and policy, except for how much is
    selected, how much stays exact after what is compressed, and where it is stored. Comparing weights is left to
    others."""
    forms = [_form_of_group(group, group.rope or rope) for group in layout.groups]
    if len(forms) == 1:
        return forms[0]
    of_groups = [(form, group.layers) for form, group in zip(forms, layout.groups, strict=True)]
    return sha256(json.dumps(of_groups).encode()).hexdigest()


def _form_of_group(layout: GroupLayout, rope: RopeConfig) -> str:
    spec = replace(layout.spec, budget=None, mass=None, sampled=0.0, local=1, place="device")
    spec = replace(spec, prefill=spec.prefill or PREFILLS[0])
    error = None if spec.prefill == "dense" else float(spec.prefill_error)  # what a dense one has is of no account
    fields = (*layout.compressed_fields, *layout.host_fields, *layout.state_fields)
    form = {
        "format": FORMAT,
        "spec": spec.as_dict() | {"prefill_error": error},
        # What key_bias decides is in the policy, and sinks are in no page.
        "shape": {
            name: value
            for name, value in asdict(layout.shape).items()
            if value != () and name not in ("key_bias", "sinks")
        },
        "rope": asdict(rope),
        "dtype": str(layout.dtype),
        "fields": sorted((field.name, field.shape, str(field.dtype)) for field in fields),
    }
    if layout.window is not None:
        form["window"] = layout.window
    return sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
