"""Attention over selected chunks in C++ against the reference: forms, dtypes, ragged selections, bad arguments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from devices import by_threads, threads
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formulas import assert_close
from selected_case import Case

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cpu
from shadowkv.ops.attend_selected.sources import DenseRows, LatentKeys
from shadowkv.ops.case import Case as OpsCase
from shadowkv.ops.extension import cpu_missing

pytestmark = pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")


def check(case: Case) -> None:
    """Results in float32 against the reference in float64."""
    for found, exact in zip(cpu.attend_selected(*case.arguments), case.exact(), strict=True):
        assert_close(found, exact, atol=1e-4, rtol=1e-4)


ROPES = [
    {},
    {"rotary_dim": 32},
    {"rotary_dim": 32, "interleaved": True},
    {"scaling": "yarn", "factor": 4.0, "original_max_position": 64},
]
FORMS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 6),
        "dim": st.sampled_from([64, 128, 256]),
        "chunk": st.sampled_from([1, 2, 4, 8, 16, 32]),
        "keys": st.sampled_from(["rows", "3", "low-rank", "low-rank-int8", "low-rank-int4"]),
        "rank": st.integers(2, 80),
        "values": st.sampled_from(["rows", "4", "3", "2"]),
        "buffered": st.booleans(),
        "sampled": st.booleans(),
        "rope": st.sampled_from(ROPES),
    }
)


@settings(max_examples=150, deadline=None)
@given(form=FORMS, seed=st.integers(0, 2**32 - 1))
def test_float32_is_the_reference(form: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    check(Case(**form))


@settings(max_examples=50, deadline=None)
@given(form=FORMS, seed=st.integers(0, 2**32 - 1))
def test_of_bfloat16_only_the_result_is_rounded(form: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(**form, dtype=torch.bfloat16)
    out, lse = cpu.attend_selected(*case.arguments)
    exact, sums = case.exact()
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), exact, atol=1e-4, rtol=2**-8)
    assert_close(lse, sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [20, 72, 96])
def test_other_head_dims(seed: int, dim: int) -> None:
    """Not a multiple of a vector; 96 in the widths that it can have."""
    for values in ("rows", "4", "2") if dim == 96 else ("rows",):
        check(Case(dim=dim, values=values, keys="low-rank-int8"))


def test_some_of_each_dtype_together(seed: int) -> None:
    case = Case(keys="low-rank-int8", values="rows", dtype=torch.bfloat16)
    case.q = case.q.float()
    assert isinstance(case.keys, LatentKeys)
    assert case.keys.mean is not None
    case.keys = replace(case.keys, mean=case.keys.mean.float())
    check(case)


def test_pages_may_overlap_and_tables_may_be_views(seed: int) -> None:
    """Pages of a pool lie at every granule; a chunk may not be cut, and everything else may be strided."""
    case = Case(keys="rows")
    rows = torch.randn(2000)
    case.keys = case.values = DenseRows(rows.as_strided((4, 2, 8, 8, 64), (40, 8, 24, 64, 1)), case.keys.pages % 4)
    expected = cpu.attend_selected(*case.arguments)
    case.keys = replace(case.keys, pages=case.keys.pages.t().contiguous().t())
    case.selected = case.selected.transpose(0, 1).contiguous().transpose(0, 1)
    case.q = case.q.transpose(0, 2).contiguous().transpose(0, 2)
    for found, same, exact in zip(cpu.attend_selected(*case.arguments), expected, case.exact(), strict=True):
        assert torch.equal(found, same)
        assert_close(found, exact, atol=1e-4, rtol=1e-4)


def test_the_number_of_threads_changes_no_bit(seed: int) -> None:
    case = Case(batch=4, keys="low-rank-int8", values="3")
    results = by_threads(lambda: cpu.attend_selected(*case.arguments))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q", torch.float64), ("latents", torch.float16), ("basis", torch.float64), ("values", torch.float16)],
)
def test_other_dtypes_are_refused(seed: int, name: str, dtype: torch.dtype) -> None:
    case = Case()
    case.put(name, case.field(name).to(dtype))
    name = "keys" if name == "latents" else name
    with pytest.raises(RuntimeError, match=f"{name} is (Double|Half), not Float or BFloat16"):
        cpu.attend_selected(*case.arguments)


def test_codecs_that_are_unknown_are_refused_by_their_number(seed: int) -> None:
    case = Case(keys="low-rank-int8", values="4")
    before, keys, values = case.raw_arguments[:3], case.raw_arguments[3:17], case.raw_arguments[17:]
    op = torch.ops.shadowkv.attend_selected
    for codec in (-1, 19, 1000):
        with pytest.raises(RuntimeError, match=f"attend_selected on CPUs knows no codec {codec} of keys"):
            op(*before, codec, *keys[1:], *values)
        with pytest.raises(RuntimeError, match=f"attend_selected on CPUs knows no codec {codec} of values"):
            op(*before, *keys, codec, *values[1:])
    with pytest.raises(RuntimeError, match="knows no codec 17 of values"):
        op(*before, *keys, 17, *values[1:])
    case_of = {"ops": frozenset(), "dtype": torch.float32, "head_dim": 64, "num_query_heads": 2, "num_kv_heads": 2}
    supported = partial(OpsCase, **case_of, rope_dim=64)
    assert not cpu.supports(supported(key_codec=18, value_codec=3))
    assert cpu.supports(supported(key_codec=1000, value_codec=17)) == [
        "codec 1000 of keys is unknown",
        "codec 17 of values is unknown",
    ]


def test_a_nan_in_a_query_stays_in_its_head(seed: int) -> None:
    case = Case(least=1)
    case.q[0, 2, 0] = torch.nan
    with threads(1):  # whose memory the heads after it get
        out, lse = cpu.attend_selected(*case.arguments)
    broken = torch.zeros(2, 6, dtype=torch.bool)
    broken[0, 2] = True
    assert torch.equal(out.isnan().all(-1), broken)
    assert torch.equal(out.isnan().any(-1), broken)
    assert torch.equal(lse.isnan(), broken)


def test_what_is_not_selected_may_be_anywhere(seed: int) -> None:
    case = Case(keys="low-rank-int8", values="3", buffered=True)
    case.selected[0] = -1
    expected = cpu.attend_selected(*case.arguments)
    for name in ("pages", "states", "codes pages", "scale_pages", "buffer slots", "entries"):
        case.put(name, case.field(name).index_fill(0, torch.tensor(0), 1 << 40))
    for found, wanted in zip(cpu.attend_selected(*case.arguments), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("outside", [-1, 1 << 40])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pages", "page"),
        ("states", "state"),
        ("scale_pages", "page"),
        ("buffer slots", "page"),
        ("entries", "entry"),
        ("codes pages", "page"),
    ],
)
def test_what_is_selected_must_be_there(name: str, match: str, outside: int) -> None:
    case = Case(keys="low-rank-int8", values="4", buffered=name != "codes pages", least=1)
    case.put(name, torch.full_like(case.field(name), outside))
    with pytest.raises(IndexError, match=rf"{match} {outside} is not in \[0, "):
        cpu.attend_selected(*case.arguments)


@pytest.mark.parametrize("keys", ["rows", "low-rank-int8"])
def test_chunks_past_the_pages_or_the_rotation_are_refused(keys: str) -> None:
    case = Case(keys=keys)
    case.selected[1, 0, 0] = 24
    with pytest.raises(IndexError, match=r"chunk 24 is not in \[0, 24\)"):
        cpu.attend_selected(*case.arguments)
    if keys == "low-rank-int8":
        case.selected[1, 0, 0] = 8
        case.put("first", torch.zeros(2, dtype=torch.int64))
        case.put("rotary", RotaryTables(RopeConfig(64), 64 + 7))
        case.selected[case.selected > 8] = 0
        with pytest.raises(IndexError, match=r"position 71 is not in \[0, 71\)"):
            cpu.attend_selected(*case.arguments)


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("q has shape", "q", lambda x: x[0]),
        ("7 query heads are no multiple of 2", "q", lambda x: x.repeat(1, 2, 1)[:, :7]),
        ("selected has shape", "selected", lambda x: x[:1]),
        ("selected is Int, not Long", "selected", lambda x: x.int()),
        ("log_weight has shape", "log_weight", lambda x: x[:, :, 1:]),
        ("log_weight is Double, not Float", "log_weight", lambda x: x.double()),
        ("keys has shape", "latents", lambda x: x[:, :0]),
        (
            "the tokens of a chunk must lie together",
            "latents",
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        ),
        ("chunks of 7 tokens do not divide 64", "latents", lambda x: x[:, :, :7]),
        ("key_places has shape", "pages", lambda x: x[:1]),
        ("key_places is Int, not Long", "pages", lambda x: x.int()),
        ("keys of 12 elements", "basis", lambda x: x[:, 1:]),
        ("basis has shape", "basis", lambda x: x[..., 1:]),
        ("basis has strides", "basis", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
        ("mean has shape", "mean", lambda x: x[:1]),
        ("mean has strides", "mean", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
        ("key_states has shape", "states", lambda x: x[:1]),
        ("key_first has shape", "first", lambda x: x[:1]),
        ("cos has shape", "rotary", lambda x: RotaryTables(RopeConfig(128), 192)),
        ("values has shape", "codes", lambda x: x[:, :1]),
        ("values of 30 elements are none of 64 dimensions in codec 1", "codes", lambda x: x[..., :30].contiguous()),
        ("values is Char, not Byte", "codes", lambda x: x.view(torch.int8)),
        ("value_places has shape", "codes pages", lambda x: x[:1]),
        ("scale is Float, not Half", "scale", lambda x: x.float()),
        ("scale has shape", "scale", lambda x: x[:, :1]),
        ("scale_pages has shape", "scale_pages", lambda x: x[:1]),
        ("rotation has shape", "rotation", lambda x: x[:32]),
    ],
)
def test_the_binding_refuses_what_does_not_fit(match: str, name: str, change: Callable[[Any], Any]) -> None:
    case = Case(keys="low-rank-int8", values="4", sampled=True)
    case.put(name, change(case.field(name)))
    with pytest.raises(RuntimeError, match=match):
        cpu.attend_selected(*case.arguments)


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("keys of 32 elements are none of 64 dimensions in codec 0", "keys", lambda x: x[..., :32].contiguous()),
        ("values of 32 elements are none of 64 dimensions in codec 0", "values", lambda x: x[..., :32].contiguous()),
        ("values have shape", "values", lambda x: x[:, :, :, :4].contiguous()),
        ("value_places has shape", "entries", lambda x: x[..., 1:]),
        ("value_slots has shape", "buffer slots", lambda x: x[:1]),
    ],
)
def test_the_binding_refuses_exact_rows_that_do_not_fit(match: str, name: str, change: Callable[[Any], Any]) -> None:
    case = Case(keys="rows", buffered=name != "values")
    case.put(name, change(case.field(name)))
    with pytest.raises(RuntimeError, match=match):
        cpu.attend_selected(*case.arguments)


def test_the_binding_refuses_forms_of_which_a_part_is_missing() -> None:
    case = Case(keys="low-rank-int8", values="4")
    before, keys, values = case.raw_arguments[:3], case.raw_arguments[3:17], case.raw_arguments[17:]
    for match, arguments in (
        ("keys is Char, not Byte", (1, keys[1][..., :8].repeat(1, 1, 1, 1, 4), *keys[2:], *values)),
        ("basis is needed", (*keys[:7], None, *keys[8:], *values)),
        ("key_states is needed", (*keys[:9], None, *keys[10:], *values)),
        ("key_first is needed", (*keys[:10], None, *keys[11:], *values)),
        ("sin is needed", (*keys[:12], None, False, *values)),
        ("value_scale_pages is needed", (*keys, *values[:4], None, *values[5:])),
        ("value_levels is needed", (*keys, *values[:6], None, *values[7:])),
    ):
        with pytest.raises(RuntimeError, match=match):
            torch.ops.shadowkv.attend_selected(*before, *arguments)
