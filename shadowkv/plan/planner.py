"""``Planner``: memory, largest batch and shortest step time of policies, for one model, context and machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.startup.sizing import GRAPH_BYTES, LargestBatch, largest_batch, prefill_bytes
from shadowkv.kvcache.policy.shape import LayerKind
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.recurrent.layout import DEFAULT_STATES, RING, StateSettings
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.traffic import StepReads, attention_seconds, step_reads
from shadowkv.layers.group import Group
from shadowkv.models.decoder import Decoder
from shadowkv.models.sharding import Shard
from shadowkv.models.storage import on_gpu, on_gpus, planned_row_blocks
from shadowkv.ops.quantized.rows import Form
from shadowkv.wording import GIB

MAX_GPUS = 64
"""Maximum number of GPUs that ``Planner._gpus_needed`` tries."""


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes that one sequence takes on the device and on the host, for all layers and with its states. Memory is
    counted in whole blocks of the arenas."""

    device: int
    host: int


def sequence_bytes(layout: Layout, context: int) -> SequenceBytes:
    """Returns the bytes of a sequence of ``context`` tokens, prompt and output together."""
    size = layout.tier_bytes(layout.demand(context, context))
    recurrent = 0 if layout.recurrent is None else RING * layout.recurrent.state_bytes
    return SequenceBytes(size["device"] + size["segment_slots"] + size["states"] + recurrent, size["host"])


def bytes_of_kinds(layout: Layout, context: int) -> dict[str, int]:
    """Returns the device bytes of a sequence of ``context`` tokens for each kind of layer. The keys are
    ``str(LayerKind)``."""
    found = Counter[str]()
    for group in layout.groups:
        unit, need = group.bytes_per_block(), group.demand(context, context)
        kind = str(LayerKind(group.window))
        found[kind] += sum(need[tier] * unit[tier] for tier in ("device", "segment_slots", "states"))
    if (recurrent := layout.recurrent) is not None:
        found[str(LayerKind(state=recurrent.arrays))] = RING * recurrent.state_bytes
    return dict(found)


@dataclass(frozen=True)
class Machine:
    """The memory and bandwidths of a machine. A bandwidth is the highest that kernels reach when they read.

    Attributes:
        gpu_memory_gib: memory of the GPU.
        gpu_memory_utilization: share of the GPU's memory to use, weights included.
        host_memory_gib: pinned host memory for values. None means as much as the batch needs.
        kv_offload_gib: additional host memory for copies of cached prompts, of all ranks together.
        device_bandwidth_tbs: bandwidth of device memory in TB/s (1e12).
        host_bandwidth_gbs: bandwidth of the GPU's zero-copy reads from host memory in GB/s (1e9).
    """

    gpu_memory_gib: float
    gpu_memory_utilization: float
    host_memory_gib: float | None
    device_bandwidth_tbs: float
    host_bandwidth_gbs: float
    kv_offload_gib: float = 0.0


@dataclass(frozen=True)
class StepFloor:
    """The shortest possible time of a decode step, computed from the bytes that the step reads.

    Attributes:
        batch: number of sequences.
        weight_bytes: bytes of weights that the step reads.
        step_ms: the shortest time of the step, in milliseconds.
        tokens_per_second: throughput of steps of this duration.
    """

    batch: int
    weight_bytes: float
    step_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """One policy's figures.

    Attributes:
        kv: the policy's name.
        spec: the policy, resolved for the model.
        attended_tokens: number of tokens that a step attends to for each kv head.
        sequence_bytes: bytes of one sequence.
        bytes_of_kinds: device bytes of one sequence for each kind of layer. The keys are ``str(LayerKind)``.
        device_saving: device bytes of one sequence with ``full``, divided by those with this policy.
        largest_batch: numbers of sequences that fit into device memory, into host memory, and into both.
        drafts: how tokens are drafted; None without drafts.
        drafted_rows: number of rows that drafted tokens add to a step of the largest batch. Their memory is counted,
            but ``single`` and ``largest`` are steps without them.
        reads: bytes that a step reads for one sequence, in one layer of ``Layout.main``.
        equivalent_bandwidth_tbs: bandwidth in TB/s with which attention of ``full`` would be as fast as this policy's:
            the bytes that a step of ``full`` reads for one sequence, without weights, divided by the time of this
            policy's attention.
        single: shortest time of a step with one sequence.
        largest: shortest time of a step with the largest batch; None if not even one sequence fits.
        gpus_needed: number of GPUs per replica with which one sequence fits. It is the planned number if that is
            enough, otherwise a larger power of two. None if more than ``MAX_GPUS`` are needed, or if only host memory
            is too small.
    """

    kv: str
    spec: KVSpec
    attended_tokens: int
    sequence_bytes: SequenceBytes
    bytes_of_kinds: Mapping[str, int]
    device_saving: float
    largest_batch: LargestBatch
    drafts: SpeculativeConfig | None
    drafted_rows: int
    reads: StepReads
    equivalent_bandwidth_tbs: float
    single: StepFloor
    largest: StepFloor | None
    gpus_needed: int | None


