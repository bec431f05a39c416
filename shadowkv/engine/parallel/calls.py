"""Calls of methods that every rank makes on its own objects: rank 0 writes them, the others read them and do the same.

What each rank has of its own goes by numbers: sequences, and prefills that are under way.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shadowkv.engine.selections import SelectionRecord
from shadowkv.kvcache.sequences.sequence import CachedSequence

SEQUENCE, TENSOR, RECORD = "sequence", "tensor", "record"
"""What arguments of other ranks are their own of."""


class Call(NamedTuple):
    """A method of one of a rank's objects, both by name, its arguments, and the number of what it makes or ends."""

    target: str
    method: str
    arguments: tuple[Any, ...]
    makes: int | None = None
    ends: int | None = None


class Writer:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._count, self._numbers = itertools.count(), dict[CachedSequence, int]()

    def write(self, target: str, method: str, arguments: tuple[Any, ...], made: object = None) -> bytes:
        """A call for all other ranks; a sequence that it ``made`` can be an argument from now on."""
        makes = None
        if isinstance(made, CachedSequence):
            makes = self._numbers[made] = next(self._count)
        return self._written(Call(target, method, arguments, makes))

    def release(self, sequence: CachedSequence) -> bytes:
        """The call that releases a sequence, which is no argument any more."""
        written = self._written(Call("cache", "release", (sequence,), ends=self._numbers[sequence]))
        del self._numbers[sequence]
        return written

    def begin(self, target: str, method: str, arguments: tuple[Any, ...]) -> tuple[int, bytes]:
        """A call that makes something else, and the number of that."""
        number = next(self._count)
        return number, self._written(Call(target, method, arguments, number))

    def _written(self, call: Call) -> bytes:
        into = io.BytesIO()
        _Pickler(into, self._numbers).dump(call)
        return into.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, into: io.BytesIO, numbers: Mapping[CachedSequence, int]) -> None:
        super().__init__(into)
        self._numbers = numbers

    def persistent_id(self, one: object) -> Any:
        if isinstance(one, CachedSequence):
            return SEQUENCE, self._numbers[one], one.seed  # only rank 0 knows whose request it is
        if isinstance(one, Tensor):  # whose contents come from rank 0, too (``Group.copy_first``)
            return TENSOR, one.dtype, tuple(one.shape)
        return (RECORD,) if isinstance(one, SelectionRecord) else None


class Reader:
    """Another rank's side.

    Args:
        targets: its objects, by name.
        device: where its tensors are.

    Attributes:
        made: what calls have made, by number.
    """

    def __init__(self, targets: Mapping[str, object], device: torch.device) -> None:
        self._targets, self._device = targets, device
        self.made: dict[int, Any] = {}

    def call(self, written: bytes) -> None:
        """Makes a call that rank 0 has written, once those before it have been made."""
        call: Call = _Unpickler(io.BytesIO(written), self).load()
        result = getattr(self._targets[call.target], call.method)(*call.arguments)
        if call.makes is not None:
            self.made[call.makes] = result
        if call.ends is not None:
            del self.made[call.ends]

    def own(self, kind: str, *what: Any) -> Any:
        """This rank's own of what an argument stands for."""
        if kind == RECORD:  # what is recorded is not a CUDA graph: this rank must not run one either
            return nullcontext()
        if kind == TENSOR:
            dtype, shape = what
            return torch.empty(shape, dtype=dtype, device=self._device)
        number, seed = what
        sequence: CachedSequence = self.made[number]
        sequence.seed = seed
        return sequence


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, reader: Reader) -> None:
        super().__init__(source)
        self._reader = reader

    def persistent_load(self, one: Any) -> Any:
        return self._reader.own(*one)
