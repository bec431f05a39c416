"""``Layout``: the memory layout of a policy on a model. It has the layouts of all groups of layers, and their sums.
``KVCache`` and the planner use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from shadowkv.kvcache.memory.arenas import Blocks, Field
from shadowkv.kvcache.parts import Parts, resolve
from shadowkv.kvcache.policy.shape import FULL, LayerKind, ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, KVSpec
from shadowkv.kvcache.recurrent.layout import DEFAULT_STATES, RecurrentLayout, StateSettings
from shadowkv.kvcache.sequences.group_layout import GroupLayout

EXACT = "exact"
"""Name of the group of layers that stay exact (``KVSpec.skip_layers``)."""


class Layout:
    """A policy on a model: groups of layers, each with its own pages.

    ``Blocks`` have the names ``device``, ``host``, ``states``, ``segment_slots`` and ``sequences``. For groups after
    the first, these names begin with the group's name, for example ``exact device``.

    Args:
        spec: the policy. It is resolved for ``shape``.
        shape: the model's attention sizes.
        dtype: dtype of exact keys and values, and of full-precision fields of the parts.
        max_model_len: longest sequence, in tokens.
        fetch_buffer: number of chunks in a segment's fetch buffer, as a multiple of the number of chunks that a step
            selects from the longest context: at least 1, or 0 for no buffer.
        states: settings of recurrent states.

    Attributes:
        groups: the groups. The first group has the layers with an indexer; without such layers, it has the layers that
            the policy compresses, if there are any.
        recurrent: the layers with a recurrent state; None if there are none.
        places: for each layer of the model, the number of its group, and its number within the group. Layers with a
            recurrent state count as one more group.

    Raises ValueError if the policy cannot be used.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        dtype: torch.dtype,
        max_model_len: int,
        fetch_buffer: float = FETCH_BUFFER,
        states: StateSettings = DEFAULT_STATES,
    ) -> None:
        self.spec, self.shape, self.dtype = resolve(spec, shape), shape, dtype
        self.max_model_len, self.fetch_buffer, self.states = max_model_len, fetch_buffer, states
        named = [group for group in _groups(self.spec, shape) if group[-1]]
        self.groups = tuple(
            GroupLayout(of_group, shape, kind, dtype, max_model_len, fetch_buffer, layers, name if number else "")
            for number, (name, of_group, kind, layers) in enumerate(named)
        )
        self.recurrent = RecurrentLayout.of(shape, states)
        recurrent = () if self.recurrent is None else (self.recurrent,)
        place_of = {
            layer: (number, at)
            for number, group in enumerate((*self.groups, *recurrent))
            for at, layer in enumerate(group.layers)
        }
        self.places = [place_of[layer] for layer in range(shape.num_layers)]

    @property
    def main(self) -> GroupLayout:
        """The first group."""
        return self.groups[0]

    def resized(self, max_model_len: int) -> Layout:
        """The layout for another ``max_model_len``."""
        return Layout(self.spec, self.shape, self.dtype, max_model_len, self.fetch_buffer, self.states)

    def with_fields(self, **fields: Any) -> Layout:
        """The layout for a policy with some fields of the KVSpec changed."""
        rest = self.shape, self.dtype, self.max_model_len, self.fetch_buffer, self.states
        return Layout(replace(self.spec, **fields), *rest)

    @property
    def parts(self) -> Parts:
        """The parts of the first group."""
        return self.main.parts

    @property
    def learns(self) -> bool:
        """Whether any group has fitted states."""
        return any(group.growth.learns for group in self.groups)

    @property
    def takes_drafts(self) -> bool:
        """Whether a step can append several tokens to a sequence. It cannot if there is no memory for recurrent states
        of drafted tokens, or if rows of a sequence would fetch values into the same buffer."""
        return self.most_drafted != 0 and not any(group.buffer_fields for group in self.groups)

    @property
    def host_fields(self) -> tuple[Field, ...]:
        """Fields of pages in the host tier, of all groups."""
        return tuple(field for group in self.groups for field in group.host_fields)

    @property
    def fetched_bytes(self) -> int:
        """Maximum number of bytes of one chunk's values of one kv head that are fetched from the host; 0 without
        fetching."""
        return max(group.fetched_bytes for group in self.groups)

    @property
    def paged(self) -> tuple[str, ...]:
        """Names of the tiers of pages of all groups. A cache is given memory for these tiers."""
        return tuple(_named(group, tier.name) for group in self.groups for tier in group.tiers if tier.paged)

    @property
    def bounded(self) -> tuple[str, ...]:
        """Names of the tiers in ``paged`` that belong to layers with a window. A sequence's demand for them is limited
        by the window."""
        windows = [group for group in self.groups if group.window is not None]
        return tuple(_named(group, tier.name) for group in windows for tier in group.tiers if tier.paged)

    def joined(self, of_groups: Iterable[Blocks]) -> Blocks:
        """Joins the blocks of all groups, given in order. The group's name is put before the names of its tiers. A
        sequence counts once, although it is in all groups."""
        first, *others = of_groups
        if not others:
            return first
        joined = Blocks(first)
        for group, blocks in zip(self.groups[1:], others, strict=True):
            joined.update({_named(group, kind): count for kind, count in blocks.items() if kind != "sequences"})
        return joined

    def of_group(self, number: int, blocks: Blocks) -> Blocks:
        """Returns a group's numbers of ``blocks``, under names without the group's name."""
        group = self.groups[number]
        names = [*(tier.name for tier in group.tiers), "segment_slots", "sequences"]
        return Blocks({name: blocks[_named(group, name)] for name in names})

    def bytes_per_block(self) -> Blocks:
        """Bytes of one block of each tier, and of a segment's fetch buffer (``segment_slots``), over all layers."""
        return self.joined(group.bytes_per_block() for group in self.groups)

    def tier_bytes(self, blocks: Blocks) -> Blocks:
        """Bytes of ``blocks`` by tier, over all groups."""
        unit, total = self.bytes_per_block(), Blocks()
        for kind, count in blocks.items():
            total += Blocks({kind.rpartition(" ")[2]: count * unit[kind]})
        return total

    def fixed_blocks(self, sequences: int) -> Blocks:
        """Blocks of ``sequences`` sequences that do not depend on the sequences' lengths: the sequences themselves, and
        the slots and states of segments."""
        return self.joined(group.fixed_blocks(sequences) for group in self.groups)

    def fixed_bytes(self, sequences: int) -> int:
        """Device bytes of ``fixed_blocks``, of one more slot and one more state for padding rows, and of recurrent
        states."""
        recurrent = 0 if self.recurrent is None else self.recurrent.nbytes(sequences)
        return recurrent + sum(group.fixed_bytes(sequences) for group in self.groups)

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks of a new sequence with a prompt up to ``start`` tokens and a maximum length of ``capacity`` tokens: of
        each tier, slots and states of segments, and the sequence itself."""
        return self.joined(group.demand(start, capacity) for group in self.groups)

    def most_demand(self, capacity: int) -> Blocks:
        """Maximum number of blocks of each kind that a new sequence of up to ``capacity`` tokens takes, with any
        prompt."""
        return self.joined(group.most_demand(capacity) for group in self.groups)

    @property
    def most_drafted(self) -> int | None:
        """Maximum number of drafted tokens of a decode step, of all sequences together: memory is reserved for a
        recurrent state after each of them. None if no layer has a recurrent state."""
        return None if self.recurrent is None else self.recurrent.settings.drafted

    def snapshot_bytes(self, capacity: int) -> int:
        """Maximum number of bytes of snapshots of a sequence of ``capacity`` tokens."""
        pages = sum(group.shape.num_layers * group.snapshot_layer_bytes(capacity) for group in self.groups)
        return pages if self.recurrent is None else pages + self.recurrent.snapshot_bytes(capacity)

    def snapshot_layer_bytes(self, capacity: int) -> int:
        """Maximum number of bytes of one layer of a snapshot of ``capacity`` tokens."""
        recurrent = 0 if self.recurrent is None else self.recurrent.layer_bytes
        return max(recurrent, *(group.snapshot_layer_bytes(capacity) for group in self.groups))


def _named(group: GroupLayout, kind: str) -> str:
    return f"{group.name} {kind}" if group.name else kind


def _groups(spec: KVSpec, shape: ModelShape) -> Iterator[tuple[str, KVSpec, LayerKind, list[int]]]:
    """Name, policy, kind and layers of each possible group. Groups without layers are dropped later."""
    kinds = shape.kinds or (FULL,) * shape.num_layers
    full, ends = [layer for layer, kind in enumerate(kinds) if kind == FULL], spec.skip_layers
    inner = full[ends : len(full) - ends]
    for kind in dict.fromkeys(kinds):
        if kind.indexer is not None:  # first, because most layers of such models have an indexer
            layers = [layer for layer, other in enumerate(kinds) if other == kind]
            yield "indexed", spec.of_indexer(kind.indexer), kind, layers
    yield "full", replace(spec, skip_layers=0), FULL, inner
    of_prefill = {name: value for name, value in dict(spec.settings).items() if name.startswith("prefill.")}
    exact = KVSpec(prefill=spec.prefill, settings=of_prefill)
    yield EXACT, exact, FULL, [layer for layer in full if layer not in inner]
    for kind in dict.fromkeys(kinds):
        if kind.window is not None:
            layers = [layer for layer, other in enumerate(kinds) if other == kind]
            yield f"window-{kind.window}", KVSpec(), kind, layers
