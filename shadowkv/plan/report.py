"""Formats plans as text with a column for each policy, or as JSON with units in the keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import TextWrapper
from typing import Any

from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.startup.sizing import head_bytes
from shadowkv.kvcache.parts import describe
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.recurrent.layout import RING, RecurrentLayout
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.plan.planner import Plan, Planner, StepFloor
from shadowkv.wording import GIB, counted

WIDTH = 100
"""Maximum length of a line of text, unless a policy's name is longer."""


def as_text(model: str, planner: Planner, plans: Sequence[Plan]) -> str:
    """Returns the plans as text: the model, the machine, a description of each policy, and a table. If the table is
    wider than ``WIDTH``, it is divided into several, one below the other, which have the same rows."""
    machine, shape, config = planner.machine, planner.config.shape, planner.config
    host = "as much as the batch needs" if machine.host_memory_gib is None else f"{machine.host_memory_gib:g} GiB"
    offload_gib = machine.kv_offload_gib / planner.shard.size
    copies = f", and {offload_gib:g} GiB for copies of cached prompts" if offload_gib else ""
    head = [
        f"model    {model}: {config.num_layers} layers, {shape.num_query_heads} query and {shape.num_kv_heads} kv "
        f"heads of {shape.head_dim}, hidden size {config.hidden_size}, {planner.weights}",
        *_other_heads(shape),
        *_reusing(config),
        *_ranks(planner),
        f"context  {counted(planner.context, 'token')} per sequence, prompt and output together",
        f"weights  {planner.weight_bytes:,} bytes ({planner.weight_bytes / GIB:.2f} GiB), "
        f"{planner.bytes_read(1) / GIB:.2f} GiB of them read in a step{' of one sequence' if config.experts else ''}",
        *_experts(planner, plans),
        *_dequantized(planner),
        *([f"tables   {planner.tables}"] if planner.tables else []),
        *_recurrent(planner),
        *_draft_head(planner, plans[0].drafts),
        f"device   {machine.gpu_memory_gib:g} GiB x {machine.gpu_memory_utilization:g} "
        f"- {planner.weight_bytes / GIB:.2f} weights - {planner.prefill_bytes / GIB:.2f} prefill "
        f"- {planner.graph_bytes / GIB:.2f} graphs = {planner.cache_bytes / GIB:.2f} GiB for the cache; "
        f"read at {machine.device_bandwidth_tbs:g} TB/s",
        f"host     {host}{copies}; read at {machine.host_bandwidth_gbs:g} GB/s; hit rate {planner.hit_rate:g}",
        *(f"policy   {plan.kv}: {describe(plan.spec, shape)}" for plan in plans),
    ]
    rows = [("", [plan.kv for plan in plans]), *_rows(plans, offload_gib + planner.host_table_bytes / GIB)]
    if planner.replicas > 1:
        largest, count = [plan.largest for plan in plans], planner.replicas
        rows += [
            (f"largest batches of {count} replicas", [str(plan.largest_batch.both * count) for plan in plans]),
            ("  tokens/s at that floor", ["-" if f is None else f"{f.tokens_per_second * count:.0f}" for f in largest]),
        ]
    wrapper = TextWrapper(WIDTH, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join("\n".join(lines) for lines in [map(wrapper.fill, head), *_tables(rows)])


def _tables(rows: Sequence[tuple[str, list[str]]]) -> Iterator[list[str]]:
    """Yields the lines of each table of some columns of ``rows``, each of which has a name and cells."""
    label = max(len(name) for name, _ in rows)
    names = [name.ljust(label) for name, _ in rows]
    columns = list[list[str]]()
    for column in zip(*(cells for _, cells in rows), strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) for cell in column])
    while columns:
        table = [names, columns.pop(0)]
        while columns and sum(2 + len(column[0]) for column in [*table, columns[0]]) - 2 <= WIDTH:
            table.append(columns.pop(0))
        yield ["  ".join(cells).rstrip() for cells in zip(*table, strict=True)]


def _other_heads(shape: ModelShape) -> list[str]:
    """Returns a line for each kind of layer that has other heads than the model's main ones."""
    return [
        f"         {count} layers with {kind}: {kind.heads.num_query_heads} query and {kind.heads.num_kv_heads} kv "
        f"heads of {kind.heads.head_dim}"
        for kind, count in Counter((*shape.kinds, *shape.reused)).items()
        if kind.heads is not None
    ]


def _reusing(config: ModelConfig) -> list[str]:
    """Returns a line about layers without keys of their own; an empty list if there are none."""
    count = config.num_kv_shared_layers
    return [f"         {counted(count, 'layer')} attend to keys and values of other layers"] if count else []


