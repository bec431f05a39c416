"""Attention over selected chunks in C++ against the reference: forms, dtypes, ragged selections, bad arguments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formulas import assert_close
from torch import Tensor

from shadowkv.ops.attend_selected import cpu, reference
from shadowkv.ops.attend_selected.packing import quantise_rows
from shadowkv.ops.attend_selected.sources import (
    BufferedRows,
    DenseRows,
    KeySource,
    LatentKeys,
    QuantisedRows,
    ValueSource,
)
from shadowkv.ops.extension import load_cpu
from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables

pytestmark = pytest.mark.skipif(not load_cpu(), reason="the C++ extension is not built")

PAGES = 3
"""Pages of a row."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Case:
    """Random arguments; what is not selected, and what belongs to no row, is NaN."""

    def __init__(
        self,
        batch: int = 2,
        heads: int = 2,
        group: int = 3,
        dim: int = 64,
        chunk: int = 8,
        keys: str = "latents",
        rank: int = 12,
        values: str = "rows",
        buffered: bool = False,
        drawn: bool = False,
        rope: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        least: int = 0,
    ) -> None:
        self.batch, self.heads, self.dim, self.chunk = batch, heads, dim, chunk
        self.per_page, self.names = 64 // chunk, 2 * batch * PAGES
        self.selected = self._selection(least)
        self.q = torch.randn(batch, heads * group, dim).to(dtype)
        self.log_weight = torch.rand(self.selected.shape) if drawn else None
        self.slots = torch.randperm(2 * batch)[:batch]
        self.keys = self._rows(dtype) if keys == "rows" else self._latents(keys, rank, dtype, rope or {})
        self.values: ValueSource = self._rows(dtype) if values == "rows" else self._codes(int(values))
        if buffered:
            self.values = self._buffered(self.values)

    def _selection(self, least: int) -> Tensor:
        """-1s last, after so many chunks at the least."""
        count = PAGES * self.per_page
        order = torch.rand(self.batch, self.heads, count).argsort(-1)
        beyond = torch.arange(count) >= torch.randint(least, count + 1, (self.batch, self.heads, 1))
        return order.masked_fill(beyond, -1)

    def _pages(self) -> Tensor:
        return torch.randperm(self.names)[: self.batch * PAGES].view(self.batch, PAGES)

    def _used(self, pages: Tensor) -> Tensor:
        """bool [N, H, C]: what is selected where rows have these pages."""
        used = torch.zeros(self.names, self.heads, self.per_page, dtype=torch.bool)
        row, head, i = (self.selected >= 0).nonzero(as_tuple=True)
        chosen = self.selected[row, head, i]
        used[pages[row, chosen // self.per_page], head, chosen % self.per_page] = True
        return used

    def _rows(self, dtype: torch.dtype) -> DenseRows:
        pages = self._pages()
        rows = torch.randn(self.names, self.heads, self.per_page, self.chunk, self.dim)
        return DenseRows(rows.masked_fill(~self._used(pages)[..., None, None], torch.nan).to(dtype), pages)

    def _latents(self, form: str, rank: int, dtype: torch.dtype, rope: dict[str, Any]) -> LatentKeys:
        pages, slots = self._pages(), 2 * self.batch
        latents = torch.randn(self.names, self.per_page, self.chunk, rank)
        basis, mean = (
            torch.randn(slots, rank, self.heads, self.dim) / rank**0.5,
            torch.randn(slots, self.heads, self.dim),
        )
        nobody = torch.ones(slots, dtype=torch.bool).index_fill(0, self.slots, False)
        basis[nobody] = mean[nobody] = torch.nan
        if form == "int8":
            latents, basis = (40 * latents).clamp(-127, 127).to(torch.int8), basis / 40
        else:
            latents = latents.masked_fill(~self._used(pages).any(1)[..., None, None], torch.nan).to(dtype)
        rotary = RotaryTables(RopeConfig(self.dim, **rope), 64 * PAGES)
        centred = mean.to(dtype) if form == "int8" else None
        return LatentKeys(latents, basis.to(dtype), centred, self.slots, pages, rotary)

    def _codes(self, bits: int) -> QuantisedRows:
        pages, scale_pages = self._pages(), self._pages()
        rotation = torch.linalg.qr(torch.randn(self.dim, self.dim))[0]
        rows = torch.randn(self.names, self.heads, self.per_page, self.chunk, self.dim)
        codes, scale = quantise_rows(rows, rotation, bits)
        scale = scale.masked_fill(~self._used(scale_pages)[..., None], torch.nan).flatten(2)
        return QuantisedRows(codes, scale, bits, rotation, pages, scale_pages)

    def _buffered(self, source: Any) -> BufferedRows:
        rows = source.rows if isinstance(source, DenseRows) else source.codes
        count = self.selected.shape[-1] + 3
        entries = torch.rand(self.batch, self.heads, count).argsort(-1)[..., : self.selected.shape[-1]]
        entries = entries.masked_fill(self.selected < 0, -1)
        buffer = rows.new_full((2 * self.batch, self.heads, count, *rows.shape[3:]), 99)
        if rows.is_floating_point():
            buffer.fill_(torch.nan)
        row, head, i = (entries >= 0).nonzero(as_tuple=True)
        chosen = self.selected[row, head, i]
        pages = source.pages[row, chosen // self.per_page]
        buffer[self.slots[row], head, entries[row, head, i]] = rows[pages, head, chosen % self.per_page]
        return BufferedRows(source, buffer, self.slots, entries)

    def field(self, name: str) -> Any:
        """An argument, or a field of its sources, by name."""
        owner, attribute = self._place(name)
        return getattr(owner, attribute)

    def put(self, name: str, value: Any) -> None:
        """Replaces it."""
        owner, attribute = self._place(name)
        if owner is self:
            setattr(self, attribute, value)
        elif owner is self.keys:
            self.keys = replace(self.keys, **{attribute: value})
        elif owner is self.values:
            self.values = replace(self.values, **{attribute: value})
        else:
            self.values = replace(self.values, source=replace(owner, **{attribute: value}))

    def _place(self, name: str) -> tuple[Any, str]:
        stored = self.values.source if isinstance(self.values, BufferedRows) else self.values
        match name:
            case "pages" | "slots" | "latents" | "basis" | "mean" | "rotary":
                return self.keys, name
            case "keys":
                return self.keys, "rows"
            case "values":
                return stored, "rows"
            case "codes pages":
                return stored, "pages"
            case "codes" | "scale" | "scale_pages" | "rotation":
                return stored, name
            case "buffer slots" | "entries":
                return self.values, name.removeprefix("buffer ")
        return self, name

    @property
    def arguments(self) -> tuple[Tensor, KeySource, ValueSource, Tensor, Tensor | None]:
        return self.q, self.keys, self.values, self.selected, self.log_weight

    @property
    def raw_arguments(self) -> tuple[Any, ...]:
        """Those of the binding."""
        sources = *cpu._key_arguments(self.keys), *cpu._value_arguments(self.values)
        return self.q, self.selected, self.log_weight, *sources

    def exact(self) -> tuple[Tensor, Tensor]:
        """The reference on the same numbers in float64, of which coded values are decoded in float32."""
        return reference.attend_selected(
            self.q.double(), _as(self.keys), _as(self.values), self.selected, self.log_weight
        )


def _as(source: Any) -> Any:
    """The source with its rows, or its latents and what they are multiplied by, in float64."""
    match source:
        case DenseRows():
            return replace(source, rows=source.rows.double())
        case LatentKeys():
            mean = None if source.mean is None else source.mean.double()
            latents = source.latents if source.latents.dtype == torch.int8 else source.latents.double()
            return replace(source, latents=latents, basis=source.basis.double(), mean=mean)
        case BufferedRows(source=DenseRows()):
            return replace(source, rows=source.rows.double())
    return source


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
        "keys": st.sampled_from(["rows", "latents", "int8"]),
        "rank": st.integers(1, 40),
        "values": st.sampled_from(["rows", "4", "3", "2"]),
        "buffered": st.booleans(),
        "drawn": st.booleans(),
        "rope": st.sampled_from(ROPES),
    }
)


@settings(max_examples=150, deadline=None)
@given(form=FORMS, seed=st.integers(0, 2**32 - 1))
def test_float32_is_the_reference(form: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(**form)
    out, lse = cpu.attend_selected(*case.arguments)
    exact, sums = case.exact()
    assert_close(out, exact, atol=1e-4, rtol=1e-4)
    assert_close(lse, sums, atol=1e-4, rtol=1e-4)


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
        case = Case(dim=dim, values=values, keys="int8")
        for found, exact in zip(cpu.attend_selected(*case.arguments), case.exact(), strict=True):
            assert_close(found, exact, atol=1e-4, rtol=1e-4)


def test_some_of_each_dtype_together(seed: int) -> None:
    case = Case(keys="int8", values="rows", dtype=torch.bfloat16)
    case.q = case.q.float()
    assert isinstance(case.keys, LatentKeys)
    assert case.keys.mean is not None
    case.keys = replace(case.keys, mean=case.keys.mean.float())
    for found, exact in zip(cpu.attend_selected(*case.arguments), case.exact(), strict=True):
        assert_close(found, exact, atol=1e-4, rtol=1e-4)


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
    case, results = Case(batch=4, keys="int8", values="3"), []
    for count in (1, 2, 5):
        with threads(count):
            results.append(cpu.attend_selected(*case.arguments))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize(
    "changes",
    [{"q": torch.float64}, {"latents": torch.float16}, {"basis": torch.float64}, {"values": torch.float16}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_dtypes_take_the_reference(seed: int, changes: dict[str, torch.dtype]) -> None:
    case = Case(keys="int8" if "basis" in changes else "latents")
    for name, dtype in changes.items():
        case.put(name, case.field(name).to(dtype))
    for found, expected in zip(cpu.attend_selected(*case.arguments), reference.attend_selected(*case.arguments)):
        assert torch.equal(found, expected)


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
    case = Case(keys="int8", values="3", buffered=True)
    case.selected[0] = -1
    expected = cpu.attend_selected(*case.arguments)
    for name in ("pages", "slots", "codes pages", "scale_pages", "buffer slots", "entries"):
        case.put(name, case.field(name).index_fill(0, torch.tensor(0), 1 << 40))
    for found, wanted in zip(cpu.attend_selected(*case.arguments), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("outside", [-1, 1 << 40])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pages", "page"),
        ("slots", "slot"),
        ("scale_pages", "page"),
        ("buffer slots", "page"),
        ("entries", "entry"),
        ("codes pages", "page"),
    ],
)
def test_what_is_selected_must_be_there(name: str, match: str, outside: int) -> None:
    case = Case(keys="int8", values="4", buffered=name != "codes pages", least=1)
    case.put(name, torch.full_like(case.field(name), outside))
    with pytest.raises(IndexError, match=rf"{match} {outside} is not in \[0, "):
        cpu.attend_selected(*case.arguments)


@pytest.mark.parametrize("keys", ["rows", "int8"])
def test_chunks_past_the_pages_or_the_rotation_are_refused(keys: str) -> None:
    case = Case(keys=keys)
    case.selected[1, 0, 0] = 24
    with pytest.raises(IndexError, match=r"chunk 24 is not in \[0, 24\)"):
        cpu.attend_selected(*case.arguments)
    if keys == "int8":
        case.selected[1, 0, 0] = 8
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
        ("keys has shape", "latents", lambda x: x.flatten(1, 2)[:, :0, None]),
        (
            "the tokens of a chunk must lie together",
            "latents",
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        ),
        ("chunks of 7 tokens do not divide 64", "latents", lambda x: x[:, :, :7]),
        ("key_pages has shape", "pages", lambda x: x[:1]),
        ("key_pages is Int, not Long", "pages", lambda x: x.int()),
        ("basis has shape", "basis", lambda x: x[:, 1:]),
        ("basis has shape", "basis", lambda x: x[..., 1:]),
        ("basis has strides", "basis", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
        ("mean has shape", "mean", lambda x: x[:1]),
        ("mean has strides", "mean", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
        ("key_slots has shape", "slots", lambda x: x[:1]),
        ("cos has shape", "rotary", lambda x: RotaryTables(RopeConfig(128), 192)),
        ("values has shape", "codes", lambda x: x[:, :1]),
        ("codes of 30 bytes", "codes", lambda x: x[..., :30].contiguous()),
        ("codes of 8 bytes", "codes", lambda x: x[..., :8].contiguous()),
        ("value_places has shape", "codes pages", lambda x: x[:1]),
        ("scale is Float, not Half", "scale", lambda x: x.float()),
        ("scale has shape", "scale", lambda x: x[:, :1]),
        ("scale_pages has shape", "scale_pages", lambda x: x[:1]),
        ("rotation has shape", "rotation", lambda x: x[:32]),
    ],
)
def test_the_binding_refuses_what_does_not_fit(match: str, name: str, change: Callable[[Any], Any]) -> None:
    case = Case(keys="int8", values="4", drawn=True)
    case.put(name, change(case.field(name)))
    with pytest.raises(RuntimeError, match=match):
        cpu.attend_selected(*case.arguments)


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("keys have 32 dimensions, q has 64", "keys", lambda x: x[..., :32].contiguous()),
        ("values have 32 dimensions, q has 64", "values", lambda x: x[..., :32].contiguous()),
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
    case = Case(keys="int8", values="4")
    before, keys, values = case.raw_arguments[:3], case.raw_arguments[3:11], case.raw_arguments[11:]
    for match, arguments in (
        ("keys are Char, which only latents are", (*keys[:2], *[None] * 5, False, *values)),
        ("key_slots is needed", (*keys[:4], None, *keys[5:], *values)),
        ("sin is needed", (*keys[:6], None, False, *values)),
        ("scale_pages is needed", (*keys, *values[:4], None, values[5])),
        ("values have 32 dimensions, q has 64", (*keys, *values[:3], None, None, None)),
    ):
        with pytest.raises(RuntimeError, match=match):
            torch.ops.shadowkv.attend_selected(*before, *arguments)
