"""Method calls that every rank makes on its own objects. Rank 0 serialises them (``Writer``), and the other ranks read
and make them (``Reader``). Sequences and prefills, of which each rank has its own, are passed as numbers.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shadowkv.engine.selections import SelectionRecord
from shadowkv.kvcache.sequences.sequence import CachedSequence

CACHE, RUNNER, HEAD_CACHE, HEAD = "cache", "runner", "head_cache", "head"
"""Names of the objects that every rank has: the cache and the runner of the model, and those of its draft head."""

SEQUENCE, TENSOR, RECORD = "sequence", "tensor", "record"
"""Kinds of arguments that are not pickled: each rank passes its own object instead."""


class Call(NamedTuple):
    """A method call.

    Attributes:
        target, method: names of the object and of its method.
        makes: number of the sequence or prefill that the call returns; None if it returns none.
        ends: number of the sequence that the call releases; None if it releases none.
        asks: number of the answer that rank 0 waits for; None if it waits for none. A method that answers is a
            generator; its return value is the answer.
    """

    target: str
    method: str
    arguments: tuple[Any, ...]
    makes: int | None = None
    ends: int | None = None
    asks: int | None = None


class Answer(NamedTuple):
    """A rank's answer to the call whose ``asks`` is ``number``."""

    number: int
    result: Any


class Writer:
    """Serialises rank 0's calls."""

    def __init__(self) -> None:
        self._count, self._numbers = itertools.count(), dict[CachedSequence, int]()

    def write(self, target: str, method: str, arguments: tuple[Any, ...], made: object = None) -> bytes:
        """Serialises a call for the other ranks. ``made`` is the call's result. If it is a sequence, later calls can
        have it as an argument."""
        makes = None
        if isinstance(made, CachedSequence):
            makes = self._numbers[made] = next(self._count)
        return self._written(Call(target, method, arguments, makes))

    def release(self, target: str, sequence: CachedSequence) -> bytes:
        """Serialises the call that releases a sequence. Later calls cannot have the sequence as an argument."""
        written = self._written(Call(target, "release", (sequence,), ends=self._numbers[sequence]))
        del self._numbers[sequence]
        return written

    def ask(self, target: str, method: str, arguments: tuple[Any, ...]) -> tuple[int, bytes]:
        """Serialises a call that the other ranks answer. Returns the answer's number and the call."""
        number = next(self._count)
        return number, self._written(Call(target, method, arguments, asks=number))

    def begin(self, target: str, method: str, arguments: tuple[Any, ...]) -> tuple[int, bytes]:
        """Serialises a call that returns a prefill. Returns the prefill's number and the call."""
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
            return SEQUENCE, self._numbers[one], one.seed  # only rank 0 knows the request, and so the seed
        if isinstance(one, Tensor):  # rank 0 sends the contents later (``Group.copy_first``)
            return TENSOR, one.dtype, tuple(one.shape)
        return (RECORD,) if isinstance(one, SelectionRecord) else None


class Reader:
    """Makes rank 0's calls on another rank.

    Args:
        targets: this rank's objects, by name.
        device: device of this rank's tensors.

    Attributes:
        made: sequences and prefills that calls have returned, by number.
        asked: generators whose return values are answers, by number.
    """

    def __init__(self, targets: Mapping[str, object], device: torch.device) -> None:
        self._targets, self._device = targets, device
        self.made: dict[int, Any] = {}
        self.asked: dict[int, Iterator[None]] = {}

    def call(self, written: bytes) -> None:
        """Makes a serialised call. Calls must be made in rank 0's order."""
        call: Call = _Unpickler(io.BytesIO(written), self).load()
        result = getattr(self._targets[call.target], call.method)(*call.arguments)
        if call.makes is not None:
            self.made[call.makes] = result
        if call.ends is not None:
            del self.made[call.ends]
        if call.asks is not None:
            self.asked[call.asks] = result

    def answers(self) -> Iterator[Answer]:
        """Advances the generators that compute answers. Yields the answers that are known now."""
        for number, result in list(self.asked.items()):
            try:
                next(result)
            except StopIteration as end:
                del self.asked[number]
                yield Answer(number, end.value)

    def own(self, kind: str, *what: Any) -> Any:
        """Returns this rank's own object for an argument that is not pickled."""
        if kind == RECORD:
            # Only rank 0 records selections. Any context manager makes this rank run the step without a CUDA graph, as
            # rank 0 does.
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
