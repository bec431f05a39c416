"""Weights of experts, which files store in several ways, as if each expert were a module of its own.

Files have them apart, ``mlp.experts.3.up_proj.weight``, or under Mixtral's names, or joined:
``mlp.experts.gate_up_proj`` [E, 2I, D] and ``mlp.experts.down_proj`` [E, D, I], as transformers 5 may save them. GGUF
files, renamed, have ``mlp.experts.gate_proj`` and ``mlp.experts.up_proj``, each [E, I, D], instead of the former.

In gpt-oss's safetensors files, *interleaved*, rows of gates and of up alternate, and matrices of plain numbers are
transposed, [E, D, 2I] and [E, I, D]; quantised ones are not. Biases of joined experts are beside them, under their
names with ``_bias`` at the end: [E, 2I], or each [E, I], and [E, D].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantised.rows import Form

_JOINED = re.compile(r"^(.+\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias)?$")
_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w3.weight": ".up_proj.weight",
    ".w2.weight": ".down_proj.weight",
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """A weight of one expert within a tensor of all of them.

    Attributes:
        expert: its number.
        rows: the weight's among those of the expert.
        of_expert: number of rows of an expert.
        transposed: the tensor has them as its columns.
    """

    expert: int
    rows: slice
    of_expert: int
    transposed: bool

    def shape(self, whole: Shape) -> Shape:
        """Of a tensor's shape [E, ...], the part's."""
        columns = whole[1:-1] if self.transposed else whole[2:]
        return len(range(self.of_expert)[self.rows]), *columns

    def of(self, stored: Stored) -> Stored:
        """The part, a view."""
        if isinstance(stored, Tensor):
            return (stored[self.expert].T if self.transposed else stored[self.expert])[self.rows]
        first = self.expert * self.of_expert  # quantised rows of experts are one after the other already
        return stored[slice(first + self.rows.start, first + self.rows.stop, self.rows.step)]


class SeparateExperts:
    """The names that weights get.

    Args:
        shapes: of all weights, by their names in the files.
        forms: of those that are quantised.
        experts: their number in a layer.
        drafting: layers that draft tokens, whose weights are left out.
        interleaved: files are as gpt-oss's safetensors files.

    Attributes:
        shapes: of all weights that are read, each expert's by its own name.
        forms: of those that are quantised.
        left_out: names in the files of those that are not read.

    Raises ValueError where the files have an expert's weight twice, apart and joined.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], forms: Mapping[str, Form], experts: int, drafting: range, interleaved: bool
    ) -> None:
        prefixes = tuple(f"{prefix}.{layer}." for prefix in ("model.layers", "blk") for layer in drafting)
        self.left_out = [name for name in shapes if name.startswith(prefixes)]
        read = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
        self._parts = {
            name: dict(_parts(name, shape, experts, interleaved, name not in forms)) for name, shape in read.items()
        }
        self.shapes: dict[str, Shape] = {}
        for name, parts in self._parts.items():
            for weight, part in parts.items():
                if weight in self.shapes:
                    raise ValueError(f"{weight} is there twice, as {name} too")
                self.shapes[weight] = shapes[name] if part is None else part.shape(shapes[name])
        self.forms = {weight: form for name, form in forms.items() for weight in self._parts.get(name, ())}

    def tensors(self, tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        """Name and weight, of what is read."""
        for name, stored in tensors:
            for weight, part in self._parts.get(name, {}).items():
                yield weight, stored if part is None else part.of(stored)


def _parts(name: str, shape: Shape, count: int, interleaved: bool, plain: bool) -> Iterator[tuple[str, _Part | None]]:
    """What a weight is called, or what the weights of experts in it are."""
    joined = _JOINED.match(name)
    dimensions = 2 if name.endswith("_bias") else 3
    if joined is None or len(shape) != dimensions or shape[0] != count:  # what is wrong is named as it is in the file
        for theirs, ours in _MIXTRAL.items():
            name = name.replace(theirs, ours)
        yield name, None
        return
    prefix, module, bias = joined.groups()
    transposed = interleaved and plain and not bias
    rows, kind = shape[2] if transposed else shape[1], "bias" if bias else "weight"
    modules = ("gate_proj", "up_proj") if module == "gate_up_proj" else (module,)
    for expert in range(count):
        for number, one in enumerate(modules):
            if interleaved:
                of_module = slice(number, rows, len(modules))
            else:
                of_module = slice(number * (rows // len(modules)), (number + 1) * (rows // len(modules)), 1)
            yield f"{prefix}.{expert}.{one}.{kind}", _Part(expert, of_module, rows, transposed)