def _experts(planner: Planner, plans: Sequence[Plan]) -> list[str]:
    """Returns lines about experts: their bytes, the bytes of weights that steps read, and which experts are whole on
    this rank. The list is empty if the model has no experts."""
    config = planner.config
    if config.experts is None:
        return []
    routing, layers = config.experts.routing, config.num_expert_layers
    touched = [
        f"{plan.largest.weight_bytes / GIB:.2f} of {plan.largest.batch} ({plan.kv})" for plan in plans if plan.largest
    ]
    return [
        f"experts  {routing.experts} in {counted(layers, 'layer')}, {routing.per_token} a token: "
        f"{planner.expert_bytes / GIB:.2f} GiB of the weights; expected reads of a step: "
        + ", ".join([f"{planner.bytes_read(1) / GIB:.2f} GiB of weights for one sequence", *touched]),
        *([f"         {line}"] if (line := planner.shard.experts_note) else []),
    ]


def _recurrent(planner: Planner) -> list[str]:
    """Returns a line about recurrent states; an empty list if the model has none."""
    layout = RecurrentLayout.of(planner.config.shape, planner.states)
    if layout is None:
        return []
    checkpoints, drafted = layout.settings.checkpoints, layout.settings.drafted
    kept = "one for each sequence" if checkpoints is None else str(checkpoints)
    drafts = f" and drafted tokens ({drafted})" if drafted else ""
    return [
        f"states   {layout.state_bytes / 2**20:.1f} MiB each: a sequence has {RING}, and checkpoints ({kept}){drafts} "
        "are not counted in its bytes"
    ]


def _draft_head(planner: Planner, drafts: SpeculativeConfig | None) -> list[str]:
    """Returns a line about the draft head, a layer of the checkpoint that drafts tokens; an empty list without one."""
    if drafts is None or not drafts.with_head:
        return []
    sizes, tokens = (planner.config, planner.dtype, planner.context), drafts.num_speculative_tokens or 0
    one, two = (head_bytes(*sizes, sequences, tokens) for sequences in (1, 2))
    weights, each = planner.head_weight_bytes / GIB, (two - one) / 2**20
    return [
        f"drafts   up to {counted(tokens, 'token')} of a sequence in a step, by a layer of the files: "
        f"{weights:.2f} GiB of the weights, and {each:.1f} MiB for each sequence that are not counted in its bytes"
    ]


def _dequantized(planner: Planner) -> list[str]:
    """Returns lines that say in which form quantized weights are counted; an empty list if no weights are quantized."""
    lines = []
    if planner.plain:
        dtype = str(planner.dtype).removeprefix("torch.")
        lines.append(f"         those in {planner.plain} are counted in {dtype}: GPUs cannot multiply this form")
    if planner.dequantized_bytes is None:
        return lines
    return [
        *lines,
        "         in the files' form, for GPUs with humming-kernels (the extra gpu); without it they are dequantized "
        f"as they load, {planner.dequantized_bytes / GIB:.2f} GiB",
    ]


def missing(planner: Planner, plans: Sequence[Plan]) -> list[str]:
    """Returns a line for each policy with which not even one sequence fits. It says what one sequence would need."""
    lines = []
    for plan in plans:
        if plan.largest_batch.both:
            continue
        gpus = counted(planner.shard.size, "GPU")
        line = f"{plan.kv}: not one sequence of {counted(planner.context, 'token')} on {gpus} of "
        line += f"{planner.machine.gpu_memory_gib:g} GiB"
        if plan.gpus_needed is not None:
            line += f"; it takes {plan.gpus_needed}: --tensor-parallel-size {plan.gpus_needed}"
        elif plan.largest_batch.device:
            line += f" with --host-memory-gib {planner.machine.host_memory_gib:g}"
            line += f"; it takes {plan.sequence_bytes.host / GIB:.1f} GiB of host memory"
        else:
            line += ", nor on more of them"
        lines.append(line)
    return lines


def _ranks(planner: Planner) -> list[str]:
    size, replicas = planner.shard.size, planner.replicas
    if size == replicas == 1:
        return []
    cut = f"figures are for the first of {size} ranks, without communication; " if size > 1 else ""
    return [f"GPUs     {size * replicas}: {cut}{counted(replicas, 'replica')}"]


