"""Reads the weights of a directory in a format of quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, join_reasons, naming
from shadowkv.models.checkpoints.quantized.format import Entry, Format, Found
from shadowkv.models.checkpoints.reading import Reading
from shadowkv.models.checkpoints.safetensors_weights import DTYPES, SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantized.rows import Form

UNUSED = ("input_scale", "input_scale_ub", "input_global_scale", "output_scale", "activation_scale")
"""Static scales of activations. They are not used: activations are quantized with dynamic scales."""

OF_CACHES = ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale")
"""Scales of keys and values. They are not used: the cache policy stores keys and values in its own way."""


class QuantizedWeights:
    """The weights of a directory whose config states a quantized ``format``.

    A weight counts as quantized if the files have quantized tensors for it, whatever modules the config lists.
    ``renamed`` and ``tables`` are as in ``SafetensorsWeights``.

    Attributes:
        files: the tensors of the directory.
        shapes: the shape of every weight when dequantized, by its name in an unquantized checkpoint.
        forms: the forms that quantized weights are read into, by name.
        scattered: names of weights that are dequantized when they are read, because the groups of their columns are not
            in order.
        of_caches: names of tensors of ``OF_CACHES``, which are not used.

    Raises as ``SafetensorsWeights`` does, and ModelFileError if tensors are missing or do not fit.
    """

    def __init__(
        self,
        directory: Path,
        format: Format,
        renamed: Callable[[str], str | None] = str,
        tables: Collection[str] = (),
    ) -> None:
        self._directory, self._format = directory, format
        self.files = SafetensorsWeights(directory, (*DTYPES, *format.dtypes), renamed, tables)
        modules: dict[str, dict[str, Entry]] = {}
        for name, shape in self.files.shapes.items():
            module, _, last = name.rpartition(".")
            modules.setdefault(module, {})[last] = Entry(shape, self.files.dtypes[name])
        for module in (name.rpartition(".")[0] for name in tables):
            if len(modules.get(module, ())) == 1:  # there is no scale
                del modules[module]
        self._found: dict[str, Found] = {}
        problems, parts = [], set()
        for module, entries in sorted(modules.items()):
            try:
                found = format.find(module, entries, partial(self._read, module))
            except ValueError as error:
                problems.append(str(error) if module in str(error) else f"{module}: {error}")
                continue
            for last, weight in found.items():
                self._found[f"{module}.{last}"] = weight
                parts |= {f"{module}.{part}" for part in weight.parts}
        self.of_caches = [name for name in self.files.shapes if name.rpartition(".")[2] in OF_CACHES]
        aside = {name for name in self.files.shapes if name.rpartition(".")[2] in UNUSED}.union(parts, self.of_caches)
        plain = {name: shape for name, shape in self.files.shapes.items() if name not in aside}
        for name in plain:
            if self.files.dtypes[name] not in DTYPES and name not in tables:
                problems.append(f"{name} is {self.files.dtypes[name]}, and not part of a weight in {format.method}")
        if problems:
            raise ModelFileError(directory, join_reasons(problems))
        self.shapes = plain | {name: found.shape for name, found in self._found.items()}
        self.forms: dict[str, Form] = {
            name: found.form for name, found in self._found.items() if found.form is not None
        }
        self.scattered = [name for name, found in self._found.items() if found.form is None]

    def _read(self, module: str, last: str) -> Tensor:
        return self.files.read(f"{module}.{last}")

    def readings(self, *, pinned: bool = False) -> Iterator[Reading]:
        """All weights, to be read on the CPU. Reading one raises ModelFileError if numbers do not fit the format."""
        return (
            Reading(name, sum(map(self.files.nbytes, self._parts(name))), partial(self._weight, name, pinned))
            for name in self.shapes
        )

    def _parts(self, name: str) -> list[str]:
        """The names of the tensors that a weight is read from."""
        found = self._found.get(name)
        return [name] if found is None else [f"{name.rpartition('.')[0]}.{part}" for part in found.parts]

    def _weight(self, name: str, pinned: bool) -> Stored:
        if (found := self._found.get(name)) is None:
            return self.files.read(name, pinned)
        parts = zip(found.parts, self._parts(name), strict=True)
        tensors = {part: self.files.read(of_part, pinned) for part, of_part in parts}
        with naming(self._directory):
            try:
                return self._format.read(found, tensors)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
