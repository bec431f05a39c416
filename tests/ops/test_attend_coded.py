"""Attention over all tokens in their coded form against attention over what the codes stand for."""

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from devices import DEVICE, INTERPRETED, ON_GPU, TRITON_RUNS
from ragged_rows import with_rows
from torch import Tensor
from whole_levels import with_whole_levels

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import cuda, reference
from shadowkv.ops.attend_coded.selected import EveryChunk
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows
from shadowkv.ops.case import Case
from shadowkv.ops.rotations import random_rotation

BACKENDS: list[ModuleType] = [] if INTERPRETED else [reference]
cpu = EveryChunk("cpu")
if not ON_GPU and not INTERPRETED and not cpu.missing():
    BACKENDS.append(cpu)
PAGES = 5
"""Pages of a row."""

kernel: ModuleType | None = None

if TRITON_RUNS:
    from shadowkv.ops.attend_coded import triton

    kernel = triton
    BACKENDS.append(kernel)
    if ON_GPU and not cuda.missing():
        BACKENDS.append(cuda)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are longer than the reference decodes at a time, and shared by thread blocks of the kernel."""
    monkeypatch.setattr(reference, "DECODED_AT_ONCE", 2)
    if kernel is not None:
        monkeypatch.setattr(kernel, "MIN_PAGES", 2)


ENDS = [0, 1, 63, 64, 65, 64 * PAGES]


class Stored:
    """Stored rows with the lengths in ``ENDS``. Data that no row reads is poisoned.

    Attributes:
        rows: [B, H, n, d], the rows before they were coded.
        source: the stored rows.
    """

    def __init__(self, name: str, heads: int, dim: int, chunk: int, rope: RopeConfig | None = None) -> None:
        batch, self.end = len(ENDS), torch.tensor(ENDS, device=DEVICE)
        self.rows = torch.randn(batch, heads, 64 * PAGES, dim, device=DEVICE)
        pages = torch.randperm(2 * batch * PAGES, device=DEVICE)[: batch * PAGES].view(batch, PAGES)
        shape = (2 * batch * PAGES, heads, 64)
        tile = ROW_CODECS[name].tile if name != "rows" else 1
        unread = torch.arange(64 * PAGES, device=DEVICE) // tile * tile >= self.end[:, None]
        states, mean, first = torch.randperm(2 * batch, device=DEVICE)[:batch], None, None
        stored = self.rows
        if rope is not None:
            rotary = RotaryTables(rope, 64 * (PAGES + 9), DEVICE)
            mean = torch.full((2 * batch, heads, dim), torch.nan, device=DEVICE)
            mean[states] = 3 * torch.randn(batch, heads, dim, device=DEVICE)
            first = 64 * torch.arange(batch, device=DEVICE)
            positions = first[:, None] + torch.arange(64 * PAGES, device=DEVICE)
            rope_mean = apply_rope(mean[states][:, None].expand(-1, 64 * PAGES, -1, -1), positions, rotary)
            self.rows = self.rows + rope_mean.transpose(1, 2)
        if name == "rows":
            poisoned = self.rows.masked_fill(unread[:, None, :, None], torch.nan)
            self.source: DenseRows | CodedRows = DenseRows(self._paged(poisoned, pages, shape, chunk), pages)
            return
        codec = ROW_CODECS[name]
        rotation = codec.rotation_matrix(dim, "keys").to(DEVICE) if codec.rotated else None
        state = codec.fit(stored.transpose(1, 2).flatten(0, 1))
        codes, scale = codec.encode(stored, rotation, tuple(x[None, :, None] for x in state))
        scale = scale.masked_fill(unread[:, None, :, None], torch.nan)
        own = pages.flatten()[torch.randperm(pages.numel(), device=DEVICE)].view_as(pages) if chunk == 8 else pages
        coded = self._paged(codes, pages, shape, chunk), self._paged(scale, own, shape, chunk).flatten(2, 3)
        learned = tuple(torch.full((2 * batch, *x.shape), torch.nan, device=DEVICE) for x in state)
        for of_states, x in zip(learned, state, strict=True):
            of_states[states] = x
        self.source = CodedRows(*coded, codec, dim, rotation, pages, own if chunk == 8 else None, learned, states)
        if rope is not None:
            assert mean is not None and first is not None
            self.source = CentredKeys(**vars(self.source), mean=mean, first=first, rotary=rotary)

    def _paged(self, rows: Tensor, pages: Tensor, shape: tuple[int, ...], chunk: int) -> Tensor:
        """[N, H, C, c, x] of [B, H, n, x], the other pages NaN or 255."""
        nothing = torch.nan if rows.is_floating_point() else 255
        store = torch.full((*shape, rows.shape[-1]), nothing, dtype=rows.dtype, device=DEVICE)
        store[pages] = rows.unflatten(2, (PAGES, 64)).transpose(1, 2)
        return store.unflatten(2, (-1, chunk))

    def decoded(self, backend: ModuleType) -> Tensor:
        """The rows as a backend decodes them, [B, H, n, d]."""
        whole = backend is cuda and isinstance(self.source, CodedRows)
        source = with_whole_levels(self.source) if whole else self.source
        chunk = (source.rows if isinstance(source, DenseRows) else source.codes).shape[3]
        heads = self.rows.shape[1]
        every = torch.arange(64 * PAGES // chunk, device=DEVICE).expand(len(ENDS), heads, -1)
        return gather_selected(source, every).float()


def plain(q: Tensor, keys: Tensor, values: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, a row and a head at a time."""
    outs, sums = torch.zeros_like(q, dtype=torch.float64), q.new_full(q.shape[:2], -math.inf, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for row, head in torch.cartesian_prod(torch.arange(len(q)), torch.arange(q.shape[1])).tolist():
        span = slice(int(begin[row]), int(end[row]))
        k, v = (x[row, head // group, span].double() for x in (keys, values))
        if len(k):
            scores = k @ q[row, head].double() / q.shape[2] ** 0.5
            outs[row, head], sums[row, head] = scores.softmax(0) @ v, scores.logsumexp(0)
    return outs, sums


def assert_both_close(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], atol: float, rtol: float = 1e-5
) -> None:
    """Outputs and log-sum-exps against float64."""
    for x, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), exact, atol=atol, rtol=rtol)


