"""compressed-tensors, the format of llm-compressor (``compressors`` in vllm-project/compressed-tensors 0.20).

A weight has N rows, K columns, and G groups of columns. Its tensors are, by layout:

- ``pack-quantized``, for integers: ``weight_packed``, int32 [N, K * bits / 32], ``weight_scale`` [N, G], and
  ``weight_shape``. Asymmetric codes also have ``weight_zero_point``, int32 [N * bits / 32, G].
- ``int-quantized``, ``float-quantized``, ``naive-quantized``: ``weight``, int8 or float8_e4m3fn [N, K], and
  ``weight_scale``, one per tensor or per row. Floats can also have one per block.
- ``nvfp4-pack-quantized``: ``weight_packed``, uint8 [N, K / 2], ``weight_scale``, float8_e4m3fn [N, K / 16], and
  ``weight_global_scale``, by which the scales are divided.
- ``mxfp4-pack-quantized``: ``weight_packed``, uint8 [N, K / 2], and ``weight_scale``, uint8 [N, K / 32], which stores a
  scale s as log2(s) + 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import (
    Entry,
    Found,
    Read,
    expect,
    group_size,
    need,
    scale_dtype,
)
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4, NVFP4, find_fp4, fp4_rows
from shadowkv.models.checkpoints.quantized.fp8 import Block, block_of, find_float8, float8_form, read_float8
from shadowkv.models.checkpoints.quantized.names import any_matches, list_of_names, matches
from shadowkv.models.checkpoints.quantized.packing import in_any_order, in_order, unpack
from shadowkv.models.checkpoints.safetensors_weights import FLOAT8
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_FP4 = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
FORMATS = (_PACKED, _INTEGERS, _FLOATS, *_FP4)
_ALIASES = {("naive-quantized", "int"): _INTEGERS, ("naive-quantized", "float"): _FLOATS}
_STRATEGIES = {
    _PACKED: ("tensor", "channel", "group"),
    _INTEGERS: ("tensor", "channel"),
    _FLOATS: ("tensor", "channel", "block"),
    "nvfp4-pack-quantized": ("tensor_group",),
    "mxfp4-pack-quantized": ("group",),
}


@dataclass(frozen=True)
class Scheme:
    """How a group of modules in a config is quantized.

    Attributes:
        targets: names, regular expressions, or classes of modules.
        layout: one of ``FORMATS``.
        bits: bits of a code.
        group: number of columns that share a scale, for the strategy ``group``; None for other strategies.
        symmetric: whether integers have no zero points.
        block: numbers of rows and columns of a block of floats; None if scales are not per block.
    """

    targets: tuple[str, ...]
    layout: str
    bits: int
    group: int | None
    symmetric: bool
    block: Block | None

    @property
    def form(self) -> Form:
        """The form that weights are read into, assuming that scales stored as floats are bfloat16."""
        if self.layout in _FP4:
            return _FP4[self.layout]
        if self.layout == _FLOATS:
            return float8_form(self.block)
        return GroupForm(f"int{self.bits}", self.group, torch.bfloat16, zeros=not self.symmetric)


class CompressedTensors:
    """compressed-tensors as a config describes it; raises ValueError for unsupported schemes."""

    method = "compressed-tensors"
    dtypes = ("I8", "I32", "I64", "U8", FLOAT8)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        sparsity, transforms = stated.get("sparsity_config") or {}, stated.get("transform_config")
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise ValueError(f"sparsity_config={str(sparsity)[:60]} is not dense")
        if transforms and transforms != {"config_groups": {}}:
            raise ValueError("transform_config has transforms of weights and activations")
        groups, of_caches = stated.get("config_groups"), stated.get("kv_cache_scheme") is not None
        if not isinstance(groups, Mapping) or not (groups or of_caches):
            raise ValueError(f"config_groups={str(groups)[:60]} has no groups of modules")
        self._schemes = [_scheme(name, group, stated.get("format")) for name, group in groups.items()]
        self._ignored = list_of_names(stated.get("ignore"), "ignore")

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``."""
        kinds = {entry.dtype for name, entry in entries.items() if name in ("weight", "weight_packed")}
        if "weight_packed" not in entries and not kinds & {"I8", FLOAT8}:
            # Returns an empty mapping for an unquantized module; raises if any other tensor is in 8-bit floats.
            return find_float8(module, entries, None)
        scheme = self._scheme_of(module)
        if scheme is None:
            raise ValueError(f"{module} is quantized, and no group of the config has it")
        if scheme.layout in _FP4:
            form, factor = _FP4[scheme.layout], "weight_global_scale"
            found = find_fp4(entries, form, "weight_packed", "weight_scale", factor if form.factor else None)
            return {"weight": found}
        if scheme.layout == _FLOATS:
            return find_float8(module, entries, scheme.block)
        if scheme.layout == _INTEGERS:
            return {"weight": _find_integers(entries)}
        return {"weight": _find_packed(entries, read, scheme)}

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> Stored:
        """As ``Format.read``."""
        if weight.form in (NVFP4, MXFP4):
            codes, scales, *divisor = (tensors[name] for name in weight.parts)
            assert isinstance(weight.form, GroupForm)
            return fp4_rows(weight.form, codes, scales, *(1 / number.float() for number in divisor))
        if "weight" not in tensors:
            return _read_packed(weight, tensors)
        codes, scale = tensors["weight"], tensors[weight.parts[1]]
        if codes.dtype == torch.int8:
            assert weight.form is not None
            unsigned = codes.view(torch.uint8) ^ 128  # adds 128
            return QuantizedRows((unsigned, scale.reshape(-1, 1).expand(len(codes), 1)), weight.form)
        blocks = [one.block for one in self._schemes if one.block is not None]
        fitting = [block for block in blocks if _has_blocks(weight, block, scale.shape)]
        return read_float8(weight, tensors, fitting[0] if fitting else None)

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``."""
        scheme = None if any_matches(module, self._ignored) else self._scheme_of(module)
        return None if scheme is None else scheme.form

    def _scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module. As in compressed-tensors, names take precedence over regular expressions, and these
        over classes."""

        def rank(target: str) -> int | None:
            if target == "Linear":
                return 2
            return (1 if target.startswith("re:") else 0) if matches(module, target) else None

        ranked = [(rank(target), scheme) for scheme in self._schemes for target in scheme.targets]
        fitting = [(found, scheme) for found, scheme in ranked if found is not None]
        return min(fitting, key=lambda one: one[0])[1] if fitting else None


