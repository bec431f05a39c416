"""Sizes the KV cache: available memory, the demand of a sequence, and the memory left free for prefill and steps.

``loading.py`` calls it when an engine starts. ``shadowkv/plan`` calls it without an engine.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.cuda_graphs import PROMPT_ROWS
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.memory.free_memory import free_host_bytes
from shadowkv.kvcache.parts.base import STATES_AT_ONCE, TOKENS_AT_ONCE
from shadowkv.kvcache.parts.prefill import SPARSE_FROM
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.prefill.native import selecting_bytes
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.layers.spec import StateSpace
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.ops.fetch_chunks.cuda import scratch_bytes
from shadowkv.ops.recurrence import CHUNK
from shadowkv.ops.sample_tokens.weights import SCRATCH_BYTES
from shadowkv.ops.select_blocks.reference import BLOCK, SAMPLED
from shadowkv.wording import GIB, OutOfMemory, counted

MIB = 2**20

NUMBERS_BYTES = 4 * 8
"""Bytes of a prompt token's id, its position, and the numbers of its place in the cache."""

DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
"""Default share of memory: of a GPU's memory, weights included, or of the free host memory on a CPU."""

HOST_SHARE = 0.5
"""Default limit on the memory for values on the host, as a share of the free host memory."""

SHORTER = 8
"""Memory for windows is sized for sequences that are this many times shorter than the longest one."""

WAY_SNAPSHOTS, WAY_GIB = 2, (1, 16)
"""Host memory for copies between device and disk if ``kv_offload_gib`` is 0. It holds ``WAY_SNAPSHOTS`` copies of the
longest sequence. ``WAY_GIB`` has its minimum and maximum size in GiB."""


def in_gib(count: int) -> str:
    """Formats a number of bytes as GiB or MiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.2f} MiB"


def prefill_bytes(model: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Device bytes left free for the longest prefill and a prefill of one block that overtakes it.

    They are the sum of three amounts. For both prefills: the residual stream, the numbers of the tokens, and keys
    (before and after RoPE), values and index keys of the layers that are stored together. For a block: the peak of its
    activations. For a later turn: keys, values and index keys once more. They are copied behind the sequence's newest
    exact tokens before they are stored, and a turn that attends sparsely rebuilds all earlier keys and values.
    """
    block, indexed = min(context, BLOCK_TOKENS["cuda"]), model.shape.indexed

    def layers_of(tokens: int) -> int:
        of_token = ((shape, 3 * shape.kv_dim + indexed * shape.head_dim) for shape in model.shape.of_scratch)
        return sum(_stored(tokens, shape) * numbers for shape, numbers in of_token)

    def kept(tokens: int) -> int:
        return tokens * (NUMBERS_BYTES + model.stream_size * dtype.itemsize) + layers_of(tokens) * dtype.itemsize

    later_turns = layers_of(context) * dtype.itemsize
    overtaking = kept(block) if context > block else 0
    return kept(context) + overtaking + later_turns + block_bytes(model, context, dtype)