def _rows(plans: Sequence[Plan], more_gib: float) -> list[tuple[str, list[str]]]:
    def read(name: str) -> tuple[str, list[str]]:
        kind = name.replace("_", " ")
        return (f"  {kind}, MB", [f"{getattr(plan.reads, name) / 1e6:.3f}" for plan in plans])

    def floor(name: str, floors: list[StepFloor | None]) -> list[tuple[str, list[str]]]:
        return [
            (f"step-time floor, {name}, ms", ["-" if f is None else f"{f.step_ms:.2f}" for f in floors]),
            ("  tokens/s at that floor", ["-" if f is None else f"{f.tokens_per_second:.0f}" for f in floors]),
        ]

    sizes = [plan.sequence_bytes for plan in plans]
    batches = [plan.largest_batch for plan in plans]
    return [
        ("device bytes per sequence", [f"{size.device:,}" for size in sizes]),
        *_kinds(plans),
        ("device GiB per sequence", [f"{size.device / GIB:.3f}" for size in sizes]),
        ("host bytes per sequence", [f"{size.host:,}" for size in sizes]),
        ("host GiB per sequence", [f"{size.host / GIB:.3f}" for size in sizes]),
        ("device memory saving against full", [f"{plan.device_saving:.2f}x" for plan in plans]),
        ("largest batch by device memory", [str(batch.device) for batch in batches]),
        ("largest batch by host memory", ["no limit" if b.host is None else str(b.host) for b in batches]),
        ("largest batch", [str(batch.both) for batch in batches]),
        *_drafted(plans),
        (
            "host GiB at the largest batch",
            [f"{b.both * s.host / GIB + more_gib:.1f}" for b, s in zip(batches, sizes, strict=True)],
        ),
        ("attended tokens per step", [str(plan.attended_tokens) for plan in plans]),
        ("reads per step, layer and sequence", ["" for _ in plans]),
        *(read(name) for name in asdict(plans[0].reads)),
        ("equivalent bandwidth, TB/s", [f"{plan.equivalent_bandwidth_tbs:.2f}" for plan in plans]),
        *floor("batch 1", [plan.single for plan in plans]),
        *floor("largest batch", [plan.largest for plan in plans]),
    ]


def _drafted(plans: Sequence[Plan]) -> list[tuple[str, list[str]]]:
    """Returns a row about drafted tokens; an empty list if no tokens are drafted."""
    if not any(plan.drafted_rows for plan in plans):
        return []
    return [("  rows for drafted tokens, not in times", [str(plan.drafted_rows) for plan in plans])]


def _kinds(plans: Sequence[Plan]) -> list[tuple[str, list[str]]]:
    """Returns a row of device bytes for each kind of layer; an empty list if all layers are of one kind."""
    kinds = plans[0].bytes_of_kinds
    if len(kinds) == 1:
        return []
    return [(f"  in layers of {kind}", [f"{plan.bytes_of_kinds[kind]:,}" for plan in plans]) for kind in kinds]


def as_json(model: str, planner: Planner, plans: Sequence[Plan]) -> dict[str, Any]:
    """Returns the figures of ``as_text`` as a JSON object, unrounded."""
    return {
        "model": model,
        "dtype": str(planner.dtype).removeprefix("torch."),
        "quantization": planner.quantization,
        "context_tokens": planner.context,
        "tensor_parallel_size": planner.shard.size,
        "replicas": planner.replicas,
        "weight_bytes": planner.weight_bytes,
        "weight_bytes_dequantized": planner.dequantized_bytes,
        "weight_bytes_read_per_step": planner.bytes_read(1),
        "host_table_bytes": planner.host_table_bytes,
        "expert_weight_bytes": planner.expert_bytes,
        "prefill_reserve_bytes": planner.prefill_bytes,
        "graph_reserve_bytes": planner.graph_bytes,
        "device_cache_bytes": planner.cache_bytes,
        "machine": asdict(planner.machine),
        "hit_rate": planner.hit_rate,
        "fetch_buffer": planner.fetch_buffer,
        "max_mamba_checkpoints": planner.states.checkpoints,
        "drafted_states": planner.states.drafted if planner.config.shape.recurrent else 0,
        "mamba_ssm_cache_dtype": str(planner.states.dtype).removeprefix("torch."),
        "plans": [_plan_as_json(plan, planner.config.shape) for plan in plans],
    }


def _plan_as_json(plan: Plan, shape: ModelShape) -> dict[str, Any]:
    need, batch = plan.sequence_bytes, plan.largest_batch
    return {
        "kv": plan.kv,
        "spec": plan.spec.as_dict(),
        "spec_in_words": describe(plan.spec, shape),
        "device_bytes_per_sequence": need.device,
        "device_bytes_by_layer_kind": dict(plan.bytes_of_kinds),
        "device_gib_per_sequence": need.device / GIB,
        "host_bytes_per_sequence": need.host,
        "host_gib_per_sequence": need.host / GIB,
        "device_memory_saving": plan.device_saving,
        "largest_batch_device": batch.device,
        "largest_batch_host": batch.host,
        "largest_batch": batch.both,
        "drafted_rows_largest_batch": plan.drafted_rows,
        "attended_tokens_per_step": plan.attended_tokens,
        "bytes_read_per_step_layer_and_sequence": asdict(plan.reads),
        "equivalent_bandwidth_tbs": plan.equivalent_bandwidth_tbs,
        "floor_batch_1": asdict(plan.single),
        "floor_largest_batch": None if plan.largest is None else asdict(plan.largest),
        "gpus_needed": plan.gpus_needed,
    }
