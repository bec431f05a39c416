"""Finds which backend an engine would choose for each op, given a model and a policy, on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shadowkv.engine.startup.loading import default_prefill, device_of, ops_for
from shadowkv.installation import building_cpu, building_cuda
from shadowkv.kvcache.codecs import with_names
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import load_plan, plan_on
from shadowkv.models.sharding import Shard
from shadowkv.models.storage import planned_row_blocks
from shadowkv.ops.registry import CALLS


@dataclass(frozen=True)
class OpChoice:
    """The backend of an op.

    Attributes:
        op: the op's name.
        backend: the backend's name in ``ops.registry``.
        called: whether the model and the policy call the op. If not, ``backend`` is what this machine would use for it.
        reason: why the fastest backend is not used; None if it is used.
        remedy: a command or other remedy that makes a faster backend run; None if there is none.
    """

    op: str
    backend: str
    called: bool
    reason: str | None
    remedy: str | None


@dataclass(frozen=True)
class Choices:
    """The backends of all ops, in the order of ``CALLS``, and the model, policy and device that they were chosen
    for."""

    model: str
    kv: str
    device: torch.device
    attention_backend: str
    ops: list[OpChoice]


def choices_for(model: str, kv: str, device: str, attention_backend: str = "auto") -> Choices:
    """Returns the backends that an engine of ``model`` with the policy ``kv`` would choose. Raises ValueError or
    OSError if there is no such model, policy or device, or if the attention library ``attention_backend`` cannot
    run."""
    where = device_of(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config, forms = plan_on(where, dtype, *load_plan(model))
    layout = Layout(preset(kv), config.shape, dtype, config.max_position)
    if layout.spec.prefill is None:
        layout = layout.with_fields(prefill=default_prefill(layout, config.rope, where))
    decoder = Decoder(config, dtype, "meta", planned_row_blocks(Shard(config), forms, dtype))
    ops = ops_for(decoder, layout, config.rope, where, attention_backend=attention_backend)
    build = building_cuda if where.type == "cuda" else building_cpu
    chosen = []
    for name in CALLS:
        reason = next(map(with_names, ops.reasons[name]), None)
        unbuilt = name in ops.unbuilt
        chosen.append(OpChoice(name, ops.backends[name], name in ops.called, reason, build() if unbuilt else None))
    return Choices(model, kv, where, attention_backend, chosen)
