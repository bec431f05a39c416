"""Attention over selected chunks in CUDA against the reference in float32, on pages as the cache has them."""

import pytest
import torch
from selected_case import in_dtype
from torch import Tensor

from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.attend_selected import cuda, reference
from shadowkv.ops.attend_selected.packing import quantise_rows, row_multiple
from shadowkv.ops.attend_selected.sources import BufferedRows, DenseRows, LatentKeys, QuantisedRows
from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables

pytestmark = pytest.mark.skipif(not cuda.available(), reason="needs a CUDA device and the attend_selected library")

PAGE = 64
DEVICE = torch.device("cuda")
SHAPES = [(2, 1, 64), (3, 3, 96), (2, 4, 128), (3, 6, 64), (2, 7, 64), (1, 8, 256)]
KEYS = ("int8", "bf16")
VALUES = (
    *("4-bit codes", "3-bit codes", "2-bit codes", "rows"),
    *("buffered 4-bit codes", "buffered 3-bit codes", "buffered 2-bit codes", "buffered rows"),
)


def bits_of(values: str) -> int | None:
    """Of a code; None of rows that are none."""
    return int(values[values.index("-bit") - 1]) if "-bit" in values else None


def skip_what_has_no_kernel(keys: str, values: str, dim: int) -> None:
    """Combinations that the reference does, or that nothing does."""
    bits = bits_of(values)
    if bits is None:
        return
    if keys == "rows" or (bits < 4 and keys != "int8"):
        pytest.skip("no kernel for these keys with these values")
    if dim % row_multiple(bits):
        pytest.skip("no such codes")