def block_bytes(model: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Returns the peak device bytes of a block's activations, in attention or in the MLP. The block's rows of the
    residual stream are not included, because ``prefill_bytes`` counts them."""
    shape, block = model.shape, min(context, BLOCK_TOKENS["cuda"])
    # A layer adds two outputs to the residual stream. If the layer is computed at once, the stream exists before and
    # after each sum.
    in_the_mlp = block * (5 * model.stream_size + _inner_numbers(model)) * dtype.itemsize
    # Three times the queries: projected, normalised or rotated, and attended.
    of_heads = (3 * one.num_query_heads * one.head_dim + 2 * one.kv_dim for one in shape.of_scratch)
    attending = block * (model.stream_size + max(of_heads)) * dtype.itemsize
    drawing = drawing_bytes(shape, block, context) if context > SPARSE_FROM else 0
    selecting = selecting_bytes(shape, block, context, dtype)
    return max(in_the_mlp, attending + max(drawing, selecting), _linear_bytes(model, block, dtype))


def _linear_bytes(model: ModelConfig, block: int, dtype: torch.dtype) -> int:
    """Returns the peak device bytes of a block in linear attention or in Mamba-2. They are the projections, the
    convolution's results, and numbers in float32: about three copies of queries, keys, values and results, or with
    Mamba-2 about seven copies of x, two each of B and C, and three of the products of a chunk's tokens. fla-core needs
    less for Mamba-2."""
    linear = model.linear
    if linear is None:
        return 0
    projected = model.stream_size + 2 * (linear.channels + linear.values)
    if isinstance(linear, StateSpace):
        wide = 7 * linear.values + 4 * linear.keys + 3 * linear.heads * CHUNK
    else:
        wide = 3 * linear.value_heads * (2 * linear.key_dim + 3 * linear.value_dim)
    return block * (projected * dtype.itemsize + 4 * wide)


def _inner_numbers(model: ModelConfig) -> int:
    """Returns the maximum number of values per token that exist at the same time within an MLP or a mixture of
    experts. Gates are counted, also of models that have none (``relu2``)."""
    widest = 2 if model.double_wide_mlp else 1
    dense = 3 * widest * model.intermediate_size if model.has_mlps else 0
    if model.experts is None:
        return dense
    hidden, inner, shared = model.hidden_size, model.experts.intermediate_size, model.experts.shared_size
    # What exists together, stage by stage: rows and the first product; the first product and its activation; the
    # activation and the second product; the second product in the order of experts and in that of tokens.
    routed = max(hidden + 2 * inner, 3 * inner, hidden + inner, 2 * hidden)
    if model.experts.biases:  # a row of biases beside each row of a product
        routed = max(routed, hidden + 4 * inner, inner + 2 * hidden)
    routed *= model.experts.routing.per_token
    return max(dense, routed, hidden + 3 * widest * shared)


def drawing_bytes(shape: ModelShape, queries: int, keys: int) -> int:
    """Returns the device bytes of the scores and lists of sparse prefill, in which tiles of ``queries`` queries sample
    blocks of ``keys`` keys (``ops/select_blocks/triton.py``)."""
    tiles, blocks, group = -(-queries // BLOCK), -(-keys // BLOCK), shape.num_query_heads // shape.num_kv_heads
    together = max(1, 128 // (group * SAMPLED))
    rows = max(16, 1 << (together * group * SAMPLED - 1).bit_length())
    lists = 2 * shape.num_query_heads * tiles  # indices and weights
    return 4 * blocks * (shape.num_kv_heads * -(-tiles // together) * rows + lists)


GRAPH_BYTES = 2**30
"""Allowance for the CUDA graphs of decode steps, for any batch size. It covers the graphs' launches (most of it, for
the graphs captured at start), workspaces of matrix products, and the activations and scratch of one step, which all
graphs share."""

LOGITS_AT_ONCE = 4
"""Number of copies of a whole batch's logits that exist at once: the graphs' output buffer, a graph's product and its
float32 copy, the logits of a mixed pass, and penalised logits."""


def step_bytes(model: ModelConfig, layout: Layout) -> int:
    """Device bytes of decode steps for each row of the batch, in addition to ``GRAPH_BYTES``.

    It is the sum of: float32 logits, scratch of sampling, the states that parts decode (one layer at a time), copies of
    a layer's exact keys and values if its indexer is pooled, and scratch of fetches. Fetches run on another stream, so
    a graph keeps their scratch for each layer that fetches.
    """
    reading = sum(part.reading_bytes() for group in layout.groups for part in group.parts)
    fetching = sum(map(_fetching_bytes, layout.groups))
    copying = max(map(_copied_bytes, layout.groups))
    return LOGITS_AT_ONCE * 4 * model.vocab_size + SCRATCH_BYTES + reading + copying + fetching


def _copied_bytes(layout: GroupLayout) -> int:
    """Bytes of what a step copies to attend to the exact tokens of a sequence in a layer whose indexer is pooled
    (``attend_tokens``): three copies of keys or values, and scores; 0 for other layers."""
    if layout.indexer is None or layout.indexer.pooled is None:
        return 0
    pages, heads = layout.most_pages(layout.max_model_len), layout.shape
    tokens = PAGE * (max(pages.dense, pages.static + pages.ring) + 1)
    return tokens * (3 * heads.kv_dim * layout.dtype.itemsize + 2 * 4 * heads.num_query_heads)


def _fetching_bytes(layout: GroupLayout) -> int:
    """Scratch bytes of a sequence's fetches in a group of layers."""
    if not layout.fetched_bytes:
        return 0
    selected = int(layout.spec.budget_chunks(np.asarray(layout.max_model_len + PAGE)))
    return layout.attending * scratch_bytes(layout.shape.num_kv_heads * selected, layout.fetched_bytes)


