"""KVSpec, the presets, and the layout that follows from them."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.layout import LEAST_WASTE, Blocks, Layout, PageCount, pack
from shadowkv.kvcache.memory import GRANULE
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE, SINK, KVSpec

LLAMA = ModelShape(num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128)
SMALL = ModelShape(num_layers=3, num_query_heads=9, num_kv_heads=3, head_dim=64)
SPECS = {
    **PRESETS,
    "low-rank alone": KVSpec(keys="low-rank"),
    "host alone": KVSpec(place="host"),
    "wide chunks": KVSpec(index="min-max", chunk=64, budget=0.05, local=200),
    "narrow chunks": KVSpec(keys="low-rank", index="chunk-mean", chunk=1, outliers=70, budget=100, local=1),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
tokens = st.integers(1, 300_000)


def layout_of(spec: KVSpec, shape: ModelShape = SMALL, dtype: torch.dtype = torch.bfloat16) -> Layout:
    spec = spec.resolve(shape)
    return Layout(spec, shape, dtype, build_parts(spec, shape, dtype), 131072)


@pytest.mark.parametrize(
    ("heads", "dim", "rank"),
    [
        (8, 128, 160),
        (4, 128, 96),
        (8, 64, 96),
        (3, 64, 96),
        (1, 128, 64),
        (7, 72, 256),
        (9, 64, 96),
        (2, 64, 64),
        (32, 128, 640),
    ],
)
def test_default_rank_is_5_of_32_but_half_of_small_widths_in_steps_of_32(heads, dim, rank):
    assert KVSpec(keys="low-rank").resolve(ModelShape(1, heads, heads, dim)).rank == rank


def test_resolving_keeps_what_was_chosen_and_leaves_other_keys_without_a_rank():
    assert KVSpec(keys="low-rank", rank=7).resolve(LLAMA).rank == 7
    assert KVSpec(keys="dense").resolve(LLAMA).rank is None
    spec = preset("shadowkv").resolve(LLAMA)
    assert spec == spec.resolve(LLAMA)
    assert replace(spec, rank=None) == PRESETS["shadowkv"]


def test_every_reason_is_listed_at_once():
    spec = KVSpec("k?", "i?", "v?", "p?", budget=1.5, chunk=7, outliers=-1, local=0, rank=3)
    with pytest.raises(ValueError) as error:
        spec.resolve(LLAMA)
    text = str(error.value)
    for reason in ("'k?'", "'i?'", "'v?'", "'p?'", "budget=1.5", "chunk=7", "outliers=-1", "local=0", "rank=3"):
        assert reason in text, reason
    assert text.count("\n  - ") >= 9
    assert "low-rank" in text  # the names that are known
    assert "chunk-mean" in text


@pytest.mark.parametrize(
    "change",
    [
        {"rank": None, "keys": "sparse"},
        {"index": "magic"},
        {"values": "low-rank"},
        {"place": "disk"},
        {"chunk": 0},
        {"chunk": -8},
        {"chunk": 24},
        {"chunk": 128},
        {"outliers": -1},
        {"local": 0},
        {"rank": 0},
        {"rank": 1025},
        {"keys": "dense", "rank": 8},
        {"budget": 0.0},
        {"budget": -0.5},
        {"budget": 1.0001},
        {"budget": float("nan")},
        {"budget": 0},
        {"budget": -64},
        {"mass": 0.0},
        {"mass": 1.0},
        {"mass": float("nan")},
        {"mass": 0.5, "index": "sketch"},
        {"mass": 0.5, "index": "recent"},
        {"mass": 0.5, "index": "votes"},
        {"index": "none"},
        {"index": "exact"},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_for_that_reason_alone(change):
    good = KVSpec("low-rank", "chunk-mean", "dense", "host", budget=0.5, outliers=4, rank=100)
    assert good.resolve(LLAMA) == good
    with pytest.raises(ValueError) as error:
        replace(good, **change).resolve(LLAMA)
    assert str(error.value).count("\n  - ") == 1
    assert str(list(change.values())[-1]) in str(error.value)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("budget", [None, 1, 4096, 1.0, 1e-6])
def test_what_can_be_is_accepted(chunk, budget):
    KVSpec("low-rank", "min-max", budget=budget, chunk=chunk, rank=1024).resolve(LLAMA)


def test_a_spec_is_a_value():
    assert preset("quest") == preset("quest")
    assert hash(KVSpec()) == hash(KVSpec())
    with pytest.raises(FrozenInstanceError):
        KVSpec().chunk = 4  # type: ignore[misc]


def test_presets_are_the_papers():
    assert preset("full") == KVSpec()
    ours = preset("shadowkv").resolve(LLAMA)
    assert (ours.keys, ours.index, ours.place) == ("low-rank", "chunk-mean", "host")
    assert (ours.rank, ours.chunk, ours.outliers, ours.local) == (160, 8, 48, 4 * 8)
    quest = preset("quest")
    assert (quest.keys, quest.index, quest.place, quest.chunk) == ("dense", "min-max", "device", 16)


def test_overrides_of_a_preset_replace_all_but_none():
    assert preset("shadowkv", rank=None, budget=None, outliers=0) == replace(PRESETS["shadowkv"], outliers=0)
    assert preset("quest", budget=512, chunk=8) == replace(PRESETS["quest"], budget=512, chunk=8)
    with pytest.raises(ValueError, match=r"'nope'.*full.*shadowkv.*quest"):
        preset("nope")
    with pytest.raises(TypeError):
        preset("full", depth=3)


def test_fields_may_follow_a_presets_name():
    found = preset("turbo:chunk=8,values=dense,budget=0.03")
    assert found == replace(PRESETS["turbo"], chunk=8, values="dense", budget=0.03)
    assert preset("quest:budget=2048,mass=0.9,place=host", chunk=8) == replace(
        PRESETS["quest"], budget=2048, mass=0.9, place="host", chunk=8
    )
    assert preset("shadowkv:rank=64,budget=1.0,outliers=0").budget == 1.0
    assert isinstance(preset("shadowkv:budget=1").budget, int)
    assert isinstance(preset("shadowkv:budget=1.0").budget, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nope:chunk=8", ["'nope'", "shadowkv"]),
        ("turbo:", ["''", "budget"]),
        ("turbo:chunk", ["chunk=''", "integer"]),
        ("turbo:chunk=8,", ["''", "outliers"]),
        ("turbo:chunk=0.5", ["chunk='0.5'", "integer"]),
        ("turbo:budget=some", ["budget='some'", "number"]),
        ("turbo:values=int4", ["values='int4'", "rotated-4bit"]),
        ("turbo:index=magic,depth=3,rank=x", ["'magic'", "chunk-mean", "'depth'", "local", "rank='x'"]),
    ],
)
def test_policies_that_cannot_be_read_are_told_with_what_is_known(text, said):
    with pytest.raises(ValueError) as error:
        preset(text)
    assert all(word in str(error.value) for word in said), error.value


@pytest.mark.parametrize("name", ["shadowkv", "quest"])
def test_default_budget_is_a_64th_of_the_context_but_at_least_256_tokens(name):
    contexts = np.array([1, 1000, 16384, 16385, 61440, 124928, 1_000_000])
    assert preset(name).budget_tokens(contexts).tolist() == [256, 256, 256, 257, 960, 1952, 15625]


@settings(deadline=None)
@given(context=tokens, share=st.sampled_from([2.0**-i for i in range(8)]), chunk=st.sampled_from([1, 8, 64]))
def test_a_fraction_is_a_share_of_the_context_without_a_floor_rounded_up(context, share, chunk):
    spec = KVSpec(index="min-max", budget=share, chunk=chunk)
    budget = int(spec.budget_tokens(np.asarray(context)))
    assert context * share <= budget < context * share + 1
    assert budget <= int(spec.budget_chunks(np.asarray(context))) * chunk < budget + chunk


@settings(deadline=None)
@given(context=tokens, count=st.integers(1, 10_000))
def test_a_count_is_that_many_tokens_in_whole_chunks_at_any_context(context, count):
    spec = KVSpec(index="min-max", budget=count, chunk=16)
    assert int(spec.budget_tokens(np.asarray(context))) == count
    assert count <= int(spec.budget_chunks(np.asarray(context))) * 16 < count + 16


@pytest.mark.parametrize("budget", [None, 0.1, 300])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_budgets_of_an_array_are_int64_of_its_shape(budget, shape):
    spec = KVSpec(index="chunk-mean", budget=budget)
    contexts = np.full(shape, 40_000)
    for result in (spec.budget_tokens(contexts), spec.budget_chunks(contexts)):
        assert np.shape(result) == shape
        assert np.asarray(result).dtype == np.int64


def test_without_an_index_everything_is_selected():
    assert KVSpec(keys="low-rank").budget_tokens(np.array([3, 70_000])).tolist() == [3, 70_000]
    assert KVSpec(keys="low-rank").attended_tokens(70_000) == 70_000


@pytest.mark.parametrize(
    ("spec", "seals"),
    [
        (KVSpec(), False),
        (KVSpec(chunk=16, local=64), False),
        (KVSpec(keys="low-rank"), True),
        (KVSpec(index="min-max"), True),
        (KVSpec(place="host"), True),
    ],
)
def test_only_the_dense_attended_policy_on_the_device_never_seals(spec, seals):
    assert spec.seals is seals


def test_dense_limit_is_what_stays_exact_with_the_floor_for_the_default_budget_alone():
    assert preset("shadowkv").dense_limit == 49 * 8 + 32 + 64 + 256
    assert preset("shadowkv", budget=256).dense_limit == 49 * 8 + 32 + 64
    assert preset("shadowkv", budget=0.1, outliers=0).dense_limit == 8 + 32 + 64
    assert preset("quest").dense_limit == 16 + 32 + 64 + 256


@specs
def test_sequences_up_to_the_dense_limit_attend_to_everything(spec):
    assert all(spec.attended_tokens(context) == context for context in range(1, spec.dense_limit + 1))


@specs
@settings(deadline=None)
@given(context=tokens)
def test_attended_tokens_never_exceed_the_context_and_count_every_share(spec, context):
    attended = spec.attended_tokens(context)
    assert 0 < attended <= context
    if spec.index == "none":
        assert attended == context
    elif context > spec.dense_limit:
        chunks = int(spec.budget_chunks(np.asarray(context)))
        least = min(context, spec.static_tokens + spec.local + chunks * spec.chunk)
        assert least <= attended < least + PAGE


@specs
@settings(deadline=None)
@given(length=tokens)
def test_the_exact_tail_holds_local_to_local_plus_a_page_and_fits_its_ring(spec, length):
    sealed = spec.sealed_pages(length)
    assert sealed >= 0
    tail = length - sealed * PAGE
    assert tail <= spec.ring_pages * PAGE
    if sealed:
        assert spec.local <= tail < spec.local + PAGE
    assert spec.static_pages * PAGE >= spec.static_tokens == spec.chunk * (spec.sink_chunks + spec.outliers)
    assert SINK <= spec.sink_chunks * spec.chunk < SINK + spec.chunk


@specs
@settings(deadline=None)
@given(start=tokens, more=st.integers(0, 100_000), step=st.integers(0, 500))
def test_pages_and_blocks_grow_with_the_capacity(spec, start, more, step):
    layout = layout_of(spec)
    smaller, larger = (layout.pages(start, start + grown) for grown in (more, more + step))
    for kind in ("dense", "static", "ring", "sealed"):
        assert getattr(smaller, kind) <= getattr(larger, kind)
    assert layout.blocks(smaller).within(layout.blocks(larger))


@specs
@settings(deadline=None)
@given(start=tokens, more=st.integers(0, 100_000))
def test_pages_hold_every_token_of_the_sequence(spec, start, more):
    capacity = start + more
    pages = layout_of(spec).pages(start, capacity)
    if not spec.seals or capacity <= spec.dense_limit:
        assert pages == PageCount(dense=-(-capacity // PAGE))
        return
    assert (pages.sealed + pages.ring) * PAGE >= capacity
    assert pages.static * PAGE >= spec.static_tokens
    if start > spec.dense_limit:
        assert pages.dense == 0
    else:
        assert pages.dense * PAGE >= spec.dense_limit


@specs
def test_blocks_hold_as_many_pages_of_one_kind_as_fit(spec):
    layout = layout_of(spec)
    pages = PageCount(dense=3, static=2, ring=4, sealed=17 if spec.seals else 0)
    blocks = layout.blocks(pages)
    exact, sealed = layout.exact_per_block, max(1, layout.sealed_per_block)
    assert exact * layout.exact_bytes <= layout.block_bytes
    assert sealed * layout.sealed_bytes <= layout.block_bytes
    assert blocks.device == -(-3 // exact) + -(-6 // exact) + -(-pages.sealed // sealed)
    assert blocks.host == (pages.sealed if spec.place == "host" else 0)
    assert layout.blocks(PageCount()) == Blocks(0, 0)


@given(exact=st.integers(1, 4000), sealed=st.integers(1, 4000))
def test_packing_wastes_little_in_small_blocks(exact, sealed):
    count, other, size = pack(exact, sealed)
    assert count >= 1 and other >= 1
    assert size == max(count * exact, other * sealed)
    if sealed <= exact:
        # Some 1 to 8 pages come within a sixteenth of a sealed page of a whole number of them.
        assert 1 - min(count * exact, other * sealed) / size <= max(LEAST_WASTE, 1 / 8)


@pytest.mark.parametrize(("dim", "bits"), [(64, 3), (96, 4), (80, 4), (128, 3), (256, 3)])
def test_rotated_values_have_as_few_bits_as_the_head_dim_allows(dim, bits):
    shape = ModelShape(2, 8, 2, dim)
    assert preset("turbo").resolve(shape).values == f"rotated-{bits}bit"
    assert preset("turbo:values=rotated-4bit").resolve(shape).values == "rotated-4bit"


def test_turbo_pages_of_an_8b_model_fill_their_blocks():
    layout = layout_of(preset("turbo"), LLAMA, torch.bfloat16)
    assert (layout.exact_per_block, layout.sealed_per_block) == (1, 5)
    assert layout.block_bytes == 5 * layout.sealed_bytes
    assert layout.block_bytes - layout.exact_bytes < LEAST_WASTE * layout.block_bytes


@pytest.mark.parametrize("shape", [LLAMA, SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_the_papers_layout(shape, dtype):
    layout = layout_of(preset("shadowkv"), shape, dtype)
    size, heads, dim = dtype.itemsize, shape.num_kv_heads, shape.head_dim
    rank = layout.spec.rank
    exact = 2 * heads * PAGE * dim * size
    sealed = PAGE * rank * size + heads * 8 * dim * size + heads * 8  # latents, landmarks, excluded
    assert exact <= layout.exact_bytes < exact + GRANULE
    assert sealed <= layout.sealed_bytes < sealed + 48 + GRANULE
    assert layout.host_block_bytes == heads * PAGE * dim * size
    assert layout.bytes_per_block() == Blocks(
        shape.num_layers * layout.block_bytes, shape.num_layers * layout.host_block_bytes
    )
    chunks = 2047 * 8
    entries = 2 * 257  # twice 1.56 % of the chunks of a context that ends in the middle of its last page
    row = 8 * dim * size + 2 * 4  # a chunk of values, whose it is and when it was used
    buffer = heads * (entries * row + chunks * 2 + 4)
    state = shape.num_layers * (rank * heads * dim * size + buffer)
    assert state < layout.state_bytes <= state + 80 * shape.num_layers


def test_values_are_on_the_tier_that_the_place_names_and_on_no_other():
    device, host = layout_of(preset("shadowkv", place="device")), layout_of(preset("shadowkv"))
    assert "values" in {field.name for field in device.sealed_fields}
    assert device.host_fields == ()
    assert device.host_block_bytes == 0
    assert "values" not in {field.name for field in host.sealed_fields}
    assert [field.name for field in host.host_fields] == ["values"]
    coded = layout_of(preset("turbo-host"))
    assert [field.name for field in coded.host_fields] == ["values"]
    assert "value_scale" in {field.name for field in coded.sealed_fields}  # 2 bytes a token are not worth a bus


def entries_of(spec: KVSpec, max_model_len: int, fetch_buffer: float) -> int:
    spec = spec.resolve(SMALL)
    layout = Layout(spec, SMALL, torch.bfloat16, build_parts(spec, SMALL, torch.bfloat16), max_model_len, fetch_buffer)
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
    assert (layout.sealed_fields, layout.host_fields, layout.state_bytes) == ((), (), 0)
    assert layout.block_bytes == layout.exact_bytes
    assert layout.pages(100, 129) == PageCount(dense=3)


def test_a_block_is_large_enough_for_either_kind_of_page():
    layout = layout_of(KVSpec(index="chunk-mean", chunk=1))  # as many landmarks as keys
    assert layout.sealed_bytes > layout.exact_bytes
    assert layout.block_bytes >= layout.sealed_bytes
    assert layout.sealed_per_block >= 1


def test_blocks_add_subtract_and_compare_tier_by_tier():
    a, b = Blocks(5, 2), Blocks(3, 4)
    assert a + b == Blocks(8, 6)
    assert a - b == Blocks(2, -2)
    assert not a.within(b)
    assert not b.within(a)
    assert a.within(a)
    assert Blocks(3, 2).within(a)


def test_query_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ValueError, match=r"10.*3"):
        ModelShape(1, 10, 3, 64)
    assert (SMALL.group, SMALL.kv_dim) == (3, 192)
