"""Decides which weights stay quantized on a device, what is reported about other weights, and where tables of n-gram
embeddings are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import torch

from shadowkv.layers.quantized_matrix import RowBlock
from shadowkv.layers.spec import ON_DEVICE, TableForm
from shadowkv.load_settings import DEQUANTIZED
from shadowkv.models.checkpoints.quantized.format import Format
from shadowkv.models.checkpoints.quantized.registry import SHAPES
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import FP8_ROWS
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.filling import stored_row_blocks
from shadowkv.models.registry import family
from shadowkv.models.sharding import Shard
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, row_bytes
from shadowkv.ops.quantized_matmul import humming
from shadowkv.ops.quantized_matmul.cpu import in_blocks
from shadowkv.ops.registry import choose
from shadowkv.wording import GIB, SettingsError, counted

Forms = Mapping[str, Form]
"""Forms of quantized weights, by name."""


TABLES_BELOW = 0.5
"""Tables of n-gram embeddings are in a GPU's memory if all weights together take at most this share of it."""


def tables_in(config: ModelConfig) -> list[str]:
    """Names of the weights in a model's files that are rows of tables of n-gram embeddings."""
    if config.n_grams is None:
        return []
    targets = family(config.architecture).targets(config)
    return [name for name, target in targets.items() if target.parameter.endswith(".n_grams.table.weight")]


def in_files(
    config: ModelConfig, forms: Forms, files: SafetensorsWeights, dtype: torch.dtype, on_cpu: bool
) -> TableForm:
    """Returns how the tables of a model's files are stored on a device that has room for them, with activations in
    ``dtype``. A CPU reads them from the files. A GPU has them in the files' dtype, unless that is the wider one. Tables
    with scales are dequantized.

    Args:
        forms: forms of quantized weights in the files.
    """
    names = tables_in(config)
    if not names or any(name in forms for name in names):
        return ON_DEVICE
    stored = {files.dtype(name) for name in names}
    widest = max(stored, key=lambda one: one.itemsize)
    if on_cpu:
        return TableForm("files", widest)
    return TableForm("device", widest if len(stored) == 1 and widest.itemsize <= dtype.itemsize else None)


def on_gpu(outline: Decoder, memory: int, host_free: int | None = None) -> TableForm:
    """Returns how the tables of a model are stored on a GPU of ``memory`` bytes: on the GPU if the weights leave enough
    memory for the KV cache there, otherwise in host memory.

    Args:
        outline: this rank's part of the model, with the tables on the device.
        host_free: bytes of host memory that are free, before any rank of the model takes some. If the tables of all
            ranks do not fit there, they are on the GPUs. None is no limit.
    """
    size = outline.table_bytes["device"]
    crowded = outline.num_packed_bytes > TABLES_BELOW * memory
    fit = host_free is None or outline.group.size * size <= host_free
    stored = next((table.stored for table in outline.tables.values()), None)
    return TableForm("host" if size and crowded and fit else "device", stored)


def kept(forms: Forms, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Form]:
    """Returns the forms of the weights that stay quantized on ``device``, with activations in ``dtype``: those for
    which the device has a matrix product. With 8-bit arithmetic (``quantization="fp8"``) only experts stay quantized.
    All other weights are dequantized when they load."""
    backend, of_tables = choose("quantized_matmul", device).backend, tables_in(config)
    forms = {name: form for name, form in forms.items() if name not in of_tables}
    if config.quantization is not None:
        forms = of_experts(forms)
    if device.type == "cuda":
        return on_gpus(forms, config, dtype) if backend == "humming" else {}
    in_cpp = backend == "cpu"
    return {name: form for name, form in forms.items() if isinstance(form, GroupForm) or (in_cpp and in_blocks(form))}


def on_gpus(forms: Forms, config: ModelConfig, dtype: torch.dtype) -> dict[str, Form]:
    """Returns the forms that GPUs have matrix products for. Experts stay quantized only if all experts of a layer have
    the same form in a projection, because they are stored as one tensor."""
    small = {name: form for name, form in forms.items() if humming.takes(form, dtype)}
    targets, forms_in = family(config.architecture).targets(config), dict[str, set[Form | None]]()
    for name, target in targets.items():
        if _of_experts(name):
            forms_in.setdefault(target.parameter, set()).add(small.get(name))

    def alike(name: str) -> bool:
        return not _of_experts(name) or (name in targets and len(forms_in[targets[name].parameter]) == 1)

    return {name: form for name, form in small.items() if alike(name)}


def of_experts(forms: Forms) -> dict[str, Form]:
    """The forms of experts' weights, without shared experts."""
    return {name: form for name, form in forms.items() if _of_experts(name)}