def _stored(tokens: int, shape: ModelShape) -> int:
    """Returns the maximum number of tokens that are stored together for a prompt of ``tokens`` tokens. Several layers
    can be stored together: a token then counts once for each of these layers."""
    return max(tokens, min(TOKENS_AT_ONCE, min(STATES_AT_ONCE, shape.num_layers) * tokens))


def storing_bytes(layout: Layout) -> int:
    """Returns the device bytes that the cache's parts need to fit states and compress pages. They do so one after
    another, so this is the largest of their needs."""
    tokens = _stored(layout.max_model_len, layout.shape)
    parts = [part for group in layout.groups for part in group.parts]
    return max(max(part.fitting_bytes(tokens), part.compression_bytes()) for part in parts)


def tables_bytes(layout: Layout) -> int:
    """Device bytes of RoPE's tables of cosines and sines, float32, for the longest sequence."""
    tables = {group.rope: group.shape.head_dim for group in layout.groups}
    return 4 * sum(tables.values()) * layout.max_model_len


def staging_bytes(layout: Layout) -> int:
    """Device bytes for copies between device and host: one layer of the longest sequence to the host, and two back
    (``prefix_cache/host.py``)."""
    return 3 * layout.snapshot_layer_bytes(layout.max_model_len)


def offload_bytes(config: EngineConfig, layout: Layout) -> int:
    """Returns the host bytes for the prefix cache's copies, of all tensor-parallel ranks together. Returns 0 without
    tiers below the device. ``layout`` is of one rank; rank 0's is the largest."""
    if config.kv_offload_gib or config.kv_disk_dir is None:
        return int(config.kv_offload_gib * GIB)
    longest = config.tensor_parallel_size * layout.snapshot_bytes(layout.max_model_len)
    least, most = WAY_GIB
    return min(max(WAY_SNAPSHOTS * longest, least * GIB), most * GIB)


def working_bytes(model: ModelConfig, layout: Layout, batch: int, offload: bool = False) -> int:
    """Returns the device bytes that are left free for RoPE's tables, for a prefill, and for decode steps of ``batch``
    rows. With ``offload`` they include memory for copies of cached prompts between device and host."""
    prefill = prefill_bytes(model, layout.max_model_len, layout.dtype) + storing_bytes(layout)
    return (
        tables_bytes(layout)
        + prefill
        + GRAPH_BYTES
        + batch * step_bytes(model, layout)
        + (staging_bytes(layout) if offload else 0)
    )


