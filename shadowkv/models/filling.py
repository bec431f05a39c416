"""Fills a decoder with the weights of a checkpoint, as its files store them, or with random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from shadowkv.layers.block_matrix import BlockMatrix, Run
from shadowkv.layers.linear import SCALE
from shadowkv.models.checkpoints.files import in_words
from shadowkv.models.checkpoints.stored_weight import Blocks, Stored, dense, fill_quantised
from shadowkv.models.decoder import Decoder
from shadowkv.models.families.weight_names import Targets
from shadowkv.models.sharding import Shard

SEED = 0


def check_shapes(model: nn.Module, targets: Targets, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks what files say about their tensors against the model, which may be on the ``meta`` device.

    Raises ValueError naming tensors that are missing, unexpected or of the wrong shape.
    """
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = []
    for name, shape in shapes.items():
        target = targets.get(name)
        if target is None:
            if not _is_derived(name):
                problems.append(f"unexpected: {name} {shape}")
            continue
        needed = (target.stop - target.start, *parameters[target.parameter][1:])
        if shape != needed:
            problems.append(f"shape: {name} is {shape}, needs {needed}")
    problems += [f"missing: {name}" for name in targets if name not in shapes]
    if problems:
        raise ValueError(f"the weights do not fit the config: {in_words(problems)}")


@torch.no_grad()
def fill(model: nn.Module, targets: Targets, tensors: Iterable[tuple[str, Stored]], shard: Shard) -> None:
    """Copies its shard of a stream of named tensors, whose shapes were checked, one at a time, casting to the
    parameters' dtype.

    Tensors of quantised projections are quantised on the way: the model never exists in both forms. What stays in
    blocks is copied unchanged.
    """
    parameters = dict(model.named_parameters())
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, BlockMatrix)}
    for name, parameter in parameters.items():
        if (cut := shard.cut(name)) is not None and sum(stop - start for start, stop in cut.rows) < len(parameter):
            parameter.zero_()  # padding rows
    for name, stored in tensors:
        target = targets.get(name)
        if target is None:
            continue
        for rows, part in shard.pieces(target.parameter, target.start, target.stop, stored):
            if (matrix := matrices.get(target.parameter)) is not None:
                ((kept, form),) = matrix.stored(rows.start, rows.stop)
                kept.copy_(part.data if isinstance(part, Blocks) and part.form == form else dense(part))
            elif (scale := parameters.get(target.parameter + SCALE)) is not None:
                fill_quantised(parameters[target.parameter][rows], scale[rows], part)
            else:
                parameters[target.parameter][rows].copy_(dense(part))


def block_runs(targets: Targets, forms: Mapping[str, str]) -> dict[str, tuple[Run, ...]]:
    """How the rows of parameters are stored that have any in blocks in the files; ``forms`` by tensor."""
    runs: dict[str, dict[int, Run]] = {}
    for name, target in targets.items():
        runs.setdefault(target.parameter, {})[target.start] = Run(target.stop - target.start, forms.get(name))
    return {
        parameter: tuple(run for _, run in sorted(of_rows.items()))
        for parameter, of_rows in runs.items()
        if any(run.form is not None for run in of_rows.values())
    }


def quantised(model: nn.Module, targets: Targets) -> list[str]:
    """Names of the tensors that become weights of quantised projections."""
    parameters = {name for name, _ in model.named_parameters()}
    return [name for name, target in targets.items() if target.parameter + SCALE in parameters]


def _is_derived(name: str) -> bool:
    """Whether old files contain the tensor though the config implies it: rotation tables, a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


@torch.no_grad()
def fill_dummy(model: Decoder) -> None:
    """Random weights, for measuring speed without a checkpoint (``load_format="dummy"``): fills the model where it is.

    Matrices are such that activations keep their scale, norms are one, biases zero. Each rank of a model gets
    different numbers.
    """
    generator = torch.Generator(model.device).manual_seed(SEED + model.group.rank)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
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
            fill_quantised(parameter, scale, weight.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator))
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
