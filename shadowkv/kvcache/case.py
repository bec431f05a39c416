"""Chooses the ops of an engine, from its cache's layout and policy. ``startup/loading.py`` calls ``choose_ops``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from shadowkv.kvcache.parts import prefill_strategy
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.case import Case
from shadowkv.ops.extension import block_memory
from shadowkv.ops.registry import Ops

OF_TOKENS = (
    *("append_block", "append_tokens", "apply_rope", "dense_attention.causal", "dense_attention.packed"),
    *("gather_context", "paged_attention", "rebuild_rows"),
)
OF_COMPRESSED_PAGES = ("dense_attention.partial", "find_outliers", "merge_attention", "write_rows")
"""Names of ops. Every policy calls those in ``OF_TOKENS``. A policy that compresses also calls those in
``OF_COMPRESSED_PAGES`` and those that its parts name. To attend to compressed tokens, it calls ``OF_SELECTED``,
``OF_ALL`` or both."""
OF_WINDOWS = ("dense_attention.windowed", "paged_window_attention")
"""Ops of layers with a window."""
NOT_OF_WINDOWS = ("paged_attention",)
"""The ops of ``OF_TOKENS`` that layers with a window do not call: they call ``paged_window_attention`` instead."""
OF_SINKS = ("add_sinks", "dense_attention.partial", "dense_attention.windowed")
"""Ops of models whose softmax has one more position (``ModelShape.sinks``)."""
OF_POOLED = "pooled_scores"
"""The op of layers whose indexer is pooled."""
OF_SELECTED, OF_ALL = "attend_selected", "attend_coded"


def choose_ops(
    layout: Layout,
    rope: RopeConfig,
    device: torch.device | str,
    also: Iterable[str] = (),
    backends: Mapping[str, str] | None = None,
    attention_backend: str = "auto",
) -> Ops:
    """Chooses the ops of an engine.

    Args:
        layout: layout of the engine's cache.
        also: names of other ops, which the model's layers and the sampler call.
        backends: backend by op name. For all other ops a backend is chosen automatically.
        attention_backend: one of ``load_settings.ATTENTION_BACKENDS``.

    Raises ValueError and SettingsError as ``Ops`` does.
    """
    device = torch.device(device)
    case = case_of(layout, rope, device, also)
    return Ops(device, case, backends, attention_backend, list(with_other_heads(layout, case)))


def with_other_heads(layout: Layout, case: Case) -> Iterator[Case]:
    """Yields a case for each further size of heads: layers with a window can have heads of their own
    (``LayerKind.heads``). ``case`` is the case of the first group."""
    ops = {*OF_TOKENS, *OF_WINDOWS, *(OF_SINKS if layout.shape.sinks else ())} - {*NOT_OF_WINDOWS}
    for heads in dict.fromkeys(group.shape.heads for group in layout.groups):
        if heads != layout.shape.heads:
            ropes = [group.rope for group in layout.groups if group.shape.heads == heads and group.rope is not None]
            rope_dim = ropes[0].dim if ropes else heads.head_dim
            yield replace(case, ops=frozenset(ops), rope_dim=rope_dim, **heads._asdict())


def case_of(layout: Layout, rope: RopeConfig, device: torch.device, also: Iterable[str] = ()) -> Case:
    """Returns the case by which backends are chosen: the sizes of ``layout``, and the names of all ops that are called,
    including ``also``. Layers with a window that have heads of their own have further cases (``with_other_heads``)."""
    spec, shape, gpu = layout.spec, layout.shape, device.type == "cuda"
    keys, ops, pages = layout.parts.keys, {*also, *OF_TOKENS, *prefill_strategy(spec).ops}, 0
    for group in layout.groups:
        if group.spec.compresses:
            ops |= {*OF_COMPRESSED_PAGES, *group.parts.ops}
            ops |= {OF_SELECTED} if group.spec.has_index else set()
            ops |= set() if group.spec.selects else {OF_ALL}
            pages = group.spec.compressed_pages(layout.max_model_len)
    if any(group.window is not None and group.shape.heads == shape.heads for group in layout.groups):
        ops |= {*OF_WINDOWS}
    if any(group.indexer is not None and group.indexer.pooled is not None for group in layout.groups):
        ops.add(OF_POOLED)
    if shape.sinks:
        ops |= {*OF_SINKS}
    if layout.fetched_bytes:
        ops.add("fetch_chunks")
    return Case(
        ops=frozenset(ops),
        dtype=layout.dtype,
        head_dim=shape.head_dim,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
        rope_dim=rope.dim,
        interleaved=rope.interleaved,
        chunk=spec.chunk,
        rank=keys.rank,
        latent_width=keys.page_fields()[0].shape[-1] if keys.rank else 0,
        key_codec=keys.codec_id,
        value_codec=layout.parts.values.codec_id,
        centred=keys.centred,
        mass=layout.parts.index.mass is not None,
        max_pages=pages,
        # The shapes of a captured step can be rounded up to one page more than the longest sequence has.
        max_selected=max(
            (
                min(pages * PAGE // spec.chunk, int(of_group.budget_chunks(np.asarray(layout.max_model_len + PAGE))))
                for of_group in (group.spec for group in layout.groups)
                if of_group.compresses
            ),
            default=0,
        ),
        fetched_bytes=layout.fetched_bytes,
        host_values=bool(layout.host_fields),
        capability=torch.cuda.get_device_capability(device) if gpu else None,
        block_memory=block_memory(device) if gpu else 0,
    )
