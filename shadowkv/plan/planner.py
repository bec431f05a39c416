"""Plans: memory, largest batch and time floor of policies for one model, context and machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shadowkv.engine.startup.sizing import GRAPH_BYTES, LargestBatch, largest_batch, prefill_bytes
from shadowkv.kvcache.policy.shape import LayerKind
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.traffic import StepReads, attention_seconds, step_reads
from shadowkv.layers.group import Group
from shadowkv.models.decoder import Decoder
from shadowkv.models.sharding import Shard
from shadowkv.models.storage import on_gpus, planned_row_blocks
from shadowkv.ops.quantised.rows import Form
from shadowkv.wording import GIB

MAX_GPUS = 64
"""As many as ``Planner.gpus_needed`` tries."""


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence on each tier, in whole blocks over all layers, including its state."""

    device: int
    host: int


def sequence_bytes(layout: Layout, context: int) -> SequenceBytes:
    """What a sequence owns whose prompt and output have ``context`` tokens in total."""
    size = layout.tier_bytes(layout.demand(context, context))
    return SequenceBytes(size["device"] + size["segment_slots"] + size["states"], size["host"])


def bytes_of_kinds(layout: Layout, context: int) -> dict[str, int]:
    """Its device bytes by what the attention of layers sees, in words."""
    found = Counter[str]()
    for group in layout.groups:
        unit, need = group.bytes_per_block(), group.demand(context, context)
        kind = str(LayerKind(group.window))
        found[kind] += sum(need[tier] * unit[tier] for tier in ("device", "segment_slots", "states"))
    return dict(found)


@dataclass(frozen=True)
class Machine:
    """What the machine has; the bandwidths are measured read roofs.

    Attributes:
        gpu_memory_gib, gpu_memory_utilization: the device's memory, and the share that may be used, weights included.
        host_memory_gib: pinned host memory for values; None is what the batch needs.
        kv_offload_gib: memory for copies of cached prompts, on top.
        device_bandwidth_tbs, host_bandwidth_gbs: TB/s (1e12) of device memory, GB/s (1e9) of the host's by zero-copy.
    """

    gpu_memory_gib: float
    gpu_memory_utilization: float
    host_memory_gib: float | None
    device_bandwidth_tbs: float
    host_bandwidth_gbs: float
    kv_offload_gib: float = 0.0


@dataclass(frozen=True)
class StepFloor:
    """The shortest time of a decode step given the bytes it reads, also of weights, and the highest rate that this
    allows."""

    batch: int
    weight_bytes: float
    step_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """One policy's figures.

    Attributes:
        kv: the policy's name.
        spec: the spec, resolved for the model.
        attended_tokens: per step and kv head.
        sequence_bytes: what one sequence takes.
        bytes_of_kinds: of its device bytes, those in layers of each kind, by the kind in words.
        device_saving: device bytes of ``full`` over this policy's.
        largest_batch: number of sequences that fit.
        reads: bytes per sequence of a step, in a layer of the first group.
        equivalent_bandwidth_tbs: full K and V of the context over the time that a step's attention needs, TB/s.
        single: floor of a step with one sequence.
        largest: floor of a step with the largest batch; None if not even one sequence fits.
        gpus_needed: GPUs, of each replica, on which one sequence fits: as many as were planned with, or a power of two;
            None where more than ``MAX_GPUS`` would be needed, or more host memory.
    """

    kv: str
    spec: KVSpec
    attended_tokens: int
    sequence_bytes: SequenceBytes
    bytes_of_kinds: Mapping[str, int]
    device_saving: float
    largest_batch: LargestBatch
    reads: StepReads
    equivalent_bandwidth_tbs: float
    single: StepFloor
    largest: StepFloor | None
    gpus_needed: int | None


