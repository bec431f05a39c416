"""Splits experts' weights, which files store in several layouts, into one module per expert.

Some files store each expert separately, as ``mlp.experts.3.up_proj.weight`` or under Mixtral's names. Others join all
experts of a layer in one tensor. With E experts of inner width I and hidden size D, joined tensors are:

- transformers 5: ``mlp.experts.gate_up_proj`` [E, 2I, D] and ``mlp.experts.down_proj`` [E, D, I].
- GGUF files, after renaming: ``mlp.experts.gate_proj`` and ``mlp.experts.up_proj``, each [E, I, D], instead of
  ``gate_up_proj``.
- gpt-oss's safetensors files are *interleaved*: rows of gate and up alternate in ``gate_up_proj``. Plain matrices are
  also transposed, [E, D, 2I] and [E, I, D]. Quantized matrices are not transposed.

A joined bias has the matrix's name with ``_bias`` at the end. It is [E, 2I] for ``gate_up_proj``, [E, I] for
``gate_proj`` and ``up_proj``, and [E, D] for ``down_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shadowkv.models.checkpoints.reading import Reading, read_ahead
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantized.rows import Form

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
    """One expert's weight within a tensor of all experts.

    Attributes:
        expert: the expert's number.
        rows: the weight's rows among the expert's rows.
        of_expert: number of rows of an expert.
        transposed: whether the tensor stores the weight's rows as columns.
    """

    expert: int
    rows: slice
    of_expert: int
    transposed: bool

    def shape(self, whole: Shape) -> Shape:
        """The weight's shape, from the tensor's shape [E, ...]."""
        columns = whole[1:-1] if self.transposed else whole[2:]
        return len(range(self.of_expert)[self.rows]), *columns

    def of(self, stored: Stored) -> Stored:
        """Returns the weight, as a view of the tensor of all experts."""
        if isinstance(stored, Tensor):
            return (stored[self.expert].T if self.transposed else stored[self.expert])[self.rows]
        first = self.expert * self.of_expert  # quantized rows of all experts follow one another
        return stored[slice(first + self.rows.start, first + self.rows.stop, self.rows.step)]


class SeparateExperts:
    """The weights of a checkpoint, presented as one module per expert.

    Args:
        shapes: shapes of all weights, by their names in the files.
        forms: forms of the quantized weights.
        experts: number of experts in a layer.
        drafting: layers that draft tokens, whose weights are left out.
        interleaved: whether rows of gate and up alternate, as in gpt-oss's safetensors files.

    Attributes:
        shapes: shapes of all weights that are read, with each expert's under its own name.
        forms: forms of those weights in ``shapes`` that are quantized.
        left_out: names, in the files, of weights that are not read.

    Raises ValueError if the files have an expert's weight both separately and joined.
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
                    raise ValueError(f"{weight} occurs twice, also as {name}")
                self.shapes[weight] = shapes[name] if part is None else part.shape(shapes[name])
        self.forms = {weight: form for name, form in forms.items() for weight in self._parts.get(name, ())}

    def tensors(self, readings: Iterable[Reading], wanted: Collection[str]) -> Iterator[tuple[str, Stored]]:
        """Reads the files' tensors that have ``wanted`` weights, ahead of their use. Yields the name of each of these
        weights, as in ``shapes``, and the weight."""
        parts = {
            name: {weight: part for weight, part in parts.items() if weight in wanted}
            for name, parts in self._parts.items()
        }
        for name, stored in read_ahead(reading for reading in readings if parts.get(reading.name)):
            for weight, part in parts[name].items():
                yield weight, stored if part is None else part.of(stored)


def _parts(name: str, shape: Shape, count: int, interleaved: bool, plain: bool) -> Iterator[tuple[str, _Part | None]]:
    """Yields the name of each weight in a tensor, with its part of the tensor. A tensor of all experts has one weight
    per expert and module. For other tensors, the only weight is the whole tensor, and its part is None."""
    joined = _JOINED.match(name)
    dimensions = 2 if name.endswith("_bias") else 3
    # A tensor of a wrong shape is not split, so that errors name it as the file does.
    if joined is None or len(shape) != dimensions or shape[0] != count:
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