TURNS = RopeConfig(64, theta=500000.0)
WIDE = RopeConfig(128, theta=500000.0)
CASES = [
    ("rotated-4bit", "rotated-4bit", 64, 3, 8, None),
    ("rotated-3bit", "rotated-2bit", 128, 3, 1, None),
    ("rotated-2bit", "rows", 96, 3, 8, None),
    ("rows", "rotated-3bit", 64, 3, 16, None),
    ("lloyd-4bit", "lloyd-3bit", 64, 3, 8, TURNS),
    ("lloyd-8bit", "lloyd-2bit", 96, 3, 8, None),
    ("rotated-3bit", "rows", 64, 3, 8, replace(TURNS, rotary_dim=32, interleaved=True)),
    ("rotated-4bit", "rotated-4bit", 64, 3, 8, replace(TURNS, scaling="yarn", factor=4.0, original_max_position=2048)),
    ("lloyd-3bit", "lloyd-3bit", 128, 5, 1, None),
    ("fp8", "lloyd-4bit", 96, 3, 8, None),
    ("fp8", "fp8", 64, 3, 8, TURNS),
    ("tq3_0", "tq3_0", 64, 3, 8, None),
    ("tq3_0", "tq3_0", 96, 3, 1, RopeConfig(96)),
    ("polar-int4", "polar-int4", 64, 3, 1, TURNS),
    ("polar-int4", "polar-int4", 96, 3, 8, None),
    ("kvarn-4bit", "kvarn-2bit", 64, 3, 8, None),
    ("kvarn-4bit", "kvarn-2bit", 128, 3, 1, None),
    ("rows", "vq-4x256", 64, 3, 8, None),
]
OF_CUDA = [
    ("lloyd-4bit", "lloyd-4bit", 128, 4, 8, None),
    ("lloyd-2bit", "lloyd-2bit", 128, 1, 8, None),
    ("lloyd-4bit", "lloyd-3bit", 128, 8, 8, WIDE),
    ("lloyd-3bit", "lloyd-4bit", 128, 5, 1, replace(WIDE, rotary_dim=64, interleaved=True)),
    ("lloyd-2bit", "lloyd-3bit", 128, 2, 8, replace(WIDE, scaling="yarn", factor=4.0, original_max_position=2048)),
]
PAIRS = [("polar-int4", "polar-int4"), ("kvarn-4bit", "kvarn-2bit"), ("tq3_0", "tq3_0")]
"""Formats that the CUDA kernel has besides those of lloyd codecs."""
OF_CUDA += [
    (*pair, 128, group, chunk, rope)
    for pair in PAIRS
    for group, chunk, rope in ((1, 8, None), (4, 1, None), (8, 8, None), (4, 8, WIDE))
]
EVERY = pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.__name__.rpartition(".")[2])
SPLIT = pytest.mark.parametrize(
    ("backend", "splits"),
    [(backend, splits) for backend in BACKENDS for splits in ((1, 3) if backend is cuda else (1,))],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else None,
)
"""Backends, and for CUDA the number of parts into which rows are split."""