def _of_experts(name: str) -> bool:
    return ".experts." in name


def is_fp8(forms: Forms) -> bool:
    """Whether there are quantized weights and all are 8-bit floats."""
    return bool(forms) and all(isinstance(form, GroupForm) and form.element == "e4m3" for form in forms.values())


def projections(config: ModelConfig) -> list[str]:
    """Names of the weights of projections."""
    return [name for name in family(config.architecture).targets(config) if name.endswith("_proj.weight")]


def check_stated(quantization: str | None, method: str | None, source: str) -> None:
    """Raises SettingsError if the files are not quantized with the method that the user names.

    Args:
        method: the files' method; None if they are not quantized.
    """
    if quantization not in (None, "fp8", DEQUANTIZED, method):
        what = "are not quantized" if method is None else f"are in {method}"
        reason = f"quantization={quantization!r}: the files of {source} {what} and are loaded as they are; leave it out"
        raise SettingsError(reason, ["quantization"])


def planned_forms(config: ModelConfig, format: Format | None, quantization: str | None) -> dict[str, Form]:
    """Returns the forms of weights by name, as far as the config shows them. If ``format`` is None, all projections get
    the form that ``quantization`` names in ``SHAPES``. They stay unquantized if ``SHAPES`` has no such name."""
    if format is None:
        return dict.fromkeys(projections(config), SHAPES[quantization]) if quantization in SHAPES else {}
    check_stated(quantization, format.method, "the model")
    head = [] if config.tie_word_embeddings else ["lm_head.weight"]
    planned = {name: format.planned(name.removesuffix(".weight")) for name in (*projections(config), *head)}
    return {name: form for name, form in planned.items() if form is not None}


def planned_row_blocks(shard: Shard, forms: Forms, dtype: torch.dtype) -> dict[str, tuple[RowBlock, ...]]:
    """Returns the row blocks (consecutive rows in one form) of a shard's parameters by name. ``forms`` are the forms of
    the weights, which can come from files or be random."""
    outline, targets = Decoder(shard.whole, dtype, "meta"), family(shard.whole.architecture).targets(shard.whole)
    return stored_row_blocks(outline, targets, forms, shard)


def dequantized(
    forms: Forms,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
) -> list[str]:
    """Returns notes on weights that are dequantized when they load, and on the memory that they take: one line per
    reason. ``quantization`` is ``none`` if the user asked to dequantize, otherwise ``ModelConfig.quantization``."""
    names_of: dict[str, list[str]] = {}
    for name in forms:
        names_of.setdefault(_why(name, forms[name], dtype, device, quantization), []).append(name)
    lines = []
    for why, names in names_of.items():
        stored = sum(prod(shapes[name][:-1]) * row_bytes(forms[name], shapes[name][-1]) for name in names)
        plain = sum(prod(shapes[name]) for name in names) * dtype.itemsize
        what = " and ".join(sorted({forms[name].name for name in names}))
        lines.append(
            f"{counted(len(names), 'weight')} in {what} are dequantized to {str(dtype).removeprefix('torch.')}, "
            f"{plain / GIB:.2f} GiB instead of {stored / GIB:.2f}: {why}"
        )
    return lines


def _why(name: str, form: Form, dtype: torch.dtype, device: torch.device, quantization: str | None) -> str:
    """Why a weight is dequantized."""
    if quantization == DEQUANTIZED:
        return f"quantization={quantization!r}"
    if device.type == "cuda":
        if quantization is not None and not _of_experts(name):
            return f"with quantization={quantization!r}, only experts keep the checkpoint's format"
        if missing := humming.missing():
            return "; ".join(missing)
        if dtype != torch.bfloat16:
            own = str(dtype).removeprefix("torch.")
            return f"on {device} weights stay quantized only with dtype='bfloat16', not {own!r}"
        if _of_experts(name) and humming.takes(form, dtype):
            return "experts stay quantized only if all experts of a projection have the same form"
    return f"on {device} there is no matrix product for this form"


def in_fp8(forms: Forms, names: Collection[str]) -> list[str]:
    """Returns notes on ``names``, the weights that the model has in 8-bit floats: one line about those that the files
    have unquantized, and one about those that the files have in other forms."""
    lines, plain = [], [name for name in names if name not in forms]
    if plain:
        lines.append(f"{len(plain)} weights that the files have unquantized are quantized too: {plain[0]}, ...")
    others = sorted({forms[name].name for name in names if forms.get(name, FP8_ROWS) != FP8_ROWS})
    if others:
        lines.append(f"weights in {' and '.join(others)} became 8-bit floats with one scale per row")
    return lines
