"""Weights of a Hugging Face directory: one .safetensors file, or several with an index. Pickled files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, check_regular, is_there, join_reasons, read_json
from shadowkv.models.checkpoints.reading import Reading, read_bytes

DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of plain weights. Other types belong to quantized weights, which only a config can interpret."""

FLOAT8 = "F8_E4M3"
"""safetensors' name of float8_e4m3fn."""

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FLOAT8: torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_INDEX = "model.safetensors.index.json"


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Opens a .safetensors file on the CPU, as a context. The library checks the header. Raises ModelFileError if the
    header is not valid."""
    check_regular(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelFileError(file, str(error)) from error


def read_header(
    file: Path,
    dtypes: Sequence[str] = DTYPES,
    renamed: Callable[[str], str | None] = str,
    tables: Collection[str] = (),
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor of a file; raises ModelFileError for types other than ``dtypes``, unless
    ``renamed`` leaves the tensor out. ``tables`` is as in ``SafetensorsWeights``."""
    header = {}
    with open_safetensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            entry = opened.get_slice(name)
            dtype, ours = entry.get_dtype(), renamed(name)
            if dtype not in dtypes and ours is not None and not (dtype == FLOAT8 and ours in tables):
                reason = f"tensor {name!r} is of type {dtype}; supported: {', '.join(dtypes)}"
                raise ModelFileError(file, reason, "use a model that is not quantized, or a GGUF file")
            header[name] = tuple(entry.get_shape()), dtype
    if not header:
        raise ModelFileError(file, "it holds no tensors")
    return header


class SafetensorsWeights:
    """The weights of a directory.

    Args:
        dtypes: allowed types of tensors.
        renamed: maps a name in the files to the weight's name, or to None if the weight is left out.
        tables: names of weights whose rows are looked up. They can be plain 8-bit floats, without a scale.

    Attributes:
        shapes, dtypes: shape and type of every tensor, from the files' headers, by the weight's name.

    Raises FileNotFoundError if the directory has no safetensors or lacks files that its index names, and ModelFileError
    for files that cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        dtypes: Sequence[str] = DTYPES,
        renamed: Callable[[str], str | None] = str,
        tables: Collection[str] = (),
    ) -> None:
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._maps: dict[Path, Tensor] = {}
        for file in _files(directory):
            headers = read_header(file, dtypes, renamed, tables)
            stored = {(renamed(theirs), theirs): entry for theirs, entry in headers.items()}
            header = {name: entry for (name, _), entry in stored.items() if name is not None}
            twice = sorted(self.shapes.keys() & header.keys())
            if twice:
                raise ModelFileError(file, f"tensor {twice[0]!r} is in another file of the folder too")
            self._file_of |= dict.fromkeys(header, file)
            self.shapes |= {name: shape for name, (shape, _) in header.items()}
            self.dtypes |= {name: dtype for name, (_, dtype) in header.items()}
            places = _places(file)
            self._places |= {name: places[theirs] for name, theirs in stored if name is not None}

    def readings(self, *, pinned: bool = False) -> Iterator[Reading]:
        """All weights, to be read as CPU tensors."""
        return (Reading(name, self.nbytes(name), partial(self.read, name, pinned)) for name in self.shapes)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        start, stop = self._places[name]
        return stop - start

    def read(self, name: str, pinned: bool = False) -> Tensor:
        """One tensor, on the CPU, in pinned memory if ``pinned``. Can be called on any thread."""
        data = read_bytes(self._file_of[name], *self._places[name], pinned=pinned)
        return data.view(self.dtype(name)).view(self.shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return _TORCH_DTYPES[self.dtypes[name]]

    def mapped(self, name: str) -> Tensor:
        """One tensor, mapped into the CPU's memory: numbers are read from the file, or from the system's page cache,
        when they are used. A tensor that is not aligned in its file is read at once."""
        file, (start, stop), dtype = self._file_of[name], self._places[name], self.dtype(name)
        if start % dtype.itemsize:
            return self.read(name)
        if file not in self._maps:
            size = file.stat().st_size
            self._maps[file] = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        return self._maps[file][start:stop].view(dtype).view(self.shapes[name])


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """The byte range [start, stop) of each tensor in a file whose header was checked."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + start, 8 + size + stop) for name, (start, stop) in places.items()}


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if is_there(index):
        return _indexed(index)
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise FileNotFoundError(
            f"{directory} has pickled weights only ({', '.join(pickled)}): loading them can run code; "
            "convert them to safetensors"
        )
    raise FileNotFoundError(f"{directory} has no .safetensors file")


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, which must be in its directory; they can be links, as in the hub's cache."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "weight_map is missing, empty, or not an object")
    for name in weight_map.values():
        # ``PureWindowsPath`` also finds folders and drives written in Windows' way, on every operating system.
        if not isinstance(name, str) or not name.endswith(".safetensors") or PureWindowsPath(name).name != name:
            raise ModelFileError(index, f"weight_map names {name!r}, which is not a .safetensors file of the folder")
        if not name.isprintable():
            raise ModelFileError(index, f"weight_map names {name!r}, which has characters that cannot be printed")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index}: the folder lacks weight files that the index names: {join_reasons(missing)}; fetch them"
        )
    return files