def _scheme(name: str, group: Any, layout: Any) -> Scheme:
    """Reads a group of a config; raises ValueError for unsupported kinds of weights."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"config_groups.{name} has no weights")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    layout = group.get("format") or layout
    layout = _ALIASES.get((layout, kind), layout)
    what = f"config_groups.{name}: {str(layout)[:40]} of {str(bits)[:9]}-bit {str(kind)[:9]} by {str(strategy)[:20]}"
    expected = {_PACKED: ("int", (4, 8)), _INTEGERS: ("int", (8,)), _FLOATS: ("float", (8,))}
    if layout not in FORMATS:
        raise ValueError(f"{what}: this format is not supported; supported formats: {', '.join(FORMATS)}")
    kinds, widths = expected.get(layout, ("float", (4,)))
    symmetric = weights.get("symmetric", True) is True
    if kind != kinds or bits not in widths or strategy not in _STRATEGIES[layout]:
        raise ValueError(f"{what} is not {kinds} of {' or '.join(map(str, widths))} bits by "
                         f"{', '.join(_STRATEGIES[layout])}")  # fmt: skip
    if not symmetric and layout != _PACKED:
        raise ValueError(f"{what} with zero points is not supported")
    size = weights.get("group_size") if strategy == "group" else None
    if strategy == "group" and (type(size) is not int or size < 1):
        raise ValueError(f"{what}: group_size={str(size)[:60]} is not a number of columns")
    block = block_of(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise ValueError(f"{what}: block_structure is missing")
    targets = list_of_names(group.get("targets"), f"config_groups.{name}.targets")
    return Scheme(targets, layout, bits, size, symmetric, block)


def _has_blocks(weight: Found, block: Block, scale: torch.Size) -> bool:
    """Whether a weight with one scale per ``block`` has scales of the shape ``scale``."""
    rows, columns = weight.shape
    return weight.form == float8_form(block) and scale == (-(-rows // block[0]), -(-columns // block[1]))


def _find_integers(entries: Mapping[str, Entry]) -> Found:
    """Finds a weight in int8, with one scale per tensor or per row."""
    weight, scale = need(entries, "weight", "weight_scale")
    if len(weight.shape) != 2 or scale.shape not in ((), (1,), (1, 1), weight.shape[:1], (weight.shape[0], 1)):
        raise ValueError(f"weight_scale is {scale}, not one scale or one per row of {weight}")
    form = GroupForm("int8", None, scale_dtype("weight_scale", scale))
    return Found(weight.shape, form, ("weight", "weight_scale"))


def _find_packed(entries: Mapping[str, Entry], read: Read, scheme: Scheme) -> Found:
    """Finds a weight of integers that are packed into words."""
    packed, scale, shape = need(entries, "weight_packed", "weight_scale", "weight_shape")
    expect("weight_shape", shape, (2,), "I64", "I32")
    rows, columns = read("weight_shape").tolist()
    expect("weight_packed", packed, (rows, -(-columns * scheme.bits // 32)), "I32")
    if len(scale.shape) != 2:
        expect("weight_scale", scale, (rows,) if scale.shape == (rows,) else (1,), scale.dtype)
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if len(scale.shape) == 2:
        expect("weight_scale", scale, (1 if scale.shape == (1, 1) else rows, groups), scale.dtype)
    size = group_size(columns, groups, scheme.group)
    parts: tuple[str, ...] = ("weight_packed", "weight_scale")
    if not scheme.symmetric:
        (zeros,) = need(entries, "weight_zero_point")
        packed_zeros = (-(-rows * scheme.bits // 32), groups)
        expect("weight_zero_point", zeros, packed_zeros if zeros.dtype == "I32" else (rows, groups), "I32", "I8")
        parts = (*parts, "weight_zero_point")
    form: Form | None = GroupForm(
        f"int{scheme.bits}", size, scale_dtype("weight_scale", scale), zeros=not scheme.symmetric
    )
    if "weight_g_idx" in entries:  # written by releases before 0.19
        expect("weight_g_idx", entries["weight_g_idx"], (columns,), "I32", "I64")
        parts = (*parts, "weight_g_idx")
        if not in_order(read("weight_g_idx"), size or columns):
            form = None
    elif form is not None:
        form.layout(columns)
    return Found((rows, columns), form, (*parts, "weight_shape"))


def _read_packed(weight: Found, tensors: Mapping[str, Tensor]) -> Stored:
    rows, columns = weight.shape
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    bits = 4 if packed.shape[1] == -(-columns // 8) else 8
    codes = packed.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1).expand(rows, -1)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack(zeros.T.contiguous(), bits)[:, :rows].T.contiguous()
    elif zeros is not None:  # releases before 0.9 do not pack zero points
        zeros = (zeros.int() + (1 << (bits - 1))).to(torch.uint8)
    if weight.form is None:
        spread = unpack(packed, bits)[:, :columns]
        return in_any_order(spread, zeros, scales, tensors["weight_g_idx"], bits)
    return QuantizedRows((codes, scales) if zeros is None else (codes, scales, zeros), weight.form)
