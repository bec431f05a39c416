"""Fills a decoder with the weights of a checkpoint, in the form that the files have, or with random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shadowkv.layers.linear import SCALE
from shadowkv.layers.quantized_matrix import QuantizedMatrix, RowBlock
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.checkpoints.stored_weight import NUMBERS_AT_ONCE, Stored, dense, fill_fp8, fill_plain
from shadowkv.models.decoder import Decoder
from shadowkv.models.sharding import Shard
from shadowkv.models.weight_names import Target, Targets
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

SEED = 0

_SPREAD = {"int4": 4.61, "int8": 73.9, "e2m1": 2.93, "e4m3": 64.0}
"""Element type -> standard deviation of the numbers that random codes stand for. The codes are uniform bytes; for e4m3
they are rounded normal numbers."""


def check_shapes(model: nn.Module, targets: Targets, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks the shapes of the files' tensors against the model, which can be on the ``meta`` device.

    Raises ValueError, which names the tensors that are missing, unexpected or of the wrong shape.
    """
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = []
    for name, shape in shapes.items():
        target = targets.get(name)
        if target is None:
            if not _is_derived(name):
                problems.append(f"unexpected: {name} {shape}")
            continue
        needed = (target.num_rows, *parameters[target.parameter][1:])
        if shape != needed:
            problems.append(f"shape: {name} is {shape}, needs {needed}")
    problems += [f"missing: {name}" for name in targets if name not in shapes]
    if problems:
        raise ValueError(f"the weights do not fit the config: {join_reasons(problems)}")


def held(targets: Targets, shard: Shard) -> set[str]:
    """Returns the names of the weights of which this rank has a part. With expert parallelism, a rank has no part of
    other ranks' experts."""

    def has_part(target: Target) -> bool:
        return any(True for span in target.spans for _ in shard.spans(target.parameter, *span))

    return {name for name, target in targets.items() if has_part(target)}


@torch.no_grad()
def fill(model: Decoder, targets: Targets, tensors: Iterable[tuple[str, Stored]], shard: Shard) -> None:
    """Copies this rank's shard from a stream of the weights that are ``held``. Each weight is cast to its parameter's
    dtype. The shapes must have been checked.

    Weights of fp8 projections are quantized one after the other, so that memory never holds the whole model in both
    forms. Weights that stay quantized are copied unchanged.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    parameters |= {f"{name}.weight": table.host for name, table in model.tables.items() if table.host is not None}
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedMatrix)}
    for name, parameter in parameters.items():
        if (cut := shard.cut(name)) is not None and sum(stop - start for start, stop in cut.rows) < len(parameter):
            parameter.zero_()  # its padding rows stay zero
    for name, stored in tensors:
        target = targets[name]
        if (target.offset, target.scale) != (0.0, 1.0):
            stored = (dense(stored).float() + target.offset) * target.scale
        for rows, part in _pieces(target, stored, shard):
            if (matrix := matrices.get(target.parameter)) is not None:
                (kept,) = matrix.stored(rows.start, rows.stop)
                if isinstance(kept, QuantizedRows):
                    assert isinstance(part, QuantizedRows) and part.form == kept.form, f"{name} has another form"
                    for mine, theirs in zip(kept.tensors, part.tensors, strict=True):
                        mine.copy_(theirs)
                else:
                    fill_plain(kept, part)
            elif (scale := parameters.get(target.parameter + SCALE)) is not None:
                fill_fp8(parameters[target.parameter][rows], scale[rows], part)
            else:
                fill_plain(parameters[target.parameter][rows], part)


def _pieces(target: Target, stored: Stored, shard: Shard) -> Iterator[tuple[slice, Stored]]:
    """Yields a shard's parts of a weight, each with its rows in the rank's parameter."""
    first = 0
    for start, stop in target.spans:
        yield from shard.pieces(target.parameter, start, stop, stored[first : first + stop - start])
        first += stop - start


def use_files(model: Decoder, targets: Targets, mapped: Callable[[str], Tensor], shard: Shard) -> None:
    """Gives a rank's part of a model its rows of the tables that stay in the files. ``mapped`` returns a tensor of the
    files by its name."""
    parts: dict[str, list[tuple[int, Tensor]]] = {f"{name}.weight": [] for name in model.tables}
    for name, target in targets.items():
        if target.parameter in parts:
            spans = shard.spans(target.parameter, target.start, target.stop)
            parts[target.parameter] += [(here.start, mapped(name)[rows]) for here, rows in spans]
    for name, table in model.tables.items():
        table.use(parts[f"{name}.weight"])


def stored_row_blocks(
    outline: nn.Module, targets: Targets, forms: Mapping[str, Form], shard: Shard
) -> dict[str, tuple[RowBlock, ...]]:
    """Returns the row blocks (consecutive rows in one form) of a shard's parameters by name, for parameters with at
    least one row in a quantized form.

    Args:
        outline: the whole model, which can be on the ``meta`` device.
        forms: name of a quantized tensor in the files -> the form that it stays in.
    """
    columns = {name: parameter.shape[-1] for name, parameter in outline.named_parameters()}
    row_blocks: dict[str, dict[int, RowBlock]] = {}
    for name, target in targets.items():
        form = forms.get(name)
        if form is not None:
            form = shard.form(target.parameter, form, columns[target.parameter])
        for start, stop in target.spans:
            for here, _ in shard.spans(target.parameter, start, stop):
                row_blocks.setdefault(target.parameter, {})[here.start] = RowBlock(here.stop - here.start, form)
    return {
        parameter: tuple(block for _, block in sorted(of_rows.items()))
        for parameter, of_rows in row_blocks.items()
        if any(block.form is not None for block in of_rows.values())
    }


def quantized(model: nn.Module, targets: Targets) -> dict[str, Target]:
    """Returns those of ``targets`` whose parameters are weights of fp8 projections."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: target for name, target in targets.items() if target.parameter + SCALE in parameters}