class Planner:
    """Plans policies for sequences of ``context`` tokens, prompt and output together.

    If the model is split across ranks, the figures are those of one rank, and no time is counted for communication
    between ranks. ``forms`` maps names of quantized weights to their forms. Weights stay quantized if GPUs can multiply
    by weights of their form. ``states`` are the settings of recurrent states.

    Attributes:
        shard: the rank's part of the model. ``config`` is the config of this part.
        replicas: number of copies of the whole model.
        weights: description of the form of the weights.
        quantization: description of the projections' quantization; None if they are not quantized.
        weight_bytes: bytes of the rank's weights on the GPU.
        tables: description of the tables of n-gram embeddings; None without tables.
        host_table_bytes: bytes of these tables if they are in host memory; else 0.
        plain: names of the forms whose weights are counted as dequantized, as text; empty if there are none.
        dequantized_bytes: bytes of the weights with all ``forms`` dequantized, as on a GPU that cannot multiply these
            forms; None if no weights stay quantized.
        bytes_read: function from a number of sequences to the bytes of weights that a step reads
            (``Decoder.bytes_read``).
        expert_bytes: bytes of the routed experts' weights.
        head_weight_bytes: bytes of the draft head's weights, part of ``weight_bytes``; 0 without one.
        usable_bytes: device bytes that may be used (``gpu_memory_utilization``), minus those of the weights; negative
            if the weights do not fit.
        prefill_bytes, graph_bytes: device bytes that are left free for the longest prefill and for CUDA graphs.
        cache_bytes: device bytes that remain for the cache. The largest batch uses fewer, because it also leaves bytes
            free for steps (per sequence), for fitting and compression, and for RoPE's tables.
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
        states: StateSettings = DEFAULT_STATES,
    ) -> None:
        self.shard, self.replicas, config = shard, replicas, shard.config
        self.config, self.dtype, self.context, self.machine = config, dtype, context, machine
        self.hit_rate, self.fetch_buffer, self.forms = hit_rate, fetch_buffer, forms
        self.states = states
        group, small = Group(shard.rank, shard.size), on_gpus(forms, shard.whole, dtype)
        self.plain = " and ".join(sorted({form.name for name, form in forms.items() if name not in small}))
        row_blocks = planned_row_blocks(shard, small, dtype)
        tables = on_gpu(Decoder(config, dtype, "meta", row_blocks, group), int(machine.gpu_memory_gib * GIB))
        model = Decoder(config, dtype, "meta", row_blocks, group, tables)
        self.tables, self.host_table_bytes = model.tables_description, model.table_bytes["host"]
        self.weights, self.weight_bytes = model.weights_description, model.num_packed_bytes
        self.quantization = config.quantization or " and ".join(model.forms) or None
        self.dequantized_bytes = None
        if model.forms:
            self.dequantized_bytes = Decoder(config, dtype, "meta", group=group, tables=tables).num_bytes
        self.bytes_read, self.expert_bytes = model.bytes_read, model.expert_bytes
        self.head_weight_bytes = model.head_bytes
        self.prefill_bytes = prefill_bytes(config, context, dtype)
        usable = int(machine.gpu_memory_gib * GIB * machine.gpu_memory_utilization)
        self.usable_bytes, self.graph_bytes = usable - self.weight_bytes, GRAPH_BYTES
        self.cache_bytes = self.usable_bytes - self.prefill_bytes - self.graph_bytes

    def plan(self, config: EngineConfig) -> Plan:
        """Returns the figures of the policy and the drafts of ``config``. Other settings of ``config`` do not matter.
        Raises ValueError with all reasons why the model cannot use this policy or these drafts."""
        spec = config.spec()
        try:
            layout = self._layout(spec)
        except ValueError as error:
            raise config.refused_policy(error) from error
        config.check_drafts(layout)
        machine, full, drafts = self.machine, self._layout(KVSpec()), config.speculation
        need, batch = sequence_bytes(layout, self.context), self._largest_batch(layout, drafts)
        of_full = sequence_bytes(full, self.context)
        device_bandwidth = machine.device_bandwidth_tbs * 1e12
        what = self.context, self.hit_rate, device_bandwidth, machine.host_bandwidth_gbs * 1e9
        attention = attention_seconds(layout, *what)

        def floor(size: int) -> StepFloor:
            weights = self.bytes_read(size)
            seconds = size * attention + weights / device_bandwidth
            return StepFloor(size, weights, seconds * 1e3, size / seconds)

        return Plan(
            config.policy,
            layout.spec,
            layout.main.spec.attended_tokens(self.context),
            need,
            bytes_of_kinds(layout, self.context),
            of_full.device / need.device,
            batch,
            drafts,
            0 if drafts is None else drafts.drafted_rows(batch.both),
            step_reads(layout.main, self.context, self.hit_rate),
            machine.device_bandwidth_tbs * attention_seconds(full, *what) / attention,
            floor(1),
            floor(batch.both) if batch.both else None,
            self.shard.size if batch.both else None if batch.device else self._gpus_needed(spec, drafts),
        )

    def _layout(self, spec: KVSpec) -> Layout:
        rest = self.config.shape, self.dtype, self.context, self.fetch_buffer, self.states
        return Layout(self.shard.policy(spec), *rest)

    def _largest_batch(self, layout: Layout, drafts: SpeculativeConfig | None) -> LargestBatch:
        machine = self.machine
        host = None if machine.host_memory_gib is None else int(machine.host_memory_gib * GIB)
        offload = machine.kv_offload_gib > 0
        lengths = self.context, self.context
        return largest_batch(self.config, layout, *lengths, self.usable_bytes, host, offload, drafts)

    def _gpus_needed(self, spec: KVSpec, drafts: SpeculativeConfig | None) -> int | None:
        size = 2
        while size <= MAX_GPUS:
            if size > self.shard.size:
                try:
                    shard = Shard(self.shard.whole, 0, size, self.shard.expert_parallel)
                    rest = self.context, self.machine, self.hit_rate, self.fetch_buffer
                    other = Planner(shard, self.dtype, *rest, forms=self.forms, states=self.states)
                    if other._largest_batch(other._layout(spec), drafts).both:
                        return size
                except ValueError:  # the model cannot be split across this many ranks
                    return None
            size *= 2
        return None
