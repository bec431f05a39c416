"""The interface of a format of quantized checkpoints, and helpers that formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantized.rows import Form

SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Dtypes of scales that are stored as floats, by safetensors' names."""


@dataclass(frozen=True)
class Entry:
    """A tensor's entry in a file's header; ``dtype`` is safetensors' name."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class Found:
    """A quantized weight in files.

    Attributes:
        shape: the dequantized weight's shape, [N, K]. For E experts it is [E, N, K], and the weight is read as E * N
            rows.
        form: the form that the weight is read into; None if reading dequantizes it.
        parts: the tensors that the weight is read from, by the last components of their names.
    """

    shape: tuple[int, ...]
    form: Form | None
    parts: tuple[str, ...]


Read = Callable[[str], Tensor]
"""Reads a module's tensor onto the CPU, by the last component of its name."""


class Format(Protocol):
    """A format, as a ``quantization_config`` describes it.

    Attributes:
        method: the config's ``quant_method``.
        dtypes: safetensors' names of the dtypes that the format's files have, in addition to those of unquantized
            weights.
    """

    method: str
    dtypes: tuple[str, ...]

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """Finds a module's quantized weights. Returns them by the last component of their names in an unquantized
        checkpoint, such as ``weight``. Raises ValueError if the tensors do not fit the format.

        Args:
            module: the module's name in the files.
            entries: all of the module's tensors, by the last components of their names.
            read: reads the few tensors whose content is needed here.
        """
        ...

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> Stored:
        """Builds the weight from its tensors; raises ValueError if their numbers do not fit the format."""
        ...

    def planned(self, module: str) -> Form | None:
        """The form of a projection's weight according to the config alone, without files; None if it is not
        quantized."""
        ...


def scale_dtype(name: str, entry: Entry) -> torch.dtype:
    """The dtype of scales that are stored as floats; raises ValueError for other types."""
    if entry.dtype not in SCALE_DTYPES:
        raise ValueError(f"{name} is {entry}, and scales are one of {', '.join(SCALE_DTYPES)}")
    return SCALE_DTYPES[entry.dtype]


def need(entries: Mapping[str, Entry], *names: str) -> list[Entry]:
    """The entries with these names; raises ValueError that names the missing ones."""
    missing = [name for name in names if name not in entries]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing beside {', '.join(entries)}"
        )
    return [entries[name] for name in names]


def expect(name: str, entry: Entry, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raises ValueError unless a tensor has the shape and one of the types."""
    if entry.shape != shape or entry.dtype not in dtypes:
        raise ValueError(f"{name} is {entry}, not {' or '.join(dtypes)} {shape}")


def group_size(columns: int, groups: int, stated: int | None) -> int | None:
    """Returns the number of columns that share a scale; None if a whole row shares one.

    Args:
        columns: length of a row.
        groups: number of scales of a row.
        stated: the config's group size, or None. It is returned if rows of ``columns`` columns have ``groups`` groups
            of this size, the last of which may be shorter. Otherwise ``columns`` must be a multiple of ``groups``.

    Raises ValueError if no group size fits.
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
