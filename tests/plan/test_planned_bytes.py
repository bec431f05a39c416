"""Planned bytes are those that a cache really takes, and the largest batch is the largest that it admits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import peak_bytes

from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.engine.startup.sizing import (
    LargestBatch,
    block_bytes,
    drawing_bytes,
    largest_batch,
    prefill_bytes,
    staging_bytes,
    step_bytes,
    storing_bytes,
    tables_bytes,
    working_bytes,
)
from shadowkv.kvcache.case import choose_ops
from shadowkv.kvcache.decode.pooled import attend_tokens
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks, OutOfBlocks
from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.parts.base import CompressedTokens, FittedTokens
from shadowkv.kvcache.policy.shape import FULL, Indexer, IndexQueries, LayerKind, ModelShape, PooledHeads
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.prefill import native
from shadowkv.kvcache.prefill.native import selecting_bytes
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.kvcache.traffic import StepReads, step_reads
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.plan.planner import sequence_bytes
from shadowkv.wording import GIB

SHAPE = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=64)
ROPE = RopeConfig(head_dim=64)
LLAMA = ModelShape(num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128)


def llama(vocab_size: int = 1000) -> SimpleNamespace:
    """What sizing reads of the config of Llama-3.1-8B, with another vocabulary."""
    widths = {"hidden_size": 4096, "stream_size": 4096, "intermediate_size": 14336, "vocab_size": vocab_size}
    return SimpleNamespace(shape=LLAMA, experts=None, linear=None, has_mlps=True, double_wide_mlp=False, **widths)


SPECS = {
    **{name: preset(name) for name in PRESETS},
    "small": preset("shadowkv", rank=9, budget=32, outliers=3),
    "on the device": KVSpec(keys="low-rank", index="chunk-mean", budget=64),
}


def make_layout(spec: KVSpec, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(spec, shape, dtype, 4096)


def make_cache(spec: KVSpec, slots: int, memory: Blocks) -> KVCache:
    layout = make_layout(spec)
    return KVCache(layout, ROPE, slots=slots, memory=memory, ops=choose_ops(layout, ROPE, "cpu"))


@pytest.mark.parametrize("context", [1, 63, 64, 65, 300, 744, 745, 1000, 4095, 4096])
@pytest.mark.parametrize("name", SPECS)
def test_bytes_are_those_that_a_sequence_takes(name: str, context: int) -> None:
    cache = make_cache(SPECS[name], 1, Blocks(device=200, host=200))
    planned = sequence_bytes(make_layout(SPECS[name]), context)
    cache.allocate(context, context)
    use, rows, row = cache.use(), (cache.total - cache.free)["segment_slots"], row_bytes(cache)
    padding = 16 * SHAPE.num_layers * rows * len(cache.layout.main.buffer_fields)
    taken = use["device"].used_bytes + use["states"].used_bytes + rows * row
    assert taken <= planned.device < taken + max(1, padding)
    assert planned.host == use["host"].used_bytes


@pytest.mark.parametrize("sequences", [1, 5, 64])
@pytest.mark.parametrize("name", SPECS)
def test_fixed_bytes_are_those_of_all_states_and_buffers(name: str, sequences: int) -> None:
    cache = make_cache(SPECS[name], sequences, Blocks(device=1, host=1))
    count = cache.total["segment_slots"] + 1  # one for the rows that fill up a captured batch
    taken = cache.groups[0].store.tiers["states"].arena.nbytes + count * row_bytes(cache)
    padding = 16 * SHAPE.num_layers * count * len(cache.layout.main.buffer_fields)
    assert taken <= cache.layout.fixed_bytes(sequences) < taken + max(1, padding)


def row_bytes(cache: KVCache) -> int:
    """Bytes of a segment's buffer of fetched values."""
    fields = cache.layout.main.buffer_fields
    return sum(getattr(cache.groups[0].store.buffer, field.name)[:, 0].nbytes for field in fields)


MODEL = SimpleNamespace(
    shape=SHAPE,
    experts=None,
    linear=None,
    has_mlps=True,
    double_wide_mlp=False,
    hidden_size=64,
    stream_size=64,
    intermediate_size=128,
    vocab_size=1000,
)