def _is_derived(name: str) -> bool:
    """Whether a tensor in the files is not needed, because it can be derived: rotation tables, or the copy of a tied
    head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


@torch.no_grad()
def fill_dummy(model: Decoder) -> None:
    """Fills the model, on its device, with random weights, to measure speed without a checkpoint
    (``load_format="dummy"``).

    Matrices are scaled so that activations keep their magnitude; norms are one, biases zero. Each rank of a model gets
    different numbers.
    """
    generator = torch.Generator(model.device).manual_seed(SEED + model.group.rank)
    parameters = dict(model.named_parameters())
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            fill_random(module, generator)
    for table in model.tables.values():
        for _, part in table.parts:
            part.normal_(0.0, table.columns**-0.5, generator=generator)
    for name, parameter in parameters.items():
        if QuantizedMatrix.PARTS in name:
            continue  # filled above
        if name.removesuffix(SCALE) in parameters and name.endswith(SCALE):
            continue  # filled together with its weight
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name == "embedding":
            parameter.normal_(0.0, 1.0 if model.head is not None else parameter.shape[1] ** -0.5, generator=generator)
        elif (scale := parameters.get(name + SCALE)) is not None:
            weight = torch.empty(parameter.shape, dtype=model.dtype, device=model.device)
            fill_fp8(parameter, scale, weight.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator))
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


@torch.no_grad()
def fill_random(matrix: QuantizedMatrix, generator: torch.Generator) -> None:
    """Fills a matrix with random numbers, scaled so that products have about the magnitude of their inputs."""
    for rows in matrix.stored(0, matrix.num_rows):
        if isinstance(rows, QuantizedRows):
            _draw(rows, matrix.columns**-0.5, generator)
        else:
            rows.normal_(0.0, matrix.columns**-0.5, generator=generator)


def _draw(rows: QuantizedRows, deviation: float, generator: torch.Generator) -> None:
    """Fills ``rows`` with random codes and equal scales. The dequantized numbers have the standard deviation
    ``deviation``."""
    form = rows.form
    assert isinstance(form, GroupForm), f"no random numbers in {form.name}"
    (codes, scales, *rest), spread = rows.tensors, _SPREAD[form.element]
    if form.element == "e4m3":
        for _, tile in rows.tiles(NUMBERS_AT_ONCE):
            numbers = torch.empty(tile.tensors[0].shape, device=codes.device)
            tile.tensors[0].copy_(numbers.normal_(0.0, spread, generator=generator))
    else:
        codes.random_(generator=generator)
    scales.copy_(torch.full_like(scales, 1.0 if form.factor else deviation / spread, dtype=torch.float32))
    if form.zeros:
        rest[0].fill_(2 ** (form.bits - 1))
    if form.factor:
        rest[-1].fill_(deviation / spread)
