"""Where each checkpoint tensor goes: names of a family's files -> rows of the decoder's joined parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shadowkv.layers.block_matrix import BlockMatrix, Run
from shadowkv.layers.fp8_linear import SCALE
from shadowkv.models.checkpoints.stored_weight import Blocks, Stored, dense
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.files import in_words
from shadowkv.models.fp8 import fill_quantised
from shadowkv.models.sharding import Shard


@dataclass(frozen=True)
class Target:
    """Rows ``start`` to ``stop`` of a decoder's parameter."""

    parameter: str
    start: int
    stop: int


Targets = dict[str, Target]


def decoder_targets(config: ModelConfig, *, joined_qkv: bool = False, joined_gate_up: bool = False) -> Targets:
    """Targets of Hugging Face's names for the parts that all families share.

    Args:
        config: the model.
        joined_qkv: the files hold q, k and v as one ``qkv_proj``.
        joined_gate_up: the files hold gate and up as one ``gate_up_proj``.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_query_heads * config.head_dim, config.shape.kv_dim
    targets = {
        "model.embed_tokens.weight": Target("embedding", 0, config.vocab_size),
        "model.norm.weight": Target("norm.weight", 0, hidden),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = Target("head", 0, config.vocab_size)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, qkv = f"{theirs}.self_attn", f"{ours}.attention.qkv"
        if joined_qkv:
            targets |= rows(f"{attention}.qkv_proj", qkv, 0, q + 2 * kv, config.qkv_bias)
        else:
            targets |= rows(f"{attention}.q_proj", qkv, 0, q, config.qkv_bias)
            targets |= rows(f"{attention}.k_proj", qkv, q, q + kv, config.qkv_bias)
            targets |= rows(f"{attention}.v_proj", qkv, q + kv, q + 2 * kv, config.qkv_bias)
        targets |= rows(f"{attention}.o_proj", f"{ours}.attention.out", 0, hidden, config.attention_out_bias)
        if joined_gate_up:
            targets |= rows(f"{theirs}.mlp.gate_up_proj", f"{ours}.mlp.gate_up", 0, 2 * inner)
        else:
            targets |= rows(f"{theirs}.mlp.gate_proj", f"{ours}.mlp.gate_up", 0, inner)
            targets |= rows(f"{theirs}.mlp.up_proj", f"{ours}.mlp.gate_up", inner, 2 * inner)
        targets |= rows(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", 0, hidden)
        targets |= rows(f"{theirs}.input_layernorm", f"{ours}.attention_norm", 0, hidden)
        targets |= rows(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", 0, hidden)
    return targets


def rows(theirs: str, ours: str, start: int, stop: int, bias: bool = False) -> Targets:
    """Targets of one module: its weight, and its bias where it has one."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{theirs}.{kind}": Target(f"{ours}.{kind}", start, stop) for kind in kinds}


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