def serves(backend: ModuleType, keys: str, values: str, dim: int, rope: RopeConfig | None) -> bool:
    """Whether a backend supports a case."""
    ids = [0 if name == "rows" else int(ROW_CODECS[name].id) for name in (keys, values)]
    case = Case(
        frozenset({"attend_coded"}), torch.float32, dim, 6, 2, dim if rope is None else rope.dim,
        key_codec=ids[0], value_codec=ids[1], centred=rope is not None,
    )  # fmt: skip
    return not getattr(backend, "supports", lambda case: [])(case)


def stored_for(backend: ModuleType, rope: RopeConfig) -> tuple[Stored, Stored, Tensor]:
    """Centred keys, values and six queries in a format that a backend supports."""
    name, dim = ("lloyd-4bit", 128) if backend is cuda else ("rotated-4bit", 64)
    q = torch.randn(len(ENDS), 6, dim, device=DEVICE)
    return Stored(name, 2, dim, 1, replace(rope, head_dim=dim)), Stored(name, 2, dim, 1), q


@EVERY
@pytest.mark.parametrize(
    ("keys", "values", "dim", "group", "chunk", "rope"), CASES + OF_CUDA * (not INTERPRETED), ids=str
)
def test_attention_is_that_of_the_decoded_rows(
    backend: ModuleType, keys: str, values: str, dim: int, group: int, chunk: int, rope: RopeConfig | None, seed: int
) -> None:
    if not serves(backend, keys, values, dim, rope):
        pytest.skip("not one of the backend's formats")
    heads = 2
    stored, weighed = Stored(keys, heads, dim, chunk, rope), Stored(values, heads, dim, chunk)
    q = torch.randn(len(ENDS), heads * group, dim, device=DEVICE)
    begin, end = torch.tensor([0, 0, 8, 0, 64, 16], device=DEVICE) // chunk * chunk, stored.end // chunk * chunk
    found = backend.attend_coded(q, stored.source, weighed.source, begin, end)
    expected = plain(q, stored.decoded(backend), weighed.decoded(backend), begin, end)
    # In CUDA queries and weights have 16 bits, and the mean key's cosines and sines are float16.
    error = 2e-5 if backend is not cuda else 2e-4 if rope is None else 4e-3
    assert_both_close(found, expected, error)


@EVERY
@pytest.mark.parametrize(("keys", "values", "rope"), [("rows", "rows", None), ("fp8", "lloyd-4bit", TURNS)])
@pytest.mark.parametrize("counts", [[1, 4, 0, 3], [9, 2], [40]], ids=str)
def test_rows_of_a_sequence_attend_as_rows_for_themselves(
    backend: ModuleType, keys: str, values: str, rope: RopeConfig | None, counts: list[int], seed: int
) -> None:
    """Up to more rows than the kernel takes together."""
    if not serves(backend, keys, values, 64, rope):
        pytest.skip("not one of the backend's formats")
    stored, weighed = Stored(keys, 2, 64, 1, rope), Stored(values, 2, 64, 1)
    q, begin = torch.randn(len(ENDS), 6, 64, device=DEVICE), torch.tensor([0, 0, 8, 0, 64, 16], device=DEVICE)
    args = with_rows((q, stored.source, weighed.source, begin, stored.end), counts)
    expected = tuple(x.double() for x in backend.attend_coded(*args[:-1]))
    assert_both_close(backend.attend_coded(*args), expected, 2e-5)


