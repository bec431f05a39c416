"""Weights of experts, which files store in several ways, as if each expert were a module of its own.

Files have them apart, ``mlp.experts.3.up_proj.weight``, or under Mixtral's names, or joined:
``mlp.experts.gate_up_proj`` [E, 2I, D] and ``mlp.experts.down_proj`` [E, D, I], as transformers 5 may save them. GGUF
files, renamed, have ``mlp.experts.gate_proj`` and ``mlp.experts.up_proj``, each [E, I, D], instead of the former.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantised.rows import Form

_JOINED = re.compile(r"^(.+\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)$")
_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w3.weight": ".up_proj.weight",
    ".w2.weight": ".down_proj.weight",
}

Shape = tuple[int, ...]


class SeparateExperts:
    """The names that weights get.

    Args:
        shapes: of all weights, by their names in the files.
        experts: their number in a layer.
        drafting: layers that draft tokens, whose weights are left out.

    Attributes:
        shapes: of all weights that are read, each expert's by its own name.
        left_out: names in the files of those that are not.

    Raises ValueError where the files have an expert's weight twice, apart and joined.
    """

    def __init__(self, shapes: Mapping[str, Shape], experts: int, drafting: range) -> None:
        prefixes = tuple(f"{prefix}.{layer}." for prefix in ("model.layers", "blk") for layer in drafting)
        self.left_out = [name for name in shapes if name.startswith(prefixes)]
        read = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
        self._parts = {name: dict(_parts(name, shape, experts)) for name, shape in read.items()}
        self.shapes: dict[str, Shape] = {}
        for name, parts in self._parts.items():
            for part, rows in parts.items():
                if part in self.shapes:
                    raise ValueError(f"{part} is there twice, as {name} too")
                self.shapes[part] = shapes[name] if rows is None else (rows.stop - rows.start, *shapes[name][2:])

    def forms(self, forms: Mapping[str, Form]) -> dict[str, Form]:
        """Forms of quantised weights by the new names."""
        return {part: form for name, form in forms.items() for part in self._parts.get(name, ())}

    def tensors(self, tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        """Name and weight, of what is read."""
        for name, stored in tensors:
            for part, rows in self._parts.get(name, {}).items():
                if rows is None:
                    yield part, stored
                else:  # quantised rows of experts are one after the other already
                    yield part, (stored.flatten(0, 1) if isinstance(stored, Tensor) else stored)[rows]


def _parts(name: str, shape: Shape, count: int) -> Iterator[tuple[str, slice | None]]:
    """What a weight is called, or what the rows of its experts are, these being one after the other."""
    joined = _JOINED.match(name)
    if joined is None or len(shape) != 3 or shape[0] != count:  # what is wrong is named as it is in the file
        for theirs, ours in _MIXTRAL.items():
            name = name.replace(theirs, ours)
        yield name, None
        return
    prefix, kind = joined.groups()
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    size = shape[1] // len(kinds)
    for expert in range(count):
        for number, module in enumerate(kinds):
            first = expert * shape[1] + number * size
            yield f"{prefix}.{expert}.{module}.weight", slice(first, first + size)
