"""Weights of a Hugging Face directory: one .safetensors file or several with an index. Pickled files are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, check_regular, in_words, is_there, read_json

DTYPES = ("F64", "F32", "F16", "BF16")
"""Others belong to quantised weights, and mean nothing without a config that says how these are stored."""

_INDEX = "model.safetensors.index.json"


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """A .safetensors file, whose header the library has checked, on the CPU; raises ModelFileError for a bad one."""
    check_regular(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelFileError(file, str(error)) from error


def read_header(file: Path, dtypes: Sequence[str] = DTYPES) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor of a file; raises ModelFileError for types other than ``dtypes``."""
    header = {}
    with open_safetensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            entry = opened.get_slice(name)
            dtype = entry.get_dtype()
            if dtype not in dtypes:
                reason = f"tensor {name!r} is of type {dtype}; supported: {', '.join(dtypes)}"
                raise ModelFileError(file, reason, "use a model that is not quantised, or a GGUF file")
            header[name] = tuple(entry.get_shape()), dtype
    if not header:
        raise ModelFileError(file, "it holds no tensors")
    return header


class SafetensorsWeights:
    """The weights of a directory.

    Args:
        dtypes: those that tensors may have.
        renamed: from a name in the files to the weight's; None leaves it out.

    Attributes:
        shapes, dtypes: of every tensor, from the files' headers.

    Raises FileNotFoundError if the directory has no safetensors or lacks files that its index names, ModelFileError
    for files that cannot be used.
    """

    def __init__(
        self, directory: Path, dtypes: Sequence[str] = DTYPES, renamed: Callable[[str], str | None] = str
    ) -> None:
        self._place_of: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for file in _files(directory):
            stored = {(renamed(theirs), theirs): entry for theirs, entry in read_header(file, dtypes).items()}
            header = {name: entry for (name, _), entry in stored.items() if name is not None}
            twice = sorted(self.shapes.keys() & header.keys())
            if twice:
                raise ModelFileError(file, f"tensor {twice[0]!r} is in another file of the folder too")
            self._place_of |= {name: (file, theirs) for name, theirs in stored if name is not None}
            self.shapes |= {name: shape for name, (shape, _) in header.items()}
            self.dtypes |= {name: dtype for name, (_, dtype) in header.items()}

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Name and CPU tensor of every weight, read one at a time."""
        with self.opened() as read:
            for name in self.shapes:
                yield name, read(name)

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Reads tensors by name, on the CPU: each file stays open once it was read from."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str) -> Tensor:
                file, theirs = self._place_of[name]
                if file not in files:
                    files[file] = stack.enter_context(open_safetensors(file))
                tensor: Tensor = files[file].get_tensor(theirs)
                return tensor

            yield read

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with self.opened() as read:
            return read(name)


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
    """The files that an index names, which must be in its directory; they may be links, as in the hub's cache."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "weight_map is missing, empty, or no object")
    for name in weight_map.values():
        # Windows' rules know both separators and drives, whatever this machine's rules are.
        if not isinstance(name, str) or not name.endswith(".safetensors") or PureWindowsPath(name).name != name:
            raise ModelFileError(index, f"weight_map names {name!r}, which is no .safetensors file of the folder")
        if not name.isprintable():
            raise ModelFileError(index, f"weight_map names {name!r}")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index}: the folder lacks weight files that it names: {in_words(missing)}; fetch those"
        )
    return files