class Planner:
    """Plans policies for sequences of ``context`` tokens, prompt and output together.

    For a model that is split across ranks the figures are one rank's, and communication between ranks takes no time.
    Weights in ``forms``, by name, are planned as they are stored where GPUs multiply them so.

    Attributes:
        shard: that rank's part; ``config`` is the model as the rank sees it.
        replicas: number of copies of the whole model.
        weights: how they are stored, in words.
        quantization: how those of projections are quantised, in words; None if they are not.
        weight_bytes: of the whole model.
        plain: forms of the weights that are planned dequantised, in words; empty where there are none.
        dequantised_bytes: of it with weights in ``forms`` dequantised, as a GPU without products for them holds them;
            None where there are none.
        bytes_read: bytes of the weights that a step of so many sequences reads (``Decoder.bytes_read``).
        expert_bytes: of the weights, those of experts of which a token is given to a few.
        usable_bytes: bytes of the device besides the weights, negative if these alone do not fit.
        prefill_bytes, graph_bytes: of these, what is left free for the longest prefill and for CUDA graphs; what steps
            need for each sequence, policies for fitting and compression, and tables of RoPE come on top.
        cache_bytes: what remains for the cache.
    """

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        context: int,
        machine: Machine,
        hit_rate: float,
        fetch_buffer: float,
        replicas: int = 1,
        forms: Mapping[str, Form] = MappingProxyType({}),
    ) -> None:
        self.shard, self.replicas, config = shard, replicas, shard.config
        self.config, self.dtype, self.context, self.machine = config, dtype, context, machine
        self.hit_rate, self.fetch_buffer, self.forms = hit_rate, fetch_buffer, forms
        group, small = Group(shard.rank, shard.size), on_gpus(forms, shard.whole, dtype)
        self.plain = " and ".join(sorted({form.name for name, form in forms.items() if name not in small}))
        model = Decoder(config, dtype, "meta", planned_row_blocks(shard, small, dtype), group)
        self.weights, self.weight_bytes = model.weights_description, model.num_packed_bytes
        self.quantization = config.quantization or " and ".join(model.forms) or None
        self.dequantised_bytes = Decoder(config, dtype, "meta", group=group).num_bytes if model.forms else None
        self.bytes_read, self.expert_bytes = model.bytes_read, model.expert_bytes
        self.prefill_bytes = prefill_bytes(config, context, dtype)
        usable = int(machine.gpu_memory_gib * GIB * machine.gpu_memory_utilization)
        self.usable_bytes, self.graph_bytes = usable - self.weight_bytes, GRAPH_BYTES
        self.cache_bytes = self.usable_bytes - self.prefill_bytes - self.graph_bytes

    def plan(self, name: str, spec: KVSpec) -> Plan:
        """Figures of ``spec``; raises ValueError with every reason it cannot be used with the model."""
        machine, shape, layout = self.machine, self.config.shape, self._layout(spec)
        need, batch = sequence_bytes(layout, self.context), self._largest_batch(layout)
        what = layout, self.context, self.hit_rate
        reads, device_bandwidth = step_reads(layout.main, *what[1:]), machine.device_bandwidth_tbs * 1e12
        attention = attention_seconds(*what, device_bandwidth, machine.host_bandwidth_gbs * 1e9)

        def floor(size: int) -> StepFloor:
            weights = self.bytes_read(size)
            seconds = size * attention + weights / device_bandwidth
            return StepFloor(size, weights, seconds * 1e3, size / seconds)

        full_kv = 2 * self.context * shape.kv_dim * self.dtype.itemsize * shape.num_layers
        return Plan(
            name,
            layout.spec,
            layout.spec.attended_tokens(self.context),
            need,
            bytes_of_kinds(layout, self.context),
            self._full_bytes() / need.device,
            batch,
            reads,
            full_kv / attention / 1e12,
            floor(1),
            floor(batch.both) if batch.both else None,
            self.shard.size if batch.both else None if batch.device else self._gpus_needed(spec),
        )

    def _layout(self, spec: KVSpec) -> Layout:
        return Layout(self.shard.policy(spec), self.config.shape, self.dtype, self.context, self.fetch_buffer)

    def _largest_batch(self, layout: Layout) -> LargestBatch:
        machine = self.machine
        host = None if machine.host_memory_gib is None else int(machine.host_memory_gib * GIB)
        offload = machine.kv_offload_gib > 0
        return largest_batch(self.config, layout, self.context, self.context, self.usable_bytes, host, offload)

    def _gpus_needed(self, spec: KVSpec) -> int | None:
        size = 2
        while size <= MAX_GPUS:
            if size > self.shard.size:
                try:
                    shard = Shard(self.shard.whole, 0, size, self.shard.expert_parallel)
                    rest = self.context, self.machine, self.hit_rate, self.fetch_buffer
                    other = Planner(shard, self.dtype, *rest, forms=self.forms)
                    if other._largest_batch(other._layout(spec)).both:
                        return size
                except ValueError:  # it cannot be cut up for so many
                    return None
            size *= 2
        return None

    def _full_bytes(self) -> int:
        full = Layout(KVSpec(), self.config.shape, self.dtype, self.context)
        return sequence_bytes(full, self.context).device
