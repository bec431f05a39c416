"""How much memory a cache gets: what is available, what one sequence needs, and what is left free for prefill."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.memory.free_memory import free_host_bytes
from shadowkv.kvcache.parts.base import STATES_AT_ONCE, TOKENS_AT_ONCE
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.sparse import SPARSE_FROM
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.ops.fetch_chunks.cuda import scratch_bytes
from shadowkv.ops.sample_tokens.weights import SCRATCH_BYTES
from shadowkv.ops.select_blocks.reference import BLOCK, SAMPLED
from shadowkv.wording import GIB, OutOfMemory, counted

MIB = 2**20

NUMBERS_BYTES = 4 * 8
"""Of a prompt's token: its id, its position, and where it is stored."""

DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
"""Share of a GPU's memory, weights included; of a machine's free memory on a CPU."""

HOST_SHARE = 0.5
"""Largest share of the free host memory that values take by default."""

SHORTER = 8
"""Sequences that are so much shorter than the longest one are what memory for windows is shared out for."""

WAY_SNAPSHOTS, WAY_GIB = 2, (1, 16)
"""Host memory for what is in transit between device and disk, where ``kv_offload_gib`` asks for none: that many copies
of the longest sequence, but within these two bounds in GiB."""


def in_gib(count: int) -> str:
    """Bytes as messages write them."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.2f} MiB"


def prefill_bytes(model: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Device bytes that are left free for a prefill at its longest, and one of a block that overtakes it.

    Their residual streams, numbers of their tokens, and keys (before and after RoPE) and values of the layers that are
    stored together; what a block of tokens takes at its widest; and as much as all keys and values once more, for later
    turns: those are stored from copies behind the exact tokens that they follow, and where they attend sparsely, all
    keys and values are rebuilt side by side.
    """
    shape, block = model.shape, min(context, BLOCK_TOKENS["cuda"])

    def layers_of(tokens: int) -> int:
        return 3 * _stored(tokens, shape) * shape.kv_dim

    def kept(tokens: int) -> int:
        return tokens * (NUMBERS_BYTES + model.hidden_size * dtype.itemsize) + layers_of(tokens) * dtype.itemsize

    later_turns = layers_of(context) * dtype.itemsize
    overtaking = kept(block) if context > block else 0
    return kept(context) + overtaking + later_turns + block_bytes(model, context, dtype)


