"""Checkpoints that store projections in 8-bit floats, each with its scales: the forms that load, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, in_words
from shadowkv.models.checkpoints.safetensors_weights import DTYPES, FLOAT8, SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import FP8Weight, Stored

SCALED = ("tensor", "channel", "block")
"""Those of compressed-tensors' strategies that have one scale per weight, per row, or per block."""

SCALES = ("weight_scale", "weight_scale_inv")
"""Names beside ``weight``. The codes are multiplied by both: the second is the inverse of the quantiser's scale."""

UNUSED = (
    *("input_scale", "input_scale_ub", "output_scale", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)
"""Static scales of activations, which have dynamic ones here, and of keys and values, which a cache policy stores."""


@dataclass(frozen=True)
class FP8Format:
    """A kind of checkpoint.

    Attributes:
        block: rows and columns that share a scale, if scales are block-wise.
    """

    block: tuple[int, int] | None = None


def fp8_format(stated: Any) -> FP8Format | None:
    """The format of a ``quantization_config``; None if it is of another kind, or has unknown values.

    Modules that it lists as not converted are stored as plain numbers, as the file itself says. Static scales of
    activations are not used here: activations are quantised by their own largest number, which loses less.
    """
    if not isinstance(stated, Mapping):
        return None
    method = stated.get("quant_method")
    if method == "fbgemm_fp8":
        return FP8Format()
    if method == "fp8" and stated.get("fmt", "e4m3") == "e4m3":
        return _of_block(stated.get("weight_block_size"))
    if method == "compressed-tensors" and stated.get("format") == "float-quantized":
        return _of_groups(stated)
    return None


def _of_groups(stated: Mapping[str, Any]) -> FP8Format | None:
    """compressed-tensors has arguments for each group of modules."""
    sparsity, groups = stated.get("sparsity_config") or {}, stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not isinstance(sparsity, Mapping):
        return None
    if sparsity.get("format", "dense") != "dense" or stated.get("transform_config"):
        return None
    formats = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("strategy") not in SCALED:
            return None
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
            return None
        formats.add(_of_block(weights.get("block_structure") if weights["strategy"] == "block" else None))
    return formats.pop() if len(formats) == 1 else None


def _of_block(size: Any) -> FP8Format | None:
    if size is None:
        return FP8Format()
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return FP8Format((size[0], size[1]))
    return None


class FP8Weights:
    """The weights of a directory.

    Attributes:
        shapes: of every weight, without scales.
        float8: names of those stored in 8-bit floats.

    Raises as ``SafetensorsWeights`` does, and ModelFileError where scales are missing or do not fit.
    """

    def __init__(self, directory: Path, kind: FP8Format) -> None:
        self._files, self._block = SafetensorsWeights(directory, (*DTYPES, FLOAT8)), kind.block
        shapes = self._files.shapes
        self.float8 = {name for name, dtype in self._files.dtypes.items() if dtype == FLOAT8}
        self._scale_of, problems = {}, []
        for name in sorted(self.float8):
            module, _, kind_of = name.rpartition(".")
            scales = [f"{module}.{scale}" for scale in SCALES if f"{module}.{scale}" in shapes]
            if kind_of != "weight" or len(shapes[name]) != 2:
                problems.append(f"{name} {shapes[name]} is {FLOAT8}, which only weights of projections can be")
            elif len(scales) != 1:
                problems.append(f"{name} is {FLOAT8} and has {len(scales)} of {' and '.join(SCALES)} beside it")
            elif self._files.dtypes[scales[0]] == FLOAT8 or not self._fits(shapes[name], shapes[scales[0]]):
                problems.append(f"{scales[0]} {shapes[scales[0]]} does not fit the weight's {shapes[name]}")
            else:
                self._scale_of[name] = scales[0]
        if problems:
            raise ModelFileError(directory, in_words(problems))
        aside = {*self._scale_of.values(), *(name for name in shapes if name.rpartition(".")[2] in UNUSED)}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in aside}

    def stream(self) -> Iterator[tuple[str, Stored]]:
        """Name and CPU weight, read one at a time; those with block-wise scales are plain numbers.

        A row has one scale here: quantised again per row, a block's numbers lose up to half a step of its codes more.
        """
        scales = dict(self._files.stream(frozenset(self._scale_of.values())))
        for name, tensor in self._files.stream(self.shapes.keys()):
            if name not in self.float8:
                yield name, tensor
                continue
            scale = scales[self._scale_of[name]].float()
            if scale.numel() == 1 or scale.shape in ((len(tensor),), (len(tensor), 1)):
                yield name, FP8Weight(tensor, scale.reshape(-1, 1))
            else:
                yield name, tensor.float() * self._spread(scale, tensor.shape)

    def notes(self, quantised: Iterable[str]) -> tuple[str, ...]:
        """What of the model's weights in 8-bit floats is not as the files have it, a line each."""
        plain = [name for name in quantised if name not in self.float8]
        lines = []
        if plain:
            lines.append(f"{len(plain)} weights that the files have unquantised are quantised too: {plain[0]}, ...")
        if self._block is not None:
            rows, columns = self._block
            lines.append(f"scales of {rows} x {columns} numbers became one a row")
        return tuple(lines)

    def _fits(self, weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        """Whether scales are one for all, one a row, or one a block."""
        rows, columns = weight
        whole = {(), (1,), (1, 1), (rows,), (rows, 1)}
        if self._block is not None:
            whole.add((-(-rows // self._block[0]), -(-columns // self._block[1])))
        return scale in whole

    def _spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Scales of blocks -> of every number; the last block of a side may be cut off."""
        assert self._block is not None
        for dim, side in enumerate(self._block):
            scale = scale.repeat_interleave(side, dim).narrow(dim, 0, shape[dim])
        return scale