def selections(tokens: list[int], heads: int, count: int, chunk: int) -> Tensor:
    """Distinct random full chunks of rows of so many tokens, ragged per head, -1s last."""
    selected = torch.full((len(tokens), heads, count), -1)
    for row, length in enumerate(tokens):
        for head in range(heads):
            most = min(count, length // chunk)
            take = most if head == 0 else int(torch.randint(0, most + 1, ()))
            selected[row, head, :take] = torch.randperm(length // chunk)[:take]
    return selected


def poisoned(x: Tensor, used: Tensor) -> Tensor:
    """Floats that no valid token reads become NaN; integers extreme. ``used`` bool over the leading dimensions."""
    junk = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    used = used.to(x.device)
    return x.masked_fill(~used.view(*used.shape, *[1] * (x.dim() - used.dim())), junk)


def buffered(values: DenseRows | QuantisedRows, selected: Tensor) -> BufferedRows:
    """The selected chunks in shuffled entries of shuffled slots; junk in all others and where they were."""
    field = "rows" if isinstance(values, DenseRows) else "codes"
    stored = getattr(values, field)
    batch, heads, count = selected.shape
    capacity = count + 7
    rows = poisoned(stored.new_zeros(batch + 2, heads, capacity, *stored.shape[3:]), torch.zeros((), dtype=torch.bool))
    slots = torch.randperm(batch + 2)[:batch].to(DEVICE)
    entries = torch.rand(batch, heads, capacity, device=DEVICE).argsort(-1)[..., :count]
    entries = entries.masked_fill(selected < 0, -1)
    b, h, i = (selected >= 0).nonzero(as_tuple=True)
    chunk = selected[b, h, i]
    pages = values.pages[b, chunk // stored.shape[2]]
    rows[slots[b], h, entries[b, h, i]] = stored[pages, h, chunk % stored.shape[2]]
    stored[values.pages.flatten()] = poisoned(stored[0], torch.zeros((), dtype=torch.bool))
    return BufferedRows(values, rows, slots, entries)


def problem(
    heads: int,
    group: int,
    dim: int,
    keys: str,
    values: str,
    *,
    tokens: list[int],
    rank: int = 64,
    chunk: int = 8,
    count: int = 21,
    mean: bool = True,
    first: int = 0,
    **rope: object,
) -> tuple:
    """q, keys, values and selected; with ``first`` every page table starts so many pages earlier than its pages."""
    chunks, blocks = PAGE // chunk, sum(-(-length // PAGE) for length in tokens) + 3
    key = Field("latents", (chunks, chunk, rank), torch.int8 if keys == "int8" else torch.bfloat16)
    if keys == "rows":
        key = Field("keys", (heads, chunks, chunk, dim), torch.bfloat16)
    value = [Field("values", (heads, chunks, chunk, dim), torch.bfloat16)]
    bits = bits_of(values)
    if bits is not None:
        codes = Field("codes", (heads, chunks, chunk, dim * bits // 8), torch.uint8)
        value = [codes, Field("scale", (heads, PAGE), torch.float16)]
    fields = [key, *value]
    block = -(-sum(field.nbytes for field in fields) // 256) * 256 + 256
    tier = Tier("device", 2, block, blocks, DEVICE)
    views = {name: layers[1] for name, layers in tier.views(fields).items()}
    names = torch.tensor(tier.allocate(blocks))[torch.randperm(blocks)]
    pages = torch.zeros(len(tokens), first + max(1, max(-(-length // PAGE) for length in tokens)), dtype=torch.int64)
    selected = selections(tokens, heads, count, chunk)
    rotation = torch.linalg.qr(torch.randn(dim, dim))[0]
    taken = 0
    for row, length in enumerate(tokens):
        for page in range(-(-length // PAGE)):
            name = pages[row, first + page] = names[taken]
            taken += 1
            used = torch.zeros(heads, PAGE // chunk, dtype=torch.bool)
            for head in range(heads):
                here = selected[row, head]
                here = here[(here >= 0) & (here // chunks == page)] % chunks
                used[head, here] = True
            if keys == "rows":
                views["keys"][name] = poisoned(torch.randn(heads, chunks, chunk, dim).bfloat16(), used).to(DEVICE)
            else:
                x = torch.randn(chunks, chunk, rank)
                x = (x * 40).clamp(-127, 127).to(torch.int8) if keys == "int8" else x.bfloat16()
                views["latents"][name] = poisoned(x, used.any(0)).to(DEVICE)
            rows = torch.randn(heads, chunks, chunk, dim) * torch.rand(heads, chunks, chunk, 1).exp()
            if bits is None:
                views["values"][name] = poisoned(rows.bfloat16(), used).to(DEVICE)
            else:
                codes, scale = quantise_rows(rows, rotation, bits)
                views["codes"][name] = poisoned(codes, used).to(DEVICE)
                views["scale"][name] = poisoned(scale, used).flatten(1).to(DEVICE)
    selected = torch.where(selected >= 0, selected + first * chunks, -1).to(DEVICE)
    pages = pages.to(DEVICE)
    q = torch.randn(len(tokens), heads * group, dim).to(DEVICE, torch.bfloat16)
    if keys == "rows":
        k = DenseRows(views["keys"], pages)
    else:
        basis = torch.randn(5 + len(tokens), rank, heads, dim) / rank**0.5 / (40 if keys == "int8" else 1)
        rotary = RotaryTables(RopeConfig(dim, **rope), pages.shape[1] * PAGE, DEVICE)
        means = torch.randn(5 + len(tokens), heads, dim).to(DEVICE, torch.bfloat16) if mean else None
        slots = torch.randperm(5 + len(tokens))[: len(tokens)].to(DEVICE)
        k = LatentKeys(views["latents"], basis.to(DEVICE, torch.bfloat16), means, slots, pages, rotary)
    if bits is None:
        v = DenseRows(views["values"], pages)
    else:
        v = QuantisedRows(views["codes"], views["scale"], bits, rotation.to(DEVICE), pages)
    return q, k, buffered(v, selected) if values.startswith("buffered") else v, selected


def log_weights(selected: Tensor) -> Tensor:
    """A random one of every selected chunk, NaN of none."""
    return torch.rand(selected.shape, device=DEVICE).mul(7).masked_fill(selected < 0, torch.nan)


def check(args: tuple, found: tuple[Tensor, Tensor]) -> None:
    q, keys, values, *selected = args
    wide = (in_dtype(source, torch.float32) for source in (keys, values))
    exact = reference.attend_selected(q.float(), *wide, *selected)
    low = reference.attend_selected(q, keys, values, *selected)
    full = exact[1].isfinite()
    assert torch.equal(found[1] == -torch.inf, ~full)
    assert (found[0][~full] == 0).all()
    for out, ref32, lowp in zip(found, exact, low):
        assert out.isfinite()[full].all()
        error = (out.float() - ref32)[full].abs().max()
        allowed = 2 * (lowp.float() - ref32)[full].abs().max() + 2**-9 * ref32[full].abs().max()
        assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def attend(args: tuple, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """The kernel's results in memory that held NaN; the reference must not step in."""

    def refuse(*args: object) -> None:
        raise AssertionError("the reference was called")

    with monkeypatch.context() as patch:
        patch.setattr(cuda.reference, "attend_selected", refuse)
        junk = [torch.full((2**20,), torch.nan, device=DEVICE) for _ in range(4)]
        del junk
        return cuda.attend_selected(*args)


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("keys", [*KEYS, "rows"])
@pytest.mark.parametrize("values", VALUES)
def test_kernel_equals_the_reference_over_ragged_selections(seed, monkeypatch, heads, group, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(heads, group, dim, keys, values, tokens=tokens)
        check(args, attend(args, monkeypatch))


@pytest.mark.parametrize("rank", [32, 96, 160, 192, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("values", VALUES)
def test_every_rank(seed, monkeypatch, rank, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    args = problem(2, 4, dim, keys, values, tokens=[900, 300], rank=rank, mean=rank != 96)
    check(args, attend(args, monkeypatch))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("int8", "4-bit codes"),
        ("int8", "3-bit codes"),
        ("int8", "2-bit codes"),
        ("bf16", "rows"),
        ("rows", "rows"),
        ("int8", "buffered 4-bit codes"),
        ("int8", "buffered 3-bit codes"),
        ("bf16", "buffered rows"),
        ("rows", "buffered rows"),
    ],
)
def test_every_chunk_size(seed, monkeypatch, chunk, keys, values):
    args = problem(2, 4, 128, keys, values, tokens=[1500, 77, 640], rank=160, chunk=chunk, count=300 // chunk)
    check(args, attend(args, monkeypatch))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("int8", "4-bit codes"),
        ("int8", "3-bit codes"),
        ("int8", "2-bit codes"),
        ("bf16", "4-bit codes"),
        ("bf16", "rows"),
        ("rows", "rows"),
        ("int8", "buffered 3-bit codes"),
        ("rows", "buffered rows"),
    ],
)
def test_chunks_weigh_what_they_stand_for(seed, monkeypatch, chunk, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    args = problem(2, 4, dim, keys, values, tokens=[3000, 77, 1500, 0], rank=160, chunk=chunk, count=640 // chunk)
    log_weight = log_weights(args[3])
    found = attend((*args, log_weight), monkeypatch)
    check((*args, log_weight), found)
    assert not torch.equal(attend(args, monkeypatch)[1], found[1])
    # Wherever they lie.
    elsewhere = attend((*args, log_weight.mT.contiguous().mT), monkeypatch)
    assert torch.equal(elsewhere[0], found[0])
    assert torch.equal(elsewhere[1], found[1])


@pytest.mark.parametrize("split", [1, 2, 5])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("int8", "4-bit codes"),
        ("int8", "3-bit codes"),
        ("bf16", "4-bit codes"),
        ("int8", "rows"),
        ("rows", "rows"),
        ("int8", "buffered 2-bit codes"),
    ],
)
def test_any_number_of_splits(seed, monkeypatch, split, keys, values):
    args = problem(2, 4, 128, keys, values, tokens=[3000, 5, 900], rank=160, count=200)
    monkeypatch.setattr(cuda, "splits", lambda *args: split)
    check(args, attend(args, monkeypatch))
    args = (*args, log_weights(args[3]))
    check(args, attend(args, monkeypatch))


@pytest.mark.parametrize("keys", KEYS)
def test_positions_up_to_a_million(seed, monkeypatch, keys):
    args = problem(2, 4, 128, keys, "4-bit codes", tokens=[2048, 2048], rank=160, first=2**14 - 40, theta=500000.0)
    assert args[3].max() * 8 > 10**6
    check(args, attend(args, monkeypatch))


def test_magnitude_of_the_rotation(seed, monkeypatch):
    rope = {"scaling": "yarn", "factor": 4.0, "original_max_position": 256}
    args = problem(2, 4, 128, "int8", "4-bit codes", tokens=[900, 300], **rope)
    check(args, attend(args, monkeypatch))


@pytest.mark.parametrize(
    ("keys", "values"),
    [("int8", "4-bit codes"), ("int8", "3-bit codes"), ("bf16", "rows"), ("rows", "rows"), ("bf16", "buffered rows")],
)
def test_captured_call_equals_the_eager_one(seed, keys, values):
    args = problem(2, 4, 128, keys, values, tokens=[900, 300], rank=160)
    eager = cuda.attend_selected(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.attend_selected(*args)
    for x in out:
        x.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out[0], eager[0])
    assert torch.equal(out[1], eager[1])


@pytest.mark.parametrize("what", ["bits", "interleaved", "rank", "partial"])
def test_what_the_kernel_does_not_take_the_reference_does(seed, what):
    rope = {"interleaved": {"interleaved": True}, "partial": {"rotary_dim": 32}}.get(what, {})
    q, keys, values, selected = problem(
        2, 4, 64, "bf16", "rows", tokens=[900, 300], rank=48 if what == "rank" else 64, **rope
    )
    if what == "bits":
        rotation = torch.linalg.qr(torch.randn(64, 64))[0].to(DEVICE)
        codes, scale = quantise_rows(values.rows.nan_to_num(), rotation, 2)
        values = QuantisedRows(codes, scale.flatten(2), 2, rotation, values.pages)
    args = (q, keys, values, selected)
    check(args, cuda.attend_selected(*args))