def block_bytes(model: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Device bytes of what a block of a prompt's tokens has at the same time, in its attention or in its MLP, besides
    its rows of the residual stream."""
    shape, block = model.shape, min(context, BLOCK_TOKENS["cuda"])
    # Behind attention the stream is there before and after both of its sums, if a layer is computed at once.
    in_the_mlp = block * (5 * model.hidden_size + _inner_numbers(model)) * dtype.itemsize
    queries = shape.num_query_heads * shape.head_dim  # from the projection, normalised or rotated, and attended
    attending = block * (model.hidden_size + 3 * queries + 2 * shape.kv_dim) * dtype.itemsize
    return max(in_the_mlp, attending + (drawing_bytes(shape, block, context) if context > SPARSE_FROM else 0))


def _inner_numbers(model: ModelConfig) -> int:
    """Numbers of a token within an MLP, or within a mixture of experts, that exist at the same time."""
    dense = 3 * model.intermediate_size if model.has_mlps else 0
    if model.experts is None:
        return dense
    hidden, inner, shared = model.hidden_size, model.experts.intermediate_size, model.experts.shared_size
    # Rows in the order of experts, before and after the first product; of the second, in that order and in tokens'.
    routed = max(hidden + 2 * inner, 3 * inner, hidden + inner, 2 * hidden)
    if model.experts.biases:  # a row of them beside each row of a product
        routed = max(routed, hidden + 4 * inner, inner + 2 * hidden)
    routed *= model.experts.routing.per_token
    return max(dense, routed, hidden + 3 * shared)


def drawing_bytes(shape: ModelShape, queries: int, keys: int) -> int:
    """Device bytes of the scores and the lists by which the tiles of ``queries`` draw blocks of ``keys``
    (``ops/select_blocks/triton.py``)."""
    tiles, blocks, group = -(-queries // BLOCK), -(-keys // BLOCK), shape.num_query_heads // shape.num_kv_heads
    together = max(1, 128 // (group * SAMPLED))
    rows = max(16, 1 << (together * group * SAMPLED - 1).bit_length())
    lists = 2 * shape.num_query_heads * tiles  # indices and weights
    return 4 * blocks * (shape.num_kv_heads * -(-tiles // together) * rows + lists)


GRAPH_BYTES = 2**30
"""An allowance for what CUDA graphs of decode steps keep whatever the batch: their launches, most of it for those that
are captured at start, workspaces of matrix products, and the activations and scratch of one step, which all share."""

LOGITS_AT_ONCE = 4
"""Times that logits of a whole batch exist at once: where graphs leave them, in one of those as a product and in
float32, those of a mixed pass, and changed ones."""


def step_bytes(model: ModelConfig, layout: Layout) -> int:
    """Device bytes that decode steps take for each sequence of the batch, besides ``GRAPH_BYTES``.

    Logits in float32, scratch of sampling, what parts decode of a sequence's state, one layer at a time, and scratch of
    fetches: as another stream uses it, a graph keeps it for each of its layers.
    """
    reading = sum(part.reading_bytes() for group in layout.groups for part in group.parts)
    fetching = sum(map(_fetching_bytes, layout.groups))
    return LOGITS_AT_ONCE * 4 * model.vocab_size + SCRATCH_BYTES + reading + fetching


def _fetching_bytes(layout: GroupLayout) -> int:
    """Scratch of a sequence's fetches in a group of layers."""
    if not layout.fetched_bytes:
        return 0
    selected = int(layout.spec.budget_chunks(np.asarray(layout.max_model_len + PAGE)))
    return layout.shape.num_layers * scratch_bytes(layout.shape.num_kv_heads * selected, layout.fetched_bytes)


def _stored(tokens: int, shape: ModelShape) -> int:
    """Tokens, over all layers, of a prompt of up to ``tokens`` that are stored together."""
    return max(tokens, min(TOKENS_AT_ONCE, min(STATES_AT_ONCE, shape.num_layers) * tokens))


def storing_bytes(layout: Layout) -> int:
    """Device bytes that parts take to fit states and to compress pages, one after the other."""
    tokens = _stored(layout.max_model_len, layout.shape)
    parts = [part for group in layout.groups for part in group.parts]
    return max(max(part.fitting_bytes(tokens), part.compression_bytes()) for part in parts)


def tables_bytes(layout: Layout) -> int:
    """Device bytes of the tables of cosines and sines, float32, for the positions of the longest sequence."""
    ropes = {group.rope for group in layout.groups}
    return 4 * len(ropes) * layout.max_model_len * layout.shape.head_dim


def staging_bytes(layout: Layout) -> int:
    """Device bytes for layers of the longest sequence on their way to and from host memory, one down and two up
    (``prefix_cache/copies/mover.py``)."""
    return 3 * layout.snapshot_layer_bytes(layout.max_model_len)


def offload_bytes(config: EngineConfig, layout: Layout) -> int:
    """Host bytes for the prefix cache's copies; 0 if it makes none."""
    if config.kv_offload_gib or config.kv_disk_dir is None:
        return int(config.kv_offload_gib * GIB)
    longest = layout.snapshot_bytes(layout.max_model_len)
    least, most = WAY_GIB
    return min(max(WAY_SNAPSHOTS * longest, least * GIB), most * GIB)


def working_bytes(model: ModelConfig, layout: Layout, batch: int, offload: bool = False) -> int:
    """Device bytes that are left free for the tables of RoPE, for a prefill and decode steps of up to ``batch``
    sequences, and for copies of cached prompts to host memory and back if these ``offload``."""
    prefill = prefill_bytes(model, layout.max_model_len, layout.dtype) + storing_bytes(layout)
    return (
        tables_bytes(layout)
        + prefill
        + GRAPH_BYTES
        + batch * step_bytes(model, layout)
        + (staging_bytes(layout) if offload else 0)
    )


@dataclass(frozen=True)
class LargestBatch:
    """Number of sequences that fit: by the device alone, by the host alone (None: no limit), and by both."""

    device: int
    host: int | None
    both: int


def largest_batch(
    model: ModelConfig,
    layout: Layout,
    start: int,
    capacity: int,
    device_bytes: int,
    host_bytes: int | None,
    offload: bool = False,
) -> LargestBatch:
    """Number of sequences, with prompts of ``start`` tokens and room for ``capacity``, that a GPU's engine can hold.

    Args:
        device_bytes: what it may use besides the weights.
        host_bytes: None is unlimited.
        offload: whether cached prompts are copied to host memory.
    """
    need = layout.demand(start, capacity)
    pages = layout.tier_bytes(Blocks({kind: need[kind] for kind in layout.paged}))

    def too_many(batch: int) -> bool:
        return (
            batch * pages["device"] + layout.fixed_bytes(batch) + working_bytes(model, layout, batch, offload)
            > device_bytes
        )

    device = bisect_left(range(1, 1 + max(0, device_bytes) // step_bytes(model, layout)), True, key=too_many)
    of_host = pages["host"]
    host = host_bytes // of_host if of_host and host_bytes is not None else None
    return LargestBatch(device, host, device if host is None else min(device, host))


def likely_cache_bytes(config: EngineConfig, weights: int, device: torch.device) -> int | None:
    """Device bytes for sequences, based on the card's total memory, used or not; None where it has none of its own."""
    if device.type != "cuda":
        return None
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    return int(torch.cuda.get_device_properties(device).total_memory * share) - weights


def size_cache(
    config: EngineConfig, layout: Layout, slots: int, device: torch.device, model: ModelConfig
) -> tuple[Blocks, int]:
    """Blocks of each tier, no more than all slots can use; and the longest sequence those hold.

    A requested ``max_model_len`` must fit; the model's own is lowered to what does. Raises MemoryError where not one
    sequence fits, or where more host memory was requested than is free.
    """
    offload, host_free = offload_bytes(config, layout), free_host_bytes()
    if offload > host_free:
        raise OutOfMemory(
            f"copies of cached prompts would take {in_gib(offload)} of host memory, {in_gib(host_free)} are "
            f"free. {'Lower' if config.kv_offload_gib else 'Set'} kv_offload_gib",
            config.names(),
        )
    host_free -= offload
    device_bytes, in_use = _device_bytes(config, layout, device, model, host_free)
    host_bytes = int(host_free * HOST_SHARE if config.host_memory_gib is None else config.host_memory_gib * GIB)

    def left(layout: Layout) -> int:
        """Device bytes for pages."""
        return max(0, device_bytes - layout.fixed_bytes(slots))

    def have(tokens: int) -> Blocks:
        """Blocks of each tier if sequences have up to ``tokens``."""
        return _shared_out(layout, tokens, slots, Blocks(device=left(layout.resized(tokens)), host=host_bytes))

    longest = layout.max_model_len
    while longest and not _demand(layout, longest).within(have(longest)):
        longest = longest // 2 if config.max_model_len is None else 0
    if not longest:
        size = layout.tier_bytes(_demand(layout, layout.max_model_len))
        raise OutOfMemory(
            f"one sequence of {counted(layout.max_model_len, 'token')} needs "
            f"{in_gib(size['device'])} of device and {in_gib(size['host'])} of host memory for its KV cache; there "
            f"are {in_gib(left(layout))} and {in_gib(host_bytes)}{in_use}. Lower max_model_len, max_num_seqs or "
            "max_cached_seqs, or raise gpu_memory_utilization or host_memory_gib",
            config.names(),
        )
    need, most = _demand(layout, longest), have(longest)
    blocks = Blocks({kind: min(most[kind], slots * need[kind]) for kind in most})
    taken = layout.tier_bytes(blocks)["host"]
    if taken > host_free:  # it would be granted, and the process killed later
        beside = f" beside the {in_gib(offload)} for copies of cached prompts" if offload else ""
        raise OutOfMemory(
            f"the KV cache would take {in_gib(taken)} of host memory, {in_gib(host_free)} are free{beside}. "
            f"Lower host_memory_gib{' or kv_offload_gib' if offload else ''}",
            config.names(),
        )
    return blocks, longest


def _shared_out(layout: Layout, tokens: int, slots: int, tiers: Blocks) -> Blocks:
    """Blocks of each tier, of ``tiers`` bytes: groups of layers get what they need of sequences of ``tokens``.

    A window takes as much of a shorter sequence, of which there may be more: there is room for as many windows as there
    is for such sequences.
    """
    need = _demand(layout, tokens)
    windows, growing = (
        Blocks({kind: count for kind, count in need.items() if (kind in layout.bounded) == bounded})
        for bounded in (True, False)
    )
    sizes, rest, blocks = layout.tier_bytes(growing), tiers, Blocks()
    if windows:
        shorter, each = layout.tier_bytes(_demand(layout, -(-tokens // SHORTER))), layout.tier_bytes(windows)
        fitting = [tiers[tier] // shorter[tier] for tier in tiers if shorter[tier]]
        beside = [(tiers[tier] - sizes[tier]) // each[tier] for tier in tiers if each[tier]]  # one of the longest
        blocks = Blocks({kind: max(1, min(slots, *fitting, *beside)) * count for kind, count in windows.items()})
        rest = tiers - layout.tier_bytes(blocks)
    for kind, count in growing.items():
        tier = kind.rpartition(" ")[2]
        blocks[kind] = max(0, rest[tier]) * count // sizes[tier] if sizes[tier] else 0
    return blocks


def _device_bytes(
    config: EngineConfig, layout: Layout, device: torch.device, model: ModelConfig, host_free: int
) -> tuple[int, str]:
    """Device bytes for a cache, and what else a GPU's memory holds, in words."""
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    if device.type != "cuda":
        return int(host_free * share), ""
    free, total = torch.cuda.mem_get_info(device)
    working = working_bytes(model, layout, config.max_num_seqs, offload_bytes(config, layout) > 0)
    return int(total * share) - (total - free) - working, (
        f" ({in_gib(int(total * share))} of the GPU may be used, {in_gib(total - free)} are in use by all "
        f"processes, and {in_gib(working)} are left for prefill and decode steps)"
    )


def _demand(layout: Layout, capacity: int) -> Blocks:
    """Blocks of each tier for the pages of ``capacity`` tokens."""
    need = layout.most_demand(capacity)
    return Blocks({kind: need[kind] for kind in layout.paged})


def describe_prefixes(config: EngineConfig, layout: Layout) -> str:
    """The prefix cache's tiers and their sizes."""
    if not config.enable_prefix_caching:
        return "no prefixes"
    tiers = ["prefixes on the device"]
    if nbytes := offload_bytes(config, layout):
        tiers.append(f"{nbytes / GIB:.2f} GiB of host memory ({config.eviction})")
    if config.kv_disk_dir is not None:
        tiers.append(f"{config.disk_gib:.2f} GiB in {config.kv_disk_dir}")
    if config.role != "both":
        tiers.append(f"role {config.role}")
    return ", ".join(tiers)
