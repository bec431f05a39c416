"""What a format of quantised checkpoints provides, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantised.rows import Form

SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Of scales that are plain numbers, by safetensors' names."""

FLOAT8 = "F8_E4M3"
"""safetensors' name of the type of 8-bit floats."""


@dataclass(frozen=True)
class Entry:
    """What a file's header says of a tensor: ``dtype`` by safetensors' names."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class Found:
    """A quantised weight in files.

    Attributes:
        shape: of its numbers, [N, K], or [E, N, K] of experts, whose rows are read one after the other.
        form: what it is read into; None where that is plain numbers.
        parts: the last parts of its tensors' names.
    """

    shape: tuple[int, ...]
    form: Form | None
    parts: tuple[str, ...]


Read = Callable[[str], Tensor]
"""A module's tensor by the last part of its name, on the CPU."""


class Format(Protocol):
    """A format, as a ``quantization_config`` specifies it.

    Attributes:
        method: its name there, ``quant_method``.
        dtypes: that tensors have in its files besides plain numbers, by safetensors' names.
    """

    method: str
    dtypes: tuple[str, ...]

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """The quantised weights of a module, by the last part of the name that their numbers have in an unquantised
        checkpoint; raises ValueError where its tensors do not fit the format.

        Args:
            module: its name in the files.
            entries: all of its tensors, by the last parts of their names.
            read: for the little that headers do not say.
        """
        ...

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> Stored:
        """The weight, of its parts; raises ValueError where their numbers do not fit the format."""
        ...

    def planned(self, module: str) -> Form | None:
        """The form that a projection's weight has as far as the config says, without files; None for plain numbers."""
        ...


def scale_dtype(name: str, entry: Entry) -> torch.dtype:
    """Of plain scales; raises ValueError for another type."""
    if entry.dtype not in SCALE_DTYPES:
        raise ValueError(f"{name} is {entry}, and scales are one of {', '.join(SCALE_DTYPES)}")
    return SCALE_DTYPES[entry.dtype]


def need(entries: Mapping[str, Entry], *names: str) -> list[Entry]:
    """Entries that there have to be; raises ValueError naming those that are missing."""
    missing = [name for name in names if name not in entries]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing beside {', '.join(entries)}"
        )
    return [entries[name] for name in names]


def expect(name: str, entry: Entry, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raises ValueError unless a tensor has the shape, and one of the types."""
    if entry.shape != shape or entry.dtype not in dtypes:
        raise ValueError(f"{name} is {entry}, not {' or '.join(dtypes)} {shape}")


def group_size(columns: int, groups: int, stated: int | None) -> int | None:
    """Columns that share a scale, where a row of ``columns`` has ``groups`` scales; None if it has one.

    Args:
        stated: what the config says, which decides where the last group may be cut off.

    Raises ValueError if there is no such size.
    """
    if columns < 1:
        raise ValueError("its rows are empty")
    if groups == 1:
        return None
    if stated is not None and stated > 0 and -(-columns // stated) == groups:
        return stated
    if groups < 1 or columns % groups:
        raise ValueError(f"{groups} scales do not divide rows of {columns}")
    return columns // groups