@pytest.mark.skipif(INTERPRETED, reason="slow")
@SPLIT
def test_a_long_row_of_centred_keys(
    backend: ModuleType, splits: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Long enough for every warp of the CUDA kernel to take several pages in turn, whatever they are split into."""
    monkeypatch.setattr(cuda, "splits", lambda *_: splits)
    monkeypatch.setattr(sys.modules[__name__], "PAGES", 50)
    monkeypatch.setattr(sys.modules[__name__], "ENDS", [64 * 50 - 7])
    stored, weighed = Stored("lloyd-4bit", 1, 128, 1, WIDE), Stored("lloyd-3bit", 1, 128, 1)
    q, begin = torch.randn(1, 4, 128, device=DEVICE), torch.tensor([70], device=DEVICE)
    found = backend.attend_coded(q, stored.source, weighed.source, begin, stored.end)
    expected = plain(q, stored.decoded(backend), weighed.decoded(backend), begin, stored.end)
    assert_both_close(found, expected, 4e-3, rtol=0)


@pytest.mark.skipif(INTERPRETED, reason="slow")
@SPLIT
@pytest.mark.parametrize("pages", [1, 7, 75])
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_rows_of_any_number_of_pages(
    backend: ModuleType, keys: str, values: str, splits: int, pages: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Ragged ones, for warps that take many pages in turn or none; what is written to holds NaN before."""
    if not serves(backend, keys, values, 128, None):
        pytest.skip("not one of the backend's formats")
    monkeypatch.setattr(cuda, "splits", lambda *_: splits)
    monkeypatch.setattr(sys.modules[__name__], "PAGES", pages)
    monkeypatch.setattr(sys.modules[__name__], "ENDS", [64 * pages, 64 * pages - 9, 0, min(130, 64 * pages)])
    stored, weighed = Stored(keys, 2, 128, 1), Stored(values, 2, 128, 1)
    q, begin = torch.randn(4, 10, 128, device=DEVICE), torch.tensor([0, 41, 0, 3], device=DEVICE)
    expected = plain(q, stored.decoded(backend), weighed.decoded(backend), begin, stored.end)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kind: torch.full_like(x, torch.nan, **kind))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **kind: x.new_full(shape, torch.nan, **kind))
    assert_both_close(backend.attend_coded(q, stored.source, weighed.source, begin, stored.end), expected, 2e-4)


@EVERY
def test_sixteen_bit_queries_are_no_further_off_than_twice_the_reference(backend: ModuleType, seed: int) -> None:
    stored, weighed, q = stored_for(backend, TURNS)
    q, begin = q.bfloat16(), torch.zeros_like(stored.end)
    found, exact, low = (
        op.attend_coded(x, stored.source, weighed.source, begin, stored.end)[0].double()
        for op, x in ((backend, q), (reference, q.float()), (reference, q))
    )
    assert found.dtype == torch.float64 and (found - exact).norm() <= 2 * (low - exact).norm()


@EVERY
def test_positions_may_end_where_rows_do(backend: ModuleType, seed: int) -> None:
    """A short row far behind has as wide a page table as the longest."""
    stored, weighed, q = stored_for(backend, TURNS)
    begin = torch.zeros_like(stored.end)
    assert isinstance(stored.source, CentredKeys)
    keys = replace(stored.source, first=stored.source.first.flip(0))
    wanted = backend.attend_coded(q, keys, weighed.source, begin, stored.end)
    ending = replace(keys, rotary=RotaryTables(keys.rotary.config, int((keys.first + stored.end).max()), DEVICE))
    found = backend.attend_coded(q, ending, weighed.source, begin, stored.end)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", [x for x in BACKENDS if x is not cuda], ids=lambda x: x.__name__.rpartition(".")[2])