@pytest.mark.parametrize(("device_bytes", "host_bytes"), [(28_000_000, 1_600_000), (26_000_000, 10**9)])
@pytest.mark.parametrize("context", [200, 1500])
@pytest.mark.parametrize("name", SPECS)
def test_the_largest_batch_fits_and_one_more_does_not(
    name: str, context: int, device_bytes: int, host_bytes: int
) -> None:
    layout = make_layout(SPECS[name])
    unit = layout.bytes_per_block()
    usable = device_bytes + working_bytes(MODEL, layout, 0)
    batch = largest_batch(MODEL, layout, context, context, usable, host_bytes).both

    def admit(count: int) -> None:
        left = device_bytes - count * step_bytes(MODEL, layout) - layout.fixed_bytes(count)
        host = host_bytes // unit["host"] if unit["host"] else 0
        blocks = Blocks(device=min(max(0, left) // unit["device"], 999), host=min(host, 999))
        cache = make_cache(SPECS[name], count, blocks)
        for _ in range(count):
            cache.allocate(context, context)

    assert batch >= 1
    admit(batch)
    with pytest.raises(OutOfBlocks):
        admit(batch + 1)


def test_either_tier_can_be_the_limit() -> None:
    layout = make_layout(SPECS["shadowkv"])
    need, unit = layout.demand(4096, 4096), layout.bytes_per_block()
    host = need["host"] * unit["host"]
    device = 6 * need["device"] * unit["device"] + layout.fixed_bytes(6) + working_bytes(MODEL, layout, 6)

    def largest(device_bytes: int, host_bytes: int | None) -> LargestBatch:
        return largest_batch(MODEL, layout, 4096, 4096, device_bytes, host_bytes)

    assert largest(device, 10 * host) == LargestBatch(6, 10, 6)
    assert largest(device - 1, 10 * host) == LargestBatch(5, 10, 5)
    assert largest(device, 4 * host - 1) == LargestBatch(6, 3, 3)
    assert largest(device, None) == LargestBatch(6, None, 6)
    assert largest(-1, 10 * host).both == 0
    assert largest_batch(MODEL, make_layout(SPECS["quest"]), 4096, 4096, device, 0).host is None


@pytest.mark.parametrize(
    ("drafts", "rows"), [(SpeculativeConfig("suffix", 5), 11), (SpeculativeConfig("sparse", 5), 36)]
)
def test_drafted_tokens_take_rows_of_a_step(drafts: SpeculativeConfig, rows: int) -> None:
    layout = make_layout(SPECS["quest"])
    pages = 6 * layout.demand(4096, 4096)["device"] * layout.bytes_per_block()["device"]
    device = pages + layout.fixed_bytes(6) + working_bytes(MODEL, layout, rows)
    assert largest_batch(MODEL, layout, 4096, 4096, device, None, drafts=drafts).both == 6
    assert largest_batch(MODEL, layout, 4096, 4096, device - 1, None, drafts=drafts).both == 5


@pytest.mark.parametrize(("name", "layer_bytes"), [("full", 16384 * 4096), ("turbo", 900 * 16384)])
def test_staging_is_three_layers_of_the_longest_sequence(name: str, layer_bytes: int) -> None:
    model = llama()
    layout = make_layout(preset(name), LLAMA, torch.bfloat16).resized(16384)
    more = working_bytes(model, layout, 3, offload=True) - working_bytes(model, layout, 3)
    assert more == staging_bytes(layout) == pytest.approx(3 * layer_bytes, rel=0.35 if name == "turbo" else 0)


def test_fetches_take_scratch_for_every_chunk_that_a_step_selects_in_every_layer() -> None:
    """Addresses from and to of every miss, of short rows twice, and an entry: 8 bytes each."""
    model = llama()
    logits = step_bytes(model, make_layout(preset("turbo"), LLAMA, torch.bfloat16))
    for kv, numbers in (("turbo-host", 5), ("shadowkv", 3)):
        layout = make_layout(preset(kv, budget=1024), LLAMA, torch.bfloat16)
        assert step_bytes(model, layout) - logits == 32 * 8 * (1024 // 8) * numbers * 8


def test_a_step_takes_logits_and_what_sampling_works_in() -> None:
    model = llama(128256)
    assert step_bytes(model, make_layout(preset("turbo"), LLAMA, torch.bfloat16)) == 4 * 4 * 128256 + 4 * 8192 + 8 * 5


def test_bases_that_are_decoded_to_compress_and_to_read_are_left_room() -> None:
    """Of low-rank-mixed keys: 64 pages are projected at a time, and each sequence of a step has its basis decoded."""
    model = llama()
    mixed, int4 = (make_layout(preset(f"turbo:keys=low-rank-{x}"), LLAMA, torch.bfloat16) for x in ("mixed", "int4"))
    basis = 160 * 1024
    pages, latents = 64 * 64 * 4 * 1024, 64 * 64 * 40 * 160
    assert mixed.parts.keys.compression_bytes() == 64 * 8 * basis + pages + latents
    assert int4.parts.keys.compression_bytes() == 0
    assert storing_bytes(mixed) == storing_bytes(int4)  # both fit in more before
    assert step_bytes(model, mixed) - step_bytes(model, int4) == 7 * basis


@pytest.mark.parametrize("tokens", [1000, 100_000, 1_000_000])
def test_prefill_reserve_is_the_prompts_and_a_block_in_the_mlp(tokens: int) -> None:
    config = llama()
    stored = max(tokens, 16000)  # several layers of a short prompt
    elements = tokens * (4096 + 16) + 2 * stored * 3 * 1024 + min(tokens, 8192) * (5 * 4096 + 3 * 14336)
    if tokens > 8192:  # a block overtakes it, of which several layers are stored together
        elements += 8192 * (4096 + 16) + 65536 * 3 * 1024
    assert prefill_bytes(config, tokens, torch.bfloat16) == 2 * elements


def test_attention_of_a_very_long_prompt_takes_more_than_its_mlp() -> None:
    config = llama()
    attending = 2 * 8192 * (4096 + 3 * 4096 + 2 * 1024) + drawing_bytes(LLAMA, 8192, 2_000_000)
    assert block_bytes(config, 2_000_000, torch.bfloat16) == attending
    assert block_bytes(config, 1_000_000, torch.bfloat16) == 2 * 8192 * (5 * 4096 + 3 * 14336)


INDEXED = replace(LLAMA, kinds=(FULL, *[LayerKind(indexer=Indexer(128, 16, 1))] * 31))


def test_index_keys_of_a_prompt_are_counted() -> None:
    """One more key a token, in scratch memory and in the copy of a later turn."""
    config, indexed = llama(), llama()
    indexed.shape = INDEXED
    more = prefill_bytes(indexed, 100_000, torch.bfloat16) - prefill_bytes(config, 100_000, torch.bfloat16)
    assert more == 2 * 128 * (2 * 100_000 + 65_536)  # and of a block that overtakes it


def test_attention_of_an_indexer_is_counted_where_it_takes_more_than_the_mlp() -> None:
    config = llama()
    config.shape = INDEXED
    context = 2_000_000
    attending = 2 * 8192 * (4096 + 3 * 4096 + 2 * 1024) + selecting_bytes(INDEXED, 8192, context, torch.bfloat16)
    assert block_bytes(config, context, torch.bfloat16) == attending
    assert selecting_bytes(INDEXED, 2048, 2048, torch.bfloat16) == 0  # every query attends to all of it
    assert selecting_bytes(LLAMA, 8192, context, torch.bfloat16) == 0


@pytest.mark.parametrize("indexer", [Indexer(128, 4, 1), Indexer(4, 32, 0, PooledHeads(4, 64))], ids=str)
@pytest.mark.parametrize(("heads", "queries", "keys", "at_once"), [(2, 512, 8192, 2**20), (4, 100, 700, 2**24)])
def test_queries_select_in_what_is_counted(
    heads: int, queries: int, keys: int, at_once: int, indexer: Indexer, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SCORES_AT_ONCE", at_once)
    shape = ModelShape(1, 4 * heads, heads, 64, (LayerKind(indexer=indexer),))
    of_index = heads if indexer.pooled is None else indexer.pooled.heads
    q, index_queries = (torch.randn(queries, count, 64) for count in (4 * heads, of_index))
    k, v, index_keys = (torch.randn(keys, count, 64) for count in (heads, heads, 1))
    ops = SimpleNamespace(apply_rope=lambda x, positions, tables: x.clone())
    store: Any = SimpleNamespace(layout=SimpleNamespace(indexer=indexer), ops=ops, rotary=None)
    store.block_keys, store.key_norm = (partial(of, store) for of in (GroupStore.block_keys, GroupStore.key_norm))
    index = IndexQueries(index_queries, torch.ones(64), 1e-6)
    attend = partial(native.attend_selected_blocks, store, q, index, k, v, index_keys)
    taken, counted = peak_bytes(attend), selecting_bytes(shape, queries, keys, torch.float32)
    assert counted / 1.5 < taken <= counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_steps_of_pooled_layers_copy_what_is_counted(kv: str, dtype: torch.dtype) -> None:
    """Keys and values of a dense sequence; longer ones are compressed."""
    kind = LayerKind(indexer=Indexer(4, 64, 0, PooledHeads(4, 64)))
    shape = ModelShape(2, 16, 2, 64, (kind, kind))
    layout = Layout(resolve(preset(kv), shape), shape, dtype, 64 * 64)
    config = llama()
    config.shape = replace(shape, kinds=(FULL, FULL))
    plain = Layout(KVSpec(), config.shape, dtype, 64 * 64)
    counted = step_bytes(config, layout) - step_bytes(config, plain)
    counted -= sum(part.reading_bytes() for group in layout.groups for part in group.parts)
    pages = layout.main.most_pages(64 * 64).dense
    assert pages == 4
    q, (k, v) = torch.randn(1, 16, 64).to(dtype), torch.randn(2, pages, 2, 64, 64).to(dtype)
    number, kept = torch.arange(pages)[None], torch.ones(1, pages * 64, dtype=torch.bool)
    taken = peak_bytes(lambda: attend_tokens(q, k, v, number, kept))
    assert counted * pages / (pages + 1) <= taken <= counted


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (28, 4), (12, 12), (40, 2), (128, 4)])
@pytest.mark.parametrize(("queries", "keys"), [(8192, 1_000_000), (1000, 20_000), (129, 129)])
def test_scores_of_blocks_are_as_large_as_their_kernels_buffer(heads: tuple[int, int], queries: int, keys: int) -> None:
    selection = pytest.importorskip("shadowkv.ops.select_blocks.triton")
    q = torch.empty(queries, heads[0], 64, device="meta")
    scores = selection.score_buffer(q, torch.empty(keys, heads[1], 64, device="meta"))
    tiles = -(-queries // 128)
    listed = 2 * 4 * heads[0] * tiles * len(scores)  # indices and weights
    assert drawing_bytes(ModelShape(1, *heads, 64), queries, keys) == scores.nbytes + listed


def test_tables_of_rope_are_counted() -> None:
    layout = make_layout(preset("turbo"))
    cache = make_cache(preset("turbo"), 1, Blocks(device=8, host=8))
    assert tables_bytes(layout) == cache.groups[0].store.rotary.cos.nbytes + cache.groups[0].store.rotary.sin.nbytes


def test_four_sequences_of_a_million_tokens_fit_beside_a_prefill() -> None:
    """With ``turbo`` on the 139.8 GiB of an H200, 99 % of them, beside 15 GiB of weights and a GiB of PyTorch's own."""
    model = llama(128256)
    layout = Layout(preset("turbo"), LLAMA, torch.bfloat16, 1_000_384)
    usable = int((0.99 * 139.8 - 15 - 1) * GIB)
    assert largest_batch(model, layout, 1_000_000, 1_000_384, usable, None).both == 4


@pytest.mark.parametrize(
    ("kv", "taken"),
    [
        ("full", 0),
        ("turbo", 16 * 12 * 1024**2 + 2 * 2 * 16384 * 1024),  # Gram matrices, and rows centred and multiplied
        (
            "snapkv",
            512 * 64 * 8 * (8 * 128 + 12 * 64 * 4),
        ),  # to compress: keys, and the scores of 64 queries of four heads
        ("fp8", 100_000 * 4 * 1024),
        ("shard", 4 * (4 * 100_000 * 1024 + 2**24)),
    ],
)
def test_policies_leave_room_for_what_their_parts_fit(kv: str, taken: int) -> None:
    layout = Layout(preset(kv), LLAMA, torch.bfloat16, 100_000)
    assert storing_bytes(layout) == taken


@pytest.mark.parametrize(
    ("kv", "axis"),
    [
        ("snapkv", "index"),
        ("loki", "index"),
        ("infinigen", "index"),
        ("fp8", "keys"),
        ("shard", "values"),
        ("full:keys=fp8,values=fp8,centred=true", "keys"),
        ("turbo:key_groups=2", "keys"),
    ],
)
def test_parts_fit_in_what_they_ask_for(seed: str, kv: str, axis: str) -> None:
    """Of 3,000 tokens on the CPU, whose allocations a profiler sees: beside half a megabyte for what does not grow."""
    cache = make_cache(preset(kv), 1, Blocks(device=8, host=8))
    part, rows = getattr(cache.parts, axis), torch.randn(3, 1, 1, 3000, SHAPE.num_kv_heads, SHAPE.head_dim)
    tokens = FittedTokens(*rows, torch.zeros(1, dtype=torch.int64))
    taken = peak_bytes(lambda: part.fit(cache.groups[0].store, slice(0, 1), torch.zeros(1, dtype=torch.int64), tokens))
    asked = part.fitting_bytes(3000)
    assert taken <= asked + 2**19
    assert axis == "values" or asked <= 3 * taken, "far more than it takes"


@pytest.mark.parametrize(
    ("kv", "axis", "pages"),
    [
        *((name, "index", 512) for name in ("snapkv", "loki", "infinigen", "triattention")),
        *(("polar-int4", "keys", 128), ("tq3_0", "values", 128), ("kvarn", "keys", 128)),
    ],
)
def test_parts_compress_in_what_they_ask_for(seed: str, kv: str, axis: str, pages: int) -> None:
    """A quarter of the pages that are compressed at a time, in a quarter of what is asked for those."""
    cache = make_cache(preset(kv), 1, Blocks(device=200, host=8))
    part, none, count = getattr(cache.parts, axis), torch.zeros(1, dtype=torch.int64), pages // 4
    rows, number = torch.randn(3, 1, 1, PAGE * count, SHAPE.num_kv_heads, SHAPE.head_dim), torch.arange(count)
    part.fit(cache.groups[0].store, slice(0, 1), none, FittedTokens(*rows, none))
    in_pages = (x.unflatten(2, (-1, PAGE)).flatten(1, 2) for x in rows)
    tokens = CompressedTokens(slice(0, 1), none, PAGE * number, number, number, *in_pages)
    taken, asked = peak_bytes(lambda: part.compress(cache.groups[0].store, tokens)), part.compression_bytes() // 4
    assert taken <= asked + 2**19
    assert asked <= 3 * taken, "far more than it takes"


def test_reads_of_the_paper_on_its_model() -> None:
    layout = make_layout(preset("shadowkv"), LLAMA, torch.bfloat16)
    reads = step_reads(layout.main, 131072, 0.6)
    vector = 1024 * 2
    compressed, selected = 131072 - 64, 2048  # 64 tokens of tail: the local window of 32, up to a whole page
    assert reads.exact == (49 * 8 + 64) * 2 * vector
    assert reads.index == compressed / 8 * vector + compressed // 8 * 8  # landmarks, and a byte per chunk and head
    assert reads.state == pytest.approx(160 * vector, rel=1e-3)
    assert reads.keys == 8 * selected * 160 * 2  # heads select apart
    assert reads.values == pytest.approx(0.6 * selected * vector)
    assert reads.host_values == pytest.approx(0.4 * selected * vector)
    assert layout.spec.attended_tokens(131072) == 49 * 8 + 64 + selected


def test_without_a_buffer_every_step_reads_all_it_selects_from_the_host() -> None:
    for fetch_buffer, share in ((2.0, 0.4), (0.0, 1.0)):
        reads = step_reads(Layout(preset("turbo-host"), LLAMA, torch.bfloat16, 131072, fetch_buffer).main, 131072, 0.6)
        codes, scale = 8 * 48, 8 * 2  # scales are on the device
        assert reads.host_values == pytest.approx(share * 2048 * codes)
        assert reads.values == pytest.approx(2048 * ((1 - share) * codes + scale))


def test_of_a_sketchs_maps_a_step_reads_that_of_the_queries() -> None:
    layout = make_layout(preset("turbo"), LLAMA, torch.bfloat16)
    fields = {field.name: field.nbytes for field in layout.main.state_fields}
    unread = fields["sketch_mean"] + fields["sketch_key_map"]
    assert fields["sketch_query_map"] == fields["sketch_key_map"] == 8 * 128 * 128 * 2
    reads = step_reads(layout.main, 131072, 0.0)
    assert reads.state == sum(fields.values()) - unread


@pytest.mark.parametrize("name", ["full", "shadowkv", "quest"])
def test_dense_sequences_read_all_of_themselves(name: str) -> None:
    layout = make_layout(SPECS[name])
    context = min(300, layout.spec.dense_limit)
    reads = step_reads(layout.main, context, 0.6)
    assert reads == StepReads(exact=context * 2 * SHAPE.kv_dim * 4)


def test_selection_never_reads_more_than_there_is() -> None:
    layout = make_layout(KVSpec(keys="low-rank", index="chunk-mean", budget=1.0))
    spec, reads = layout.spec, step_reads(layout.main, 1000, 0.0)
    compressed = 64 * spec.compressed_pages(1000)
    assert reads.keys == compressed * spec.as_dict()["rank"] * 4
    assert reads.values == (compressed - spec.static_tokens) * SHAPE.kv_dim * 4
    assert reads.host_values == 0


def test_the_slower_tier_sets_the_time() -> None:
    reads = StepReads(exact=300.0, index=100.0, host_values=30.0)
    assert reads.seconds(100.0, 10.0) == 4.0
    assert reads.seconds(100.0, 5.0) == 6.0
