"""What a cache stores of a model: its groups of layers, and the numbers that they have together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from shadowkv.kvcache.memory.arenas import Blocks, Field
from shadowkv.kvcache.parts import Parts, resolve
from shadowkv.kvcache.policy.shape import FULL, LayerKind, ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, KVSpec
from shadowkv.kvcache.sequences.group_layout import GroupLayout

EXACT = "exact"
"""Name of the group of layers that a policy leaves exact (``KVSpec.skip_layers``)."""


class Layout:
    """A policy on a model: groups of layers that are alike, each with pages of its own. All that is counted, planned
    and stored.

    Numbers of blocks are named by what they are of: ``device``, ``host``, ``states``, ``segment_slots`` and
    ``sequences``; those of other groups also by the group: ``exact device``.

    Args:
        spec: the policy; resolved here for ``shape``, which raises ValueError where it cannot be used.
        shape: the model's attention sizes.
        dtype: dtype of exact keys and values and of what the parts store at full precision.
        max_model_len: longest sequence, in tokens.
        fetch_buffer: chunks of a segment's buffer of fetched values, as a multiple of those that a step selects from
            the longest context: at least 1, or 0 for no buffer.

    Attributes:
        groups: the groups; the first one is what the policy is about, unless there are no layers for it.
        places: for each layer of the model, the number of its group and which of the group's layers it is.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        dtype: torch.dtype,
        max_model_len: int,
        fetch_buffer: float = FETCH_BUFFER,
    ) -> None:
        self.spec, self.shape, self.dtype = resolve(spec, shape), shape, dtype
        self.max_model_len, self.fetch_buffer = max_model_len, fetch_buffer
        named = [group for group in _groups(self.spec, shape) if group[-1]]
        self.groups = tuple(
            GroupLayout(of_group, shape, kind, dtype, max_model_len, fetch_buffer, layers, name if number else "")
            for number, (name, of_group, kind, layers) in enumerate(named)
        )
        place_of = {layer: (n, at) for n, group in enumerate(self.groups) for at, layer in enumerate(group.layers)}
        self.places = [place_of[layer] for layer in range(shape.num_layers)]

    @property
    def main(self) -> GroupLayout:
        """The first group."""
        return self.groups[0]

    def resized(self, max_model_len: int) -> Layout:
        """The same layout for another ``max_model_len``."""
        return Layout(self.spec, self.shape, self.dtype, max_model_len, self.fetch_buffer)

    def with_fields(self, **fields: Any) -> Layout:
        """The same layout for another policy: with these fields of a KVSpec, all others as they are."""
        return Layout(replace(self.spec, **fields), self.shape, self.dtype, self.max_model_len, self.fetch_buffer)

    @property
    def parts(self) -> Parts:
        """The parts of the first group."""
        return self.main.parts

    @property
    def learns(self) -> bool:
        """Whether any group has fitted states."""
        return any(group.growth.learns for group in self.groups)

    @property
    def selecting(self) -> list[int]:
        """The layers in which a step attends to a part of what is compressed."""
        return sorted(layer for group in self.groups if group.spec.selects for layer in group.layers)

    @property
    def host_fields(self) -> tuple[Field, ...]:
        """Fields of pages in the host tier, of all groups."""
        return tuple(field for group in self.groups for field in group.host_fields)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the values of one chunk and kv head that are fetched from the host, at most; 0 where none are."""
        return max(group.fetched_bytes for group in self.groups)

    @property
    def paged(self) -> tuple[str, ...]:
        """The tiers of pages, of every group: what a cache is given memory for."""
        return tuple(_named(group, tier.name) for group in self.groups for tier in group.tiers if tier.paged)

    @property
    def bounded(self) -> tuple[str, ...]:
        """Those of ``paged`` of which a sequence takes no more however long it is: windows."""
        windows = [group for group in self.groups if group.window is not None]
        return tuple(_named(group, tier.name) for group in windows for tier in group.tiers if tier.paged)

    def joined(self, of_groups: Iterable[Blocks]) -> Blocks:
        """Numbers of blocks of all groups, in order, under their names here. A sequence is one in all of them."""
        first, *others = of_groups
        if not others:
            return first
        joined = Blocks(first)
        for group, blocks in zip(self.groups[1:], others, strict=True):
            joined.update({_named(group, kind): count for kind, count in blocks.items() if kind != "sequences"})
        return joined

    def of_group(self, number: int, blocks: Blocks) -> Blocks:
        """The numbers of a group among ``blocks``, under their own names."""
        group = self.groups[number]
        names = [*(tier.name for tier in group.tiers), "segment_slots", "sequences"]
        return Blocks({name: blocks[_named(group, name)] for name in names})

    def bytes_per_block(self) -> Blocks:
        """Bytes of one block of each tier over all layers, and of a segment's slot: its buffer of fetched values."""
        return self.joined(group.bytes_per_block() for group in self.groups)

    def tier_bytes(self, blocks: Blocks) -> Blocks:
        """Bytes of ``blocks`` by tier, over all groups."""
        unit, total = self.bytes_per_block(), Blocks()
        for kind, count in blocks.items():
            total += Blocks({kind.rpartition(" ")[2]: count * unit[kind]})
        return total

    def fixed_blocks(self, sequences: int) -> Blocks:
        """What that many sequences of any length have: their numbers, and slots and states of segments."""
        return self.joined(group.fixed_blocks(sequences) for group in self.groups)

    def fixed_bytes(self, sequences: int) -> int:
        """Device bytes of that; one more of each pads captured batches."""
        return sum(group.fixed_bytes(sequences) for group in self.groups)

    def demand(self, start: int, capacity: int) -> Blocks:
        """What a new sequence takes whose prompt reaches ``start`` tokens and that may grow to ``capacity`` tokens:
        blocks of each tier, slots and states of segments, and its own slot."""
        return self.joined(group.demand(start, capacity) for group in self.groups)

    def most_demand(self, capacity: int) -> Blocks:
        """The most of each that a new sequence of up to ``capacity`` tokens takes, however long its prompt is."""
        return self.joined(group.most_demand(capacity) for group in self.groups)

    def snapshot_bytes(self, capacity: int) -> int:
        """Bytes of a snapshot of ``capacity`` tokens, at most."""
        return sum(group.shape.num_layers * group.snapshot_layer_bytes(capacity) for group in self.groups)

    def snapshot_layer_bytes(self, capacity: int) -> int:
        """The same for any of its layers."""
        return max(group.snapshot_layer_bytes(capacity) for group in self.groups)


def _named(group: GroupLayout, kind: str) -> str:
    return f"{group.name} {kind}" if group.name else kind


def _groups(spec: KVSpec, shape: ModelShape) -> Iterator[tuple[str, KVSpec, LayerKind, list[int]]]:
    """Name, policy, kind and layers of each group; some may have no layers."""
    kinds = shape.kinds or (FULL,) * shape.num_layers
    full, ends = [layer for layer, kind in enumerate(kinds) if kind == FULL], spec.skip_layers
    inner = full[ends : len(full) - ends]
    yield "", replace(spec, skip_layers=0), FULL, inner
    exact = KVSpec(prefill=spec.prefill, prefill_error=spec.prefill_error)
    yield EXACT, exact, FULL, [layer for layer in full if layer not in inner]
    for kind in dict.fromkeys(kinds):
        if kind.window is not None:
            layers = [layer for layer, other in enumerate(kinds) if other == kind]
            yield f"window-{kind.window}", KVSpec(), kind, layers
