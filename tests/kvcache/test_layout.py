"""The layout of pages, blocks and states that follows from a KVSpec."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spec import LLAMA, SMALL, specs, tokens

from shadowkv.kvcache.memory.arenas import GRANULE, Blocks
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.kvcache.sequences.group_layout import MIN_WASTE, GroupLayout, PageCount, pack
from shadowkv.kvcache.sequences.layout import Layout


def layout_of(spec: KVSpec, shape: ModelShape = SMALL, dtype: torch.dtype = torch.bfloat16) -> GroupLayout:
    return Layout(spec, shape, dtype, 131072).main


@specs
@settings(deadline=None)
@given(start=tokens, more=st.integers(0, 100_000), step=st.integers(0, 500))
def test_pages_and_blocks_grow_with_the_capacity(spec, start, more, step):
    layout = layout_of(spec)
    smaller, larger = (layout.pages(start, start + grown) for grown in (more, more + step))
    for kind in ("dense", "static", "ring", "compressed"):
        assert getattr(smaller, kind) <= getattr(larger, kind)
    assert layout.blocks(smaller).within(layout.blocks(larger))


@specs
@settings(deadline=None)
@given(start=tokens, more=st.integers(0, 100_000))
def test_pages_hold_every_token_of_the_sequence(spec, start, more):
    capacity = start + more
    pages = layout_of(spec).pages(start, capacity)
    if not spec.compresses or capacity <= spec.dense_limit:
        assert pages == PageCount(dense=-(-capacity // PAGE))
        return
    assert (pages.compressed + pages.ring) * PAGE >= capacity
    assert pages.static * PAGE >= spec.static_tokens
    if start > spec.dense_limit:
        assert pages.dense == 0
    else:
        assert pages.dense * PAGE >= spec.dense_limit


@specs
@settings(deadline=None)
@given(capacity=st.integers(1, 20_000), late=st.booleans())
def test_what_a_sequence_may_take_at_the_most_is_enough_for_any_prompt(spec, capacity, late):
    layout = layout_of(replace(spec, dense_below=8192) if late and spec.compresses else spec)
    most = layout.most_demand(capacity)
    for start in (1, capacity):
        assert layout.demand(start, capacity).within(most)


@specs
def test_blocks_hold_as_many_pages_of_one_kind_as_fit(spec):
    layout = layout_of(spec)
    compressed_pages = 17 if spec.compresses else 0
    host = compressed_pages if spec.place == "host" else 0
    pages = PageCount(dense=3, static=2, ring=4, compressed=compressed_pages, host=host, segments=2)
    blocks = layout.blocks(pages)
    exact, compressed = layout.exact_per_block, max(1, layout.compressed_per_block)
    assert exact * layout.exact_bytes <= layout.block_bytes
    assert compressed * layout.compressed_bytes <= layout.block_bytes
    assert blocks["device"] == -(-3 // exact) + -(-6 // exact) + -(-pages.compressed // compressed)
    assert blocks["host"] == host
    assert blocks["segment_slots"] == 2
    assert blocks["states"] == (2 if layout.state_fields else 0)
    assert not any(layout.blocks(PageCount()).values())


@settings(deadline=None)
@given(exact=st.integers(1, 4000), compressed=st.integers(1, 4000))
def test_packing_wastes_little_in_small_blocks(exact, compressed):
    count, other, size = pack(exact, compressed)
    assert count >= 1 and other >= 1
    assert size == max(count * exact, other * compressed)
    if compressed <= exact:
        # Some 1 to 8 pages come within a sixteenth of a compressed page of a whole number of them.
        assert 1 - min(count * exact, other * compressed) / size <= max(MIN_WASTE, 1 / 8)


def test_turbo_pages_of_an_8b_model_fill_their_blocks():
    layout = layout_of(preset("turbo"), LLAMA, torch.bfloat16)
    assert (layout.exact_per_block, layout.compressed_per_block) == (2, 11)
    assert layout.block_bytes == 11 * layout.compressed_bytes
    assert layout.block_bytes - 2 * layout.exact_bytes < 2 * MIN_WASTE * layout.block_bytes


@pytest.mark.parametrize("shape", [LLAMA, SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_the_papers_layout(shape, dtype):
    layout = layout_of(preset("shadowkv"), shape, dtype)
    size, heads, dim = dtype.itemsize, shape.num_kv_heads, shape.head_dim
    rank = layout.spec.as_dict()["rank"]
    exact = 2 * heads * PAGE * dim * size
    compressed = PAGE * rank * size + heads * 8 * dim * size + heads * 8  # latents, landmarks, excluded
    assert exact <= layout.exact_bytes < exact + GRANULE
    assert compressed <= layout.compressed_bytes < compressed + 48 + GRANULE
    unit = layout.bytes_per_block()
    assert unit["device"] == shape.num_layers * layout.block_bytes
    assert unit["host"] == shape.num_layers * heads * PAGE * dim * size
    chunks = 2047 * 8
    entries = 2 * 257  # twice 1.56 % of the chunks of a context that ends in the middle of its last page
    row = 8 * dim * size + 2 * 4  # a chunk of values, its owner and when it was used
    buffer = heads * (entries * row + chunks * 2 + 4)
    state = rank * heads * dim * size
    assert shape.num_layers * buffer <= unit["segment_slots"] <= shape.num_layers * (buffer + 80)
    assert shape.num_layers * state <= unit["states"] < shape.num_layers * (state + 48 + GRANULE)
    count = layout.fixed_blocks(12)
    assert count == Blocks(sequences=12, segment_slots=12 + 7, states=12 + 7)  # some for later segments
    assert layout.fixed_blocks(160) == Blocks(sequences=160, segment_slots=170, states=170)
    assert layout.fixed_bytes(12) == 20 * (unit["segment_slots"] + unit["states"])


def test_values_are_on_the_tier_that_the_place_names_and_on_no_other():
    device, host = layout_of(preset("shadowkv", place="device")), layout_of(preset("shadowkv"))
    assert "values" in {field.name for field in device.compressed_fields}
    assert device.host_fields == ()
    assert device.bytes_per_block()["host"] == 0
    assert "values" not in {field.name for field in host.compressed_fields}
    assert [field.name for field in host.host_fields] == ["values"]
    coded = layout_of(preset("turbo-host"))
    assert [field.name for field in coded.host_fields] == ["values"]
    assert "value_scale" in {
        field.name for field in coded.compressed_fields
    }  # 2 bytes a token are not worth a transfer


def entries_of(spec: KVSpec, max_model_len: int, fetch_buffer: float) -> int:
    layout = Layout(spec, SMALL, torch.bfloat16, max_model_len, fetch_buffer).main
    return layout.buffer_fields[0].shape[1] if layout.buffer_fields else 0


def test_the_buffer_holds_a_multiple_of_what_a_step_selects_and_no_more_than_there_is():
    spec = preset("shadowkv", budget=1600)
    assert [entries_of(spec, 100_000, factor) for factor in (1, 1.5, 2, 100)] == [200, 300, 400, 1562 * 8]
    assert entries_of(preset("shadowkv", budget=1.0), 10_000, 2) == 155 * 8
    assert entries_of(preset("shadowkv", budget=0.5), 10_000, 1) == 629


def test_there_is_no_buffer_where_it_would_not_help():
    assert entries_of(preset("shadowkv"), 100_000, 0) == 0
    assert entries_of(preset("shadowkv", place="device"), 100_000, 2) == 0
    assert entries_of(KVSpec(place="host"), 100_000, 2) == 0  # everything is attended
    assert entries_of(preset("shadowkv", budget=1.0, chunk=1), 100_000, 2) == 0  # more than it can number
    assert entries_of(preset("shadowkv"), 60, 2) == 0


def test_the_full_policy_needs_exact_pages_alone():
    layout = layout_of(preset("full"))
    assert (layout.compressed_fields, layout.host_fields, layout.state_fields) == ((), (), ())
    assert layout.fixed_bytes(9) == 0
    assert layout.fixed_blocks(9) == Blocks(sequences=9)
    assert layout.block_bytes == layout.exact_bytes
    assert layout.pages(100, 129) == PageCount(dense=3)


def test_a_block_is_large_enough_for_either_kind_of_page():
    layout = layout_of(KVSpec(index="chunk-mean", chunk=1))  # as many landmarks as keys
    assert layout.compressed_bytes > layout.exact_bytes
    assert layout.block_bytes >= layout.compressed_bytes
    assert layout.compressed_per_block >= 1


def test_blocks_add_subtract_and_compare_tier_by_tier():
    a, b = Blocks(device=5, host=2), Blocks(device=3, host=4)
    assert a + b == Blocks(device=8, host=6)
    assert a - b == Blocks(device=2, host=-2)
    assert not a.within(b)
    assert not b.within(a)
    assert a.within(a)
    assert Blocks(device=3, host=2).within(a)


@pytest.mark.parametrize(
    ("kv", "kept"),
    [("turbo", False), ("turbo-host", False), ("turbo:outliers=3", True), ("quest", True), ("shadowkv", True),
     ("turbo-host:index=sketch-1bit", True)],
)  # fmt: skip
def test_pages_hold_excluded_chunks_where_somebody_reads_them(kv, kept):
    assert ("excluded" in {field.name for field in layout_of(preset(kv)).compressed_fields}) == kept
