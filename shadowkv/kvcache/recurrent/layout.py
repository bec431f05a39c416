"""``RecurrentLayout``: the layers of a model that keep a recurrent state, and the bytes of the states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shadowkv.kvcache.policy.shape import ModelShape, StateArray

RING = 2
"""Number of states that a growing sequence holds: those after each of its newest tokens. So the newest token can be
removed again. This is necessary when a step was launched ahead."""

CHECKPOINT_EVERY = 8192
"""Prompt tokens between two checkpoints."""


@dataclass(frozen=True)
class RecurrentLayout:
    """The layers with a recurrent state, which all have the same arrays.

    Attributes:
        layers: their numbers in the model.
        arrays: arrays of one sequence's state in one layer.
        checkpoints: number of checkpoints that memory is reserved for; None for one for each sequence that a cache can
            hold.
    """

    layers: tuple[int, ...]
    arrays: tuple[StateArray, ...]
    checkpoints: int | None = None

    @classmethod
    def of(cls, shape: ModelShape, checkpoints: int | None = None) -> RecurrentLayout | None:
        """The layout of a model's layers; None if all have attention."""
        layers = tuple(number for number, kind in enumerate(shape.kinds) if kind.state)
        return cls(layers, shape.kinds[layers[0]].state, checkpoints) if layers else None

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all layers."""
        return len(self.layers) * sum(4 * math.prod(array.shape) for array in self.arrays)

    def snapshot_bytes(self, tokens: int) -> int:
        """Most bytes of the states in snapshots of a sequence of ``tokens`` tokens: at its end and every
        ``CHECKPOINT_EVERY`` tokens."""
        return (1 + tokens // CHECKPOINT_EVERY) * len(self.layers) * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Most bytes of a state in one layer of a snapshot, where fields are aligned."""
        return -(-sum(4 * math.prod(array.shape) + 16 for array in self.arrays) // 256) * 256

    def num_checkpoints(self, sequences: int) -> int:
        """Number of checkpoints that memory is reserved for, in a cache of ``sequences`` sequences."""
        return sequences if self.checkpoints is None else self.checkpoints

    def num_states(self, sequences: int) -> int:
        """Number of states of ``sequences`` sequences and checkpoints."""
        return sequences * RING + self.num_checkpoints(sequences)

    def nbytes(self, sequences: int) -> int:
        """Bytes of these states, with one more for padding rows."""
        return (self.num_states(sequences) + 1) * self.state_bytes