def test_small_values_of_little_weight_count_beside_a_large_one(backend: ModuleType, seed: int) -> None:
    """One token has e^11 times the weight of each of the others, and the value 0."""
    keys = torch.zeros(1, 1, 64, 1, 64, device=DEVICE).bfloat16()
    keys[:, :, 7], q = 1, torch.full((1, 1, 64), 11 / 8, device=DEVICE).bfloat16()
    rows, rotation = 0.02 * torch.randn(1, 1, 64, 64, device=DEVICE), random_rotation(64, "values").to(DEVICE)
    rows[:, :, 7] = 0
    codec, pages = ROW_CODECS["rotated-4bit"], torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    codes, scale = codec.encode(rows, rotation)
    source = CodedRows(codes.unflatten(2, (64, 1)), scale, codec, 64, rotation, pages)
    begin, end = torch.tensor([[0], [64]], device=DEVICE)
    out, _ = backend.attend_coded(q, DenseRows(keys, pages), source, begin, end)
    expected = codec.decode(codes, scale, rotation, 64)[0].sum(1) / (math.exp(11) + 63)
    assert (out[0].float() - expected).norm() < 0.01 * expected.norm()


def paged(rows: Tensor, name: str, codec_name: str = "lloyd-4bit") -> CodedRows:
    """Rows [1, 1, n, d] of one head in whole pages, in order."""
    codec = ROW_CODECS[codec_name].for_axis(name)
    rotation = codec.rotation_matrix(rows.shape[3], name).to(DEVICE)
    codes, scale = (x.unflatten(2, (-1, 64)).squeeze(0).transpose(0, 1) for x in codec.encode(rows, rotation))
    pages = torch.arange(len(codes), device=DEVICE)[None]
    return CodedRows(codes.unflatten(2, (64, 1)).contiguous(), scale.contiguous(), codec, 128, rotation, pages)


@EVERY
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_long_tail_of_equal_little_weights_counts(backend: ModuleType, size: float, seed: int) -> None:
    """One token has e^11 times the weight of each of all others, and a value of the same size, or 0."""
    tokens = 512 if INTERPRETED else 4096
    keys, values = torch.zeros(1, 1, tokens, 128, device=DEVICE), 0.5 + torch.randn(1, 1, tokens, 128, device=DEVICE)
    q = torch.randn(1, 1, 128, device=DEVICE)
    keys[:, :, 77] = q * (11 * 128**0.5 / q.square().sum())
    values[:, :, 77] *= size
    stored, weighed = paged(keys, "keys"), paged(values, "values")
    begin, end = torch.tensor([[0], [tokens]], device=DEVICE)
    found = backend.attend_coded(q, stored, weighed, begin, end)
    exact = [x.codec.decode(x.codes.flatten(1, 3), x.scale.flatten(1, 2), x.rotation, 128) for x in (stored, weighed)]
    assert_both_close(found, plain(q, *(x.flatten(0, 1)[None, None] for x in exact), begin, end), 2e-4, rtol=0)


@EVERY
@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("pair", [("lloyd-4bit", "lloyd-4bit"), *PAIRS], ids=str)
def test_a_number_of_a_token_that_is_none_shows(
    backend: ModuleType, pair: tuple[str, str], axis: str, seed: int
) -> None:
    if not serves(backend, *pair, 128, None):
        pytest.skip("not one of the backend's formats")
    names = dict(zip(("keys", "values"), pair, strict=True))
    rows = {side: paged(torch.randn(1, 1, 192, 128, device=DEVICE), side, name) for side, name in names.items()}
    if pair[0] == "tq3_0":
        rows[axis].codes[1, 0, 9, 0, 26:28] = torch.tensor([0, 0x7E])  # the scale of a block
    else:
        rows[axis].scale[1, 0, 9, 0] = torch.nan
    q, (begin, end) = torch.randn(1, 3, 128, device=DEVICE), torch.tensor([[0], [192]], device=DEVICE)
    out, lse = backend.attend_coded(q, rows["keys"], rows["values"], begin, end)
    of_block = axis == "values" and pair[0] == "tq3_0"  # rotated back by itself
    assert (out[..., 32:64] if of_block else out).isnan().all() and (axis == "values" or lse.isnan().all())
    out, lse = backend.attend_coded(q, rows["keys"], rows["values"], begin + 80, end)
    assert out.isfinite().all() and lse.isfinite().all()
