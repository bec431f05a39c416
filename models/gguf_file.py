"""A GGUF file: its metadata as plain values and its tensors by name, read when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor


class GGUFFile:
    """Read access to one file; the tensors stay mapped, not loaded.

    Args:
        path: the file. Raises FileNotFoundError or ValueError where it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        self._reader = GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.path = path
        architecture = self.get("general.architecture")
        if architecture is None:
            raise ValueError(f"{path} does not say its architecture")
        self.architecture = str(architecture)

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata value of ``key``; ``{arch}`` in it stands for the architecture."""
        field = self._reader.fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        """A tensor dequantised to float32, rows first; a copy."""
        entry = self._tensors[name]
        # A float32 tensor comes back as a view of the mapped file.
        values = np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32, copy=None)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(self.shape(name))
