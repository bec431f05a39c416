"""``RecurrentLayout``: the layers of a model that keep a recurrent state, and the bytes of the states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.policy.shape import ModelShape, StateArray

RING = 2
"""Number of states that a growing sequence holds: one after each of its newest tokens. The newest token can therefore
be removed again. This is necessary if its step was launched before the results of the step before it were known. A step
with drafted tokens adds a state for each of them."""

CHECKPOINT_EVERY = 8192
"""Prompt tokens between two checkpoints."""


@dataclass(frozen=True)
class StateSettings:
    """Settings of recurrent states that an engine chooses.

    Attributes:
        checkpoints: number of checkpoints that memory is reserved for; None reserves memory for as many checkpoints as
            the cache can hold sequences.
        dtype: dtype of the arrays that accumulate sums over tokens (``StateArray.sums``): float32 or bfloat16.
        drafted: maximum number of drafted tokens of a decode step, of all sequences together. Memory is reserved for a
            state after each of them.
    """

    checkpoints: int | None = None
    dtype: torch.dtype = torch.float32
    drafted: int = 0

    @classmethod
    def of(cls, checkpoints: int | None, dtype: str, drafted: int) -> StateSettings:
        """Makes settings from values of command-line flags. ``dtype`` is one of ``STATE_DTYPES``."""
        return cls(checkpoints, torch.float32 if dtype == "auto" else getattr(torch, dtype), drafted)


DEFAULT_STATES = StateSettings()


@dataclass(frozen=True)
class RecurrentLayout:
    """The layers with a recurrent state, which all have the same arrays.

    Attributes:
        layers: the layers' numbers in the model.
        arrays: arrays of one sequence's state in one layer.
        settings: the settings that the engine chooses.
    """

    layers: tuple[int, ...]
    arrays: tuple[StateArray, ...]
    settings: StateSettings = DEFAULT_STATES

    @classmethod
    def of(cls, shape: ModelShape, settings: StateSettings = DEFAULT_STATES) -> RecurrentLayout | None:
        """The layout of a model's layers; None if all have attention."""
        layers = tuple(number for number, kind in enumerate(shape.kinds) if kind.state)
        return cls(layers, shape.kinds[layers[0]].state, settings) if layers else None

    @property
    def fields(self) -> tuple[Field, ...]:
        """The arrays with their dtypes."""
        dtype = self.settings.dtype
        return tuple(Field(one.name, one.shape, dtype if one.sums else torch.float32) for one in self.arrays)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all layers."""
        return len(self.layers) * sum(field.dtype.itemsize * math.prod(field.shape) for field in self.fields)

    def snapshot_bytes(self, tokens: int) -> int:
        """Maximum number of bytes of the states in snapshots of a sequence of ``tokens`` tokens. There is a state at
        the sequence's end and at every ``CHECKPOINT_EVERY`` tokens."""
        return (1 + tokens // CHECKPOINT_EVERY) * len(self.layers) * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Maximum number of bytes of a state in one layer of a snapshot, including the alignment of fields."""
        return -(-sum(field.nbytes for field in self.fields) // 256) * 256

    def num_checkpoints(self, sequences: int) -> int:
        """Number of checkpoints that memory is reserved for, in a cache of ``sequences`` sequences."""
        return sequences if self.settings.checkpoints is None else self.settings.checkpoints

    def num_states(self, sequences: int) -> int:
        """Number of states of ``sequences`` sequences, checkpoints and drafted tokens."""
        return sequences * RING + self.num_checkpoints(sequences) + self.settings.drafted

    def nbytes(self, sequences: int) -> int:
        """Bytes of ``num_states`` states, and of one more for padding rows."""
        return (self.num_states(sequences) + 1) * self.state_bytes
