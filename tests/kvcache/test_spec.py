"""KVSpec and the presets."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.kvcache.parts import resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE, SINK, KVSpec
from shadowkv.kvcache.presets import PRESETS, preset

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


@pytest.mark.parametrize(
    ("heads", "dim", "rank"),
    [
        (8, 128, 160),
        (4, 128, 96),
        (8, 64, 96),
        (3, 64, 96),
        (1, 128, 128),
        (7, 72, 256),
        (9, 64, 96),
        (2, 64, 64),
        (32, 128, 640),
    ],
)
def test_default_rank_is_5_of_32_but_half_of_small_widths_and_all_of_one_head_in_steps_of_32(heads, dim, rank):
    assert resolve(KVSpec(keys="low-rank"), ModelShape(1, heads, heads, dim)).as_dict()["rank"] == rank


def test_resolving_keeps_what_was_chosen_and_leaves_other_keys_without_a_rank():
    assert resolve(KVSpec(keys="low-rank", settings={"rank": 7}), LLAMA).as_dict()["rank"] == 7
    assert "rank" not in resolve(KVSpec(keys="dense"), LLAMA).as_dict()
    spec = resolve(preset("shadowkv"), LLAMA)
    assert spec == resolve(spec, LLAMA)
    assert replace(spec, settings={}, min_budget=None) == PRESETS["shadowkv"]


def test_every_reason_is_listed_at_once():
    spec = KVSpec("k?", "i?", "v?", "p?", budget=1.5, chunk=7, outliers=-1, local=0, settings={"rank": 3})
    with pytest.raises(ValueError) as error:
        resolve(spec, LLAMA)
    text = str(error.value)
    for reason in ("'k?'", "'i?'", "'v?'", "'p?'", "budget=1.5", "chunk=7", "outliers=-1", "local=0"):
        assert reason in text, reason
    assert text.count("\n  - ") >= 8
    assert "low-rank" in text  # the names that are known
    assert "chunk-mean" in text


def test_parts_give_their_reasons_beside_a_name_that_is_unknown():
    with pytest.raises(ValueError, match=r"'i\?'(?s:.*)rank=0 must be at least 1"):
        resolve(KVSpec("low-rank", "i?", "dense", settings={"rank": 0}), LLAMA)


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
        {"key_groups": 0},
        {"key_groups": 9},
        {"keys": "fp8", "rank": None, "key_groups": 0},
        {"budget": 0.0},
        {"budget": -0.5},
        {"budget": 1.0001},
        {"budget": float("nan")},
        {"budget": 0},
        {"budget": -64},
        {"budget": None, "min_budget": 0},
        {"min_budget": 640},
        {"mass": 0.0},
        {"mass": 1.0},
        {"mass": float("nan")},
        {"mass": 0.5, "index": "sketch"},
        {"mass": 0.5, "index": "recent"},
        {"mass": 0.5, "index": "votes"},
        {"index": "none"},
        {"budget": None, "outliers": 0, "min_budget": 640, "index": "none"},
        {"index": "exact"},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_for_that_reason_alone(change):
    good = resolve(KVSpec("low-rank", "chunk-mean", budget=0.5, outliers=4, settings={"rank": 100}), LLAMA)
    good = replace(good, place="host")
    assert resolve(good, LLAMA) == good
    with pytest.raises(ValueError) as error:
        resolve(good.changed(**change), LLAMA)
    assert str(error.value).count("\n  - ") == 1
    assert str(list(change.values())[-1]) in str(error.value)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("budget", [None, 1, 4096, 1.0, 1e-6])
def test_what_can_be_is_accepted(chunk, budget):
    resolve(KVSpec("low-rank", "min-max", budget=budget, chunk=chunk, settings={"rank": 1024}), LLAMA)


def test_a_spec_is_a_value():
    assert preset("quest") == preset("quest")
    assert hash(KVSpec()) == hash(KVSpec())
    with pytest.raises(FrozenInstanceError):
        KVSpec().chunk = 4  # type: ignore[misc]


def test_presets_are_the_papers():
    assert preset("full") == KVSpec()
    ours = resolve(preset("shadowkv"), LLAMA)
    assert (ours.keys, ours.index, ours.place) == ("low-rank", "chunk-mean", "host")
    assert (ours.as_dict()["rank"], ours.chunk, ours.outliers, ours.local) == (160, 8, 48, 4 * 8)
    quest = preset("quest")
    assert (quest.keys, quest.index, quest.place, quest.chunk) == ("dense", "min-max", "device", 16)


def test_overrides_of_a_preset_replace_all_but_none():
    assert preset("shadowkv", rank=None, budget=None, outliers=0) == replace(PRESETS["shadowkv"], outliers=0)
    assert preset("quest", budget=512, chunk=8) == replace(PRESETS["quest"], budget=512, chunk=8)
    with pytest.raises(ValueError, match=r"'nope'.*full.*shadowkv.*quest"):
        preset("nope")
    with pytest.raises(ValueError, match="depth=3 has no meaning with keys='dense'"):
        resolve(preset("full", depth=3), LLAMA)


def test_fields_may_follow_a_presets_name():
    found = preset("turbo:chunk=8,values=dense,budget=0.03")
    assert found == replace(PRESETS["turbo"], chunk=8, values="dense", budget=0.03)
    assert preset("quest:budget=2048,mass=0.9,place=host", chunk=8) == replace(
        PRESETS["quest"], budget=2048, place="host", chunk=8, settings={"mass": 0.9}
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
        ("turbo:budget=0", ["budget=0 must be", "(0, 1]", "at least 1"]),
        (
            "turbo:budget=1.5,chunk=7,skip_layers=-1",
            ["budget=1.5 must be", "chunk=7 does not divide", "skip_layers=-1"],
        ),
        ("turbo:keys.rank=0,sampled=1.0", ["rank=0 must be at least 1", "sampled=1.0 must be in [0, 1)"]),
        ("turbo:index=magic,depth=3,rank=x", ["'magic'", "chunk-mean", "'depth'", "local", "rank='x'"]),
    ],
)
def test_policies_that_cannot_be_read_are_told_with_what_is_known(text, said):
    with pytest.raises(ValueError) as error:
        preset(text)
    assert all(word in str(error.value) for word in said), error.value


@pytest.mark.parametrize("name", ["shadowkv", "quest", "turbo-host"])
def test_default_budget_is_a_64th_of_the_context_but_at_least_960_tokens(name):
    contexts = np.array([1, 1000, 16384, 16385, 61440, 124928, 1_000_000])
    assert preset(name).budget_tokens(contexts).tolist() == [960, 960, 960, 960, 960, 1952, 15625]


def test_default_budget_for_single_tokens_of_a_sketch_is_two_thirds_of_that():
    contexts = np.array([1, 1000, 61440, 61441, 124928, 1_000_000])
    assert preset("turbo").budget_tokens(contexts).tolist() == [640, 640, 640, 641, 1302, 10417]


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
    ("spec", "compresses"),
    [
        (KVSpec(), False),
        (KVSpec(chunk=16, local=64), False),
        (KVSpec(keys="low-rank"), True),
        (KVSpec(index="min-max"), True),
        (KVSpec(place="host"), True),
    ],
)
def test_only_the_dense_attended_policy_on_the_device_never_compresses(spec, compresses):
    assert spec.compresses is compresses


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
    if spec.index == "none" or spec.drafts:
        assert attended == context
    elif context > spec.dense_limit:
        chunks = int(spec.budget_chunks(np.asarray(context)))
        least = min(context, spec.static_tokens + spec.local + chunks * spec.chunk)
        assert least <= attended < least + PAGE


@specs
@settings(deadline=None)
@given(length=tokens)
def test_the_exact_tail_holds_local_to_local_plus_a_page_and_fits_its_ring(spec, length):
    compressed = spec.compressed_pages(length)
    assert compressed >= 0
    tail = length - compressed * PAGE
    assert tail <= spec.ring_pages * PAGE
    if compressed:
        assert spec.local <= tail < spec.local + PAGE
    assert spec.static_pages * PAGE >= spec.static_tokens == spec.chunk * (spec.sink_chunks + spec.outliers)
    assert SINK <= spec.sink_chunks * spec.chunk < SINK + spec.chunk


@pytest.mark.parametrize(
    ("heads", "dim", "bits"), [(8, 64, 3), (4, 128, 3), (2, 256, 3), (6, 96, 4), (8, 80, 4), (7, 64, 4), (2, 128, 4)]
)
def test_rotated_values_have_3_bits_where_the_head_dim_allows_it_and_keys_are_wide(heads, dim, bits):
    shape = ModelShape(2, heads, heads, dim)
    for name in ("turbo", "turbo-host"):
        assert resolve(preset(name), shape).values == f"rotated-{bits}bit"
        for values in ("rotated-3bit", "rotated-4bit")[dim % 64 > 0 :]:
            assert resolve(preset(name, values=values), shape).values == values


@pytest.mark.parametrize(
    ("kv", "wide", "narrow"),
    [
        ("turbo", 640, 1280),
        ("turbo:keys=dense,values=dense", 640, 1280),
        ("turbo:min_budget=700", 700, 700),
        ("turbo:chunk=8", 960, 960),
        ("turbo-host", 960, 960),
        ("exact-top-k", 960, 960),
        ("full-speculative", 640, 640),
        ("full-speculative:drafts=false", 640, 1280),
    ],
)
def test_a_sketch_that_finds_tokens_selects_twice_the_minimum_of_narrow_keys_except_for_drafts(kv, wide, narrow):
    for heads, least in ((4, wide), (3, narrow)):
        shape = ModelShape(2, 12, heads, 128)
        spec = resolve(preset(kv), shape)
        assert spec.min_budget == least
        assert f"at least {least} tokens" in spec.describe_budget()
        assert spec.budget_tokens(np.array([1, 16_000, 2_000_000]))[:2].tolist() == [least, least]
        assert spec.budget_tokens(np.array(2_000_000)) == preset(kv).budget_tokens(np.array(2_000_000))
        assert resolve(spec, shape) == spec


@pytest.mark.parametrize("budget", [0.005, 700])
def test_a_given_budget_has_no_minimum(budget):
    for shape in (LLAMA, SMALL):
        spec = resolve(preset("turbo", budget=budget), shape)
        assert spec.min_budget is None and resolve(spec, shape) == spec
        assert spec.budget_tokens(np.array(20_000)) == max(100, budget)


def test_query_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ValueError, match=r"10.*3"):
        ModelShape(1, 10, 3, 64)
    assert (SMALL.group, SMALL.kv_dim) == (3, 192)
