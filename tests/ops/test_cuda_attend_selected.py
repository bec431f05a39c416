"""Attention over selected chunks in CUDA against the reference in float32, on pages as the cache has them."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from selected_case import in_dtype
from torch import Tensor

from shadowkv.kvcache.codecs.latents import DenseLatents, Int4Latents, Int8Latents
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cuda, reference
from shadowkv.ops.attend_selected.sources import BufferedRows, CodedRows, DenseRows, LatentKeys
from shadowkv.ops.codec import LatentCodec, RowCodec
from shadowkv.ops.page import PAGE

if cuda.missing():
    pytest.skip("needs a CUDA device and the attend_selected library", allow_module_level=True)

DEVICE = torch.device("cuda")
SHAPES = [
    (2, 1, 64),
    (3, 3, 96),
    (2, 4, 128),
    (3, 6, 64),
    (2, 7, 64),
    (1, 8, 256),
    (2, 5, 128),
    (2, 12, 128),
    (1, 16, 256),
]
YARN = {"scaling": "yarn", "factor": 4.0, "original_max_position": 256}
LATENTS = {"int8": Int8Latents(), "int4": Int4Latents(), "bf16": DenseLatents()}
KEYS = tuple(LATENTS)
VALUES = (
    *("4-bit codes", "3-bit codes", "2-bit codes", "rows"),
    *("buffered 4-bit codes", "buffered 3-bit codes", "buffered 2-bit codes", "buffered rows"),
)


def codec_of(values: str | RowCodec) -> RowCodec | None:
    """The codec of ``values``; None for plain rows."""
    if isinstance(values, RowCodec):
        return values
    return ROTATED_ROWS[int(values[values.index("-bit") - 1])] if "-bit" in values else None


def skip_what_has_no_kernel(keys: str, values: str, dim: int) -> None:
    """Skips pairs of formats without a kernel, and codecs that do not exist for ``dim``."""
    codec = codec_of(values)
    if codec is None:
        return
    if keys == "rows" or (keys == "bf16" and codec != ROTATED_ROWS[4]):
        pytest.skip("no kernel for these keys with these values")
    if dim % codec.row_multiple:
        pytest.skip("no such codes")


def selections(tokens: list[int], heads: int, count: int, chunk: int) -> Tensor:
    """Distinct random full chunks of rows with ``tokens`` tokens, a random number per head, then -1s."""
    selected = torch.full((len(tokens), heads, count), -1)
    for row, length in enumerate(tokens):
        for head in range(heads):
            most = min(count, length // chunk)
            take = most if head == 0 else int(torch.randint(0, most + 1, ()))
            selected[row, head, :take] = torch.randperm(length // chunk)[:take]
    return selected


def poisoned(x: Tensor, used: Tensor) -> Tensor:
    """``x`` with NaN, or the largest integer, where ``used``, bool over the leading dimensions, is false."""
    junk = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    used = used.to(x.device)
    return x.masked_fill(~used.view(*used.shape, *[1] * (x.dim() - used.dim())), junk)


def buffered(values: DenseRows | CodedRows, selected: Tensor) -> BufferedRows:
    """The selected chunks in shuffled entries of shuffled slots. Other entries, and the chunks' original places, are
    poisoned."""
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
    keys: str | LatentCodec,
    values: str | RowCodec,
    *,
    in_buffer: bool = False,
    tokens: list[int],
    rank: int = 64,
    chunk: int = 8,
    count: int = 21,
    mean: bool = True,
    first: int = 0,
    **rope: object,
) -> tuple:
    """q, keys, values and selected. Every page table starts with ``first`` pages that do not exist.

    Codecs are given by the names of this file or as objects. ``in_buffer`` is for the latter.
    """
    in_buffer = in_buffer or (isinstance(values, str) and values.startswith("buffered"))
    chunks, blocks = PAGE // chunk, sum(-(-length // PAGE) for length in tokens) + 3
    latents = LATENTS.get(keys, keys)
    if keys == "rows":
        key = Field("keys", (heads, chunks, chunk, dim), torch.bfloat16)
    else:
        width, dtype = latents.field(rank, torch.bfloat16)
        key = Field("latents", (chunks, chunk, width), dtype)
        step = 3 / latents.largest_codes(rank, torch.device("cpu")) if latents.largest else torch.ones(rank)
    value = [Field("values", (heads, chunks, chunk, dim), torch.bfloat16)]
    codec = codec_of(values)
    if codec is not None:
        codes = Field("codes", (heads, chunks, chunk, codec.row_bytes(dim)), torch.uint8)
        value = [codes, Field("scale", (heads, PAGE, codec.scales(dim)), torch.float16)]
    fields = [key, *value]
    block = -(-sum(field.nbytes for field in fields) // 256) * 256 + 256
    tier = Tier("device", 2, block, blocks, DEVICE)
    views = {name: layers[1] for name, layers in tier.views(fields).items()}
    page_ids = torch.tensor(tier.allocate(blocks))[torch.randperm(blocks)]
    pages = torch.zeros(len(tokens), first + max(1, max(-(-length // PAGE) for length in tokens)), dtype=torch.int64)
    selected = selections(tokens, heads, count, chunk)
    rotation = torch.linalg.qr(torch.randn(dim, dim))[0] if codec is not None and codec.rotated else None
    taken = 0
    for row, length in enumerate(tokens):
        for page in range(-(-length // PAGE)):
            page_id = pages[row, first + page] = page_ids[taken]
            taken += 1
            used = torch.zeros(heads, PAGE // chunk, dtype=torch.bool)
            for head in range(heads):
                here = selected[row, head]
                here = here[(here >= 0) & (here // chunks == page)] % chunks
                used[head, here] = True
            if keys == "rows":
                views["keys"][page_id] = poisoned(torch.randn(heads, chunks, chunk, dim).bfloat16(), used).to(DEVICE)
            else:
                x = latents.encode(torch.randn(chunks, chunk, rank) / step).to(dtype)
                views["latents"][page_id] = poisoned(x, used.any(0)).to(DEVICE)
            rows = torch.randn(heads, chunks, chunk, dim) * torch.rand(heads, chunks, chunk, 1).exp()
            if codec is None:
                views["values"][page_id] = poisoned(rows.bfloat16(), used).to(DEVICE)
            else:
                codes, scale = codec.encode(rows, rotation)
                views["codes"][page_id] = poisoned(codes, used).to(DEVICE)
                views["scale"][page_id] = poisoned(scale, used).flatten(1, 2).to(DEVICE)
    selected = torch.where(selected >= 0, selected + first * chunks, -1).to(DEVICE)
    pages = pages.to(DEVICE)
    q = torch.randn(len(tokens), heads * group, dim).to(DEVICE, torch.bfloat16)
    if keys == "rows":
        k = DenseRows(views["keys"], pages)
    else:
        k = latent_keys(views["latents"], latents, step, pages, (heads, dim), mean, RopeConfig(dim, **rope))
    if codec is None:
        v = DenseRows(views["values"], pages)
    else:
        rotation = None if rotation is None else rotation.to(DEVICE)
        v = CodedRows(views["codes"], views["scale"], codec, dim, rotation, pages)
    return q, k, buffered(v, selected) if in_buffer else v, selected


def latent_keys(
    stored: Tensor, codec: LatentCodec, step: Tensor, pages: Tensor, head: tuple[int, int], mean: bool, rope: RopeConfig
) -> LatentKeys:
    """Keys with a random state for each row, and first positions of up to three pages. The basis is multiplied by
    ``step``."""
    fitted = 5 + len(pages)
    basis = (step[:, None, None] * torch.randn(fitted, len(step), *head) / len(step) ** 0.5).to(DEVICE, torch.bfloat16)
    means = torch.randn(fitted, *head).to(DEVICE, torch.bfloat16) if mean else None
    states = torch.randperm(fitted)[: len(pages)].to(DEVICE)
    starts = PAGE * torch.randint(0, 4, states.shape, device=DEVICE)
    rotary = RotaryTables(rope, (pages.shape[1] + 3) * PAGE, DEVICE)
    return LatentKeys(stored, codec, basis, means, states, pages, starts, rotary)


def log_weights(selected: Tensor) -> Tensor:
    """Random log-weights of selected chunks, NaN for others."""
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


def attend(args: tuple, backend: ModuleType = cuda) -> tuple[Tensor, Tensor]:
    """Calls the kernel, whose results probably get memory that held NaN."""
    junk = [torch.full((2**20,), torch.nan, device=DEVICE) for _ in range(4)]
    del junk
    return backend.attend_selected(*args)


def check_replay(args: tuple, backend: ModuleType = cuda) -> None:
    """Checks that a captured call gives the same bits as an eager call."""
    eager = backend.attend_selected(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend_selected(*args)
    for x in out:
        x.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out[0], eager[0])
    assert torch.equal(out[1], eager[1])


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("keys", [*KEYS, "rows"])
@pytest.mark.parametrize("values", VALUES)
def test_kernel_equals_the_reference_over_ragged_selections(seed, heads, group, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(heads, group, dim, keys, values, tokens=tokens)
        check(args, attend(args))


@pytest.mark.parametrize("rank", [32, 96, 160, 192, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", ["int8", "bf16"])
@pytest.mark.parametrize("values", VALUES)
def test_every_rank(seed, rank, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    args = problem(2, 4, dim, keys, values, tokens=[900, 300], rank=rank, mean=rank != 96)
    check(args, attend(args))


@pytest.mark.parametrize("rank", [32, 96, 160, 192, 256])
@pytest.mark.parametrize("values", ["3-bit codes", "buffered rows"])
def test_every_rank_of_two_latents_a_byte(seed, rank, values):
    args = problem(2, 4, 128, "int4", values, tokens=[900, 300], rank=rank)
    check(args, attend(args))


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
def test_every_chunk_size(seed, chunk, keys, values):
    args = problem(2, 4, 128, keys, values, tokens=[1500, 77, 640], rank=160, chunk=chunk, count=300 // chunk)
    check(args, attend(args))


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
def test_chunks_weigh_what_they_stand_for(seed, chunk, dim, keys, values):
    skip_what_has_no_kernel(keys, values, dim)
    args = problem(2, 4, dim, keys, values, tokens=[3000, 77, 1500, 0], rank=160, chunk=chunk, count=640 // chunk)
    log_weight = log_weights(args[3])
    found = attend((*args, log_weight))
    check((*args, log_weight), found)
    assert not torch.equal(attend(args)[1], found[1])
    # With any strides.
    elsewhere = attend((*args, log_weight.mT.contiguous().mT))
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
    check(args, attend(args))
    args = (*args, log_weights(args[3]))
    check(args, attend(args))


@pytest.mark.parametrize("keys", KEYS)
def test_positions_up_to_a_million(seed, keys):
    args = problem(2, 4, 128, keys, "4-bit codes", tokens=[2048, 2048], rank=160, first=2**14 - 40, theta=500000.0)
    assert args[3].max() * 8 > 10**6
    check(args, attend(args))


def test_magnitude_of_the_rotation(seed):
    args = problem(2, 4, 128, "int8", "4-bit codes", tokens=[900, 300], **YARN)
    check(args, attend(args))


@pytest.mark.parametrize(
    ("keys", "values"),
    [("int8", "4-bit codes"), ("int8", "3-bit codes"), ("bf16", "rows"), ("rows", "rows"), ("bf16", "buffered rows")],
)
def test_captured_call_equals_the_eager_one(seed, keys, values):
    check_replay(problem(2, 4, 128, keys, values, tokens=[900, 300], rank=160))


def test_a_row_begins_anywhere(seed):
    """Tokens that lie elsewhere on the same pages attend as if they had been there from the first position on."""
    q, keys, values, selected = problem(2, 4, 128, "int4", "4-bit codes", tokens=[900, 300], rank=160, first=5)
    here = (q, replace(keys, first=torch.full_like(keys.first, 64 * 3)), values, selected)
    found = attend(here)
    check(here, found)
    pages = torch.nn.functional.pad(keys.pages, (3, 0))
    later = replace(keys, pages=pages, first=torch.zeros_like(keys.first)), replace(values, pages=pages)
    moved = attend((q, *later, torch.where(selected >= 0, selected + 3 * PAGE // 8, -1)))
    assert torch.equal(found[0], moved[0])
    assert torch.equal(found[1], moved[1])


@pytest.mark.parametrize("keys", ["int8", "int4", "bf16"])
def test_states_lie_apart_in_an_arena(seed, keys):
    """As views of the cache's states do: dense but for the first axis."""
    q, k, v, selected = problem(2, 4, 128, keys, "4-bit codes", tokens=[900, 300], rank=96)

    def apart(x):
        arena = x.new_full((len(x), x[0].numel() + 24), torch.nan)
        arena[:, : x[0].numel()] = x.flatten(1)
        return arena[:, : x[0].numel()].unflatten(1, x.shape[1:])

    args = (q, replace(k, basis=apart(k.basis), mean=apart(k.mean)), v, selected)
    check(args, attend(args))


@pytest.mark.parametrize(
    ("group", "dim", "rotary"), [(4, 128, 64), (12, 128, 64), (3, 64, 16), (16, 128, 96), (2, 256, 64)]
)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("magnitude", [False, True])
def test_dimensions_that_do_not_rotate(seed, group, dim, rotary, keys, magnitude):
    """GLM-4.5 rotates half of a head; no magnitude of the rotation is theirs."""
    rope = YARN if magnitude else {}
    args = problem(2, group, dim, keys, "4-bit codes", tokens=[900, 300], rank=96, rotary_dim=rotary, **rope)
    check(args, attend(args))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(
    ("group", "keys", "values"), [(12, "int4", "3-bit codes"), (16, "rows", "rows"), (9, "int8", "rows")]
)
def test_several_blocks_of_queries_over_several_of_tokens(seed, monkeypatch, splits, group, keys, values):
    args = problem(2, group, 128, keys, values, tokens=[1500, 77, 640], rank=160, chunk=1, count=700)
    monkeypatch.setattr(cuda, "splits", lambda *_: splits)
    log_weight = log_weights(args[3])
    check((*args, log_weight), attend((*args, log_weight)))