def head_layout(model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> Layout:
    """The layout of the cache of a model's draft head (``HeadRunner``). ``model`` is a rank's part."""
    return Layout(KVSpec(prefill="dense"), model.of_draft_head.shape, dtype, max_model_len)


def head_blocks(layout: Layout, sequences: int) -> Blocks:
    """Blocks of the cache of a draft head. They suffice for ``sequences`` sequences, each with the head's attention
    window."""
    return Blocks({kind: sequences * count for kind, count in _demand(layout, layout.max_model_len).items()})


def kept_states(drafted: int) -> int:
    """Number of hidden states that are kept of each sequence for a draft head: those of a step with ``drafted`` drafted
    tokens."""
    return 1 + drafted


def head_bytes(model: ModelConfig, dtype: torch.dtype, max_model_len: int, sequences: int, drafted: int) -> int:
    """Returns the device bytes of drafting up to ``drafted`` tokens of each of ``sequences`` sequences with a draft
    head, without its weights: its cache and RoPE's tables, hidden states, and the product of a step's logits."""
    layout, states = head_layout(model, dtype, max_model_len), kept_states(drafted)
    pages = layout.tier_bytes(head_blocks(layout, sequences))["device"]
    # Hidden states that are kept, and those of the rows of a step: the model's, the head's inputs, and the head's
    # outputs. Then those of the prompts in a CUDA graph.
    hidden = (4 * sequences * states + PROMPT_ROWS[-1]) * model.hidden_size * dtype.itemsize
    return (
        pages
        + layout.fixed_bytes(sequences)
        + tables_bytes(layout)
        + hidden
        + sequences * states * 4 * model.vocab_size
    )


@dataclass(frozen=True)
class LargestBatch:
    """Number of sequences that fit into the device's memory, into the host's (None is no limit), and into both."""

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
    drafts: SpeculativeConfig | None = None,
) -> LargestBatch:
    """Computes the number of sequences that fit into an engine on a GPU.

    Args:
        start: tokens of each prompt.
        capacity: maximum number of tokens of each sequence.
        device_bytes: device memory without the weights.
        host_bytes: host memory for values; None is unlimited.
        offload: whether cached prompts are copied to host memory.
        drafts: how tokens are drafted; each drafted token takes a row of a step. None without drafts.
    """
    need = layout.demand(start, capacity)
    pages = layout.tier_bytes(Blocks({kind: need[kind] for kind in layout.paged}))

    def too_many(batch: int) -> bool:
        drafted, more = 0, 0
        if drafts is not None:
            drafted = drafts.drafted_rows(batch)
            if drafts.with_head:
                sizes = layout.dtype, layout.max_model_len, batch, drafts.num_speculative_tokens or 0
                more = head_bytes(model, *sizes)
            if layout.recurrent is not None:  # the layout counts the states of one sequence's drafts
                more += (drafted - layout.recurrent.settings.drafted) * layout.recurrent.state_bytes
        working = working_bytes(model, layout, batch + drafted, offload)
        return batch * pages["device"] + layout.fixed_bytes(batch) + working + more > device_bytes

    device = bisect_left(range(1, 1 + max(0, device_bytes) // step_bytes(model, layout)), True, key=too_many)
    of_host = pages["host"]
    host = host_bytes // of_host if of_host and host_bytes is not None else None
    return LargestBatch(device, host, device if host is None else min(device, host))


def likely_cache_bytes(config: EngineConfig, weights: int, device: torch.device) -> int | None:
    """Estimates the device bytes for sequences from the GPU's total memory. Returns None on a CPU."""
    if device.type != "cuda":
        return None
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    return int(torch.cuda.get_device_properties(device).total_memory * share) - weights


def size_cache(
    config: EngineConfig, layout: Layout, slots: int, device: torch.device, model: ModelConfig
) -> tuple[Blocks, int]:
    """Returns the blocks of each tier, at most as many as all slots can use, and the length of the longest sequence
    that fits.

    A configured ``max_model_len`` must fit; the model's own is halved until it fits. Raises MemoryError if no sequence
    fits, or if less host memory is free than configured.
    """
    offload, host_free = offload_bytes(config, layout), free_host_bytes()
    if offload > host_free:
        raise OutOfMemory(
            f"copies of cached prompts would take {in_gib(offload)} of host memory, {in_gib(host_free)} is "
            f"free. {'Lower' if config.kv_offload_gib else 'Set'} kv_offload_gib",
            config.names(),
        )
    host_free -= offload
    device_bytes, in_use = _device_bytes(config, layout, device, model, host_free)
    host_bytes = int(host_free * HOST_SHARE if config.host_memory_gib is None else config.host_memory_gib * GIB)

    def left(layout: Layout) -> int:
        """Device bytes that are left for pages."""
        head = 0
        if config.drafts_with_head:
            sizes = layout.dtype, layout.max_model_len, config.most_running, config.drafted_tokens
            head = head_bytes(model, *sizes)
        return max(0, device_bytes - layout.fixed_bytes(slots) - head)

    def have(tokens: int) -> Blocks:
        """Blocks of each tier if sequences have up to ``tokens`` tokens."""
        return _shared_out(layout, tokens, slots, Blocks(device=left(layout.resized(tokens)), host=host_bytes))

    longest = layout.max_model_len
    while longest and not _demand(layout, longest).within(have(longest)):
        longest = longest // 2 if config.max_model_len is None else 0
    if not longest:
        size = layout.tier_bytes(_demand(layout, layout.max_model_len))
        raise OutOfMemory(
            f"one sequence of {counted(layout.max_model_len, 'token')} needs "
            f"{in_gib(size['device'])} of device and {in_gib(size['host'])} of host memory for its KV cache; "
            f"{in_gib(left(layout))} and {in_gib(host_bytes)} are available{_of_states(layout, slots)}{in_use}. "
            "Lower max_model_len, max_num_seqs "
            "or max_cached_seqs, or raise gpu_memory_utilization or host_memory_gib",
            config.names(),
        )
    need, most = _demand(layout, longest), have(longest)
    blocks = Blocks({kind: min(most[kind], slots * need[kind]) for kind in most})
    taken = layout.tier_bytes(blocks)["host"]
    if taken > host_free:  # the system would grant the memory now, and kill the process later
        beside = f" beside the {in_gib(offload)} for copies of cached prompts" if offload else ""
        raise OutOfMemory(
            f"the KV cache would take {in_gib(taken)} of host memory, {in_gib(host_free)} is free{beside}. "
            f"Lower host_memory_gib{' or kv_offload_gib' if offload else ''}",
            config.names(),
        )
    return blocks, longest


def _of_states(layout: Layout, slots: int) -> str:
    """Describes the memory of recurrent states, for an error; empty if there are none."""
    if layout.recurrent is None:
        return ""
    states = in_gib(layout.recurrent.nbytes(slots))
    checkpoints = counted(layout.recurrent.num_checkpoints(slots), "checkpoint")
    drafted = f" and {counted(count, 'drafted token')}" if (count := layout.most_drafted) else ""
    return f" beside {states} for the recurrent states of {counted(slots, 'sequence')} and {checkpoints}{drafted}"


def _shared_out(layout: Layout, tokens: int, slots: int, tiers: Blocks) -> Blocks:
    """Divides the bytes of each tier between groups of layers, in proportion to the demand of sequences of ``tokens``.

    A window takes as much memory in a short sequence as in a long one, and more short sequences fit. So the memory for
    windows suffices for as many sequences as fit if they are ``SHORTER`` times shorter than ``tokens``.
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
        # This many windows fit beside the other memory of one longest sequence.
        beside = [(tiers[tier] - sizes[tier]) // each[tier] for tier in tiers if each[tier]]
        blocks = Blocks({kind: max(1, min(slots, *fitting, *beside)) * count for kind, count in windows.items()})
        rest = tiers - layout.tier_bytes(blocks)
    for kind, count in growing.items():
        tier = kind.rpartition(" ")[2]
        blocks[kind] = max(0, rest[tier]) * count // sizes[tier] if sizes[tier] else 0
    return blocks


def _device_bytes(
    config: EngineConfig, layout: Layout, device: torch.device, model: ModelConfig, host_free: int
) -> tuple[int, str]:
    """Returns the device bytes for a cache, and a description of the rest of a GPU's memory, for an error."""
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION[device.type]
    if device.type != "cuda":
        return int(host_free * share), ""
    free, total = torch.cuda.mem_get_info(device)
    rows = config.max_num_seqs + config.drafted_rows
    working = working_bytes(model, layout, rows, offload_bytes(config, layout) > 0)
    return int(total * share) - (total - free) - working, (
        f" ({in_gib(int(total * share))} of the GPU can be used, {in_gib(total - free)} is in use by all "
        f"processes, and {in_gib(working)} is left free for prefill and decode steps)"
    )


def _demand(layout: Layout, capacity: int) -> Blocks:
    """Blocks of each tier for the pages of ``capacity`` tokens."""
    need = layout.most_demand(capacity)
    return Blocks({kind: need[kind] for kind in layout.paged})


def describe_prefixes(config: EngineConfig, layout: Layout) -> str:
    """Describes the prefix cache's tiers and their sizes."""
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
