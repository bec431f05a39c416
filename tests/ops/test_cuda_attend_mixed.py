"""Attention over all tokens of mixed latents and vectors on a Hopper against the reference."""

import math
from dataclasses import replace

import pytest
import torch
from ragged_rows import BEGIN, END, check_replays
from torch import Tensor

from shadowkv.baselines.shard import GROUP as SAME_WIDTH
from shadowkv.baselines.shard import MixedLatents
from shadowkv.baselines.vq import ENTRIES, GROUP, VectorRows
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import cuda_mixed_sm90, reference
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, LatentKeys
from shadowkv.ops.page import PAGE

if cuda_mixed_sm90.missing() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper, or the op was not built", allow_module_level=True)

DIM, PAGES = 128, 10
Problem = tuple[Tensor, LatentKeys, CodedRows, Tensor, Tensor]


def widths_of(count: int, rank: int) -> Tensor:
    """Random widths uint8 [count, rank], equal within every 16 dimensions, at most 4 on average."""
    groups = rank // SAME_WIDTH
    widths = torch.tensor([0, 2, 4, 6, 8])[torch.randint(5, (count, groups))]
    while (over := widths.sum(1) > 4 * groups).any():
        place = widths[over].argmax(1, keepdim=True)
        widths[over] = widths[over].scatter_add(1, place, torch.full_like(place, -2))
    return widths.repeat_interleave(SAME_WIDTH, 1).to(torch.uint8).cuda()


def problem(heads: int, group: int, rank: int, chunk: int = 8, **scaling: float | str) -> Problem:
    """Rows of 10 pages, shuffled among other pages, and of shuffled states. Pages and states of no row are NaN."""
    latent, vector, batch = MixedLatents(), VectorRows(), len(END)
    begin, end = torch.tensor(BEGIN, device="cuda"), torch.tensor(END, device="cuda")
    width, dtype = latent.field(rank, torch.bfloat16)
    fields = [
        Field("latents", (PAGE // chunk, chunk, width), dtype),
        Field("codes", (heads, PAGE // chunk, chunk, vector.row_bytes(DIM)), torch.uint8),
    ]
    tier = Tier("device", 1, sum(field.nbytes for field in fields), 2 * batch * PAGES, torch.device("cuda"))
    tier.arena.fill_(-1)
    page_ids = torch.tensor(tier.allocate(2 * batch * PAGES), device="cuda")
    views = {name: view[0] for name, view in tier.views(fields).items()}
    states, count = torch.randperm(2 * batch, device="cuda")[:batch], 2 * batch
    nobody = torch.ones(count, dtype=torch.bool, device="cuda").index_fill(0, states, False)
    widths = widths_of(count, rank)
    largest = ((1 << widths.int() >> 1) - 1).clamp(min=1)
    step = 3 / largest / rank**0.5 / 50
    step[nobody] = math.nan
    basis = torch.randint(-127, 128, (count, rank, heads, DIM), device="cuda", dtype=torch.int8)
    mean = 3 * torch.randn(count, heads, DIM, device="cuda").bfloat16()
    mean[nobody] = math.nan
    spread = largest[states][:, None] * torch.randn(batch, PAGE * PAGES, rank, device="cuda") / 3
    of_value = torch.rand(count, heads, DIM, device="cuda") + 0.1
    codebook = torch.randn(count, 1, ENTRIES, GROUP, device="cuda").clamp(-1, 1)
    of_value[nobody], codebook[nobody] = math.nan, math.nan
    tables = []
    for field, rows in (
        ("latents", latent.encode(spread, widths[states][:, None])),
        ("codes", torch.randint(256, (batch, heads, PAGE * PAGES, DIM // GROUP), device="cuda", dtype=torch.uint8)),
    ):
        table = page_ids[torch.randperm(len(page_ids), device="cuda")][: batch * PAGES].view(batch, PAGES)
        paged = rows.unflatten(-2, (PAGES, PAGE // chunk, chunk))
        views[field][table] = paged if field == "latents" else paged.transpose(1, 2)
        # What is behind a row's end is never looked at.
        tables.append(table.masked_fill(PAGE * torch.arange(PAGES, device="cuda") >= end[:, None], 2**40))
    rope = RopeConfig(DIM, theta=5e5, **scaling)
    rotary = RotaryTables(rope, PAGE * (PAGES + 30), torch.device("cuda"))
    first = PAGE * torch.randint(30, (batch,), device="cuda")
    keys = LatentKeys(views["latents"], latent, basis, mean, states, tables[0], first, rotary, widths, step)
    nothing = torch.empty(len(page_ids), heads, PAGE, 0, device="cuda").half()
    rotation = vector.rotation_matrix(DIM, "values").cuda()
    values = CodedRows(views["codes"], nothing, vector, DIM, rotation, tables[1], None, (of_value, codebook), states)
    return torch.randn(batch, heads * group, DIM, device="cuda").bfloat16(), keys, values, begin, end


def check(found: tuple[Tensor, Tensor], args: Problem) -> None:
    q, keys, values, begin, end = args
    keys, values = (replace(source, pages=source.pages % 2**40) for source in (keys, values))
    assert keys.mean is not None
    exact = reference.attend_coded(q.float(), replace(keys, mean=keys.mean.float()), values, begin, end)
    low = reference.attend_coded(q, keys, values, begin, end)
    some = end > begin
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert (found[0][~some] == 0).all()
    assert (found[1][~some] == -math.inf).all()
    for got, wanted, rounded in zip(found, exact, low, strict=True):
        error = (got.float() - wanted)[some].abs().max()
        allowed = 2 * (rounded.float() - wanted)[some].abs().max() + 2**-9 * wanted[some].abs().max()
        assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the backend takes is NaN until it is written."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(math.nan))


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (4, 3), (8, 4), (2, 5), (4, 7), (2, 8)])
@pytest.mark.parametrize("rank", cuda_mixed_sm90.RANKS)
def test_ragged_rows(seed: int, heads: int, group: int, rank: int) -> None:
    args = problem(heads, group, rank, chunk=1 if group % 2 else 8)
    check(cuda_mixed_sm90.attend_coded(*args), args)


@pytest.mark.parametrize("split", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("group", [4, 7])
def test_any_number_of_splits(seed: int, monkeypatch: pytest.MonkeyPatch, split: int, group: int) -> None:
    monkeypatch.setattr(cuda_mixed_sm90, "splits", lambda *args: split)
    args = problem(4, group, 192)
    check(cuda_mixed_sm90.attend_coded(*args), args)


def test_scores_are_as_much_larger_as_the_rotation_makes_keys(seed: int) -> None:
    args = problem(2, 4, 160, scaling="yarn", factor=4.0, original_max_position=1024)
    check(cuda_mixed_sm90.attend_coded(*args), args)


@pytest.mark.parametrize("split", [1, 5])
def test_what_is_not_a_number_shows(seed: int, monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    monkeypatch.setattr(cuda_mixed_sm90, "splits", lambda *args: split)
    q, keys, values, begin, end = problem(4, 4, 160)
    assert keys.mean is not None and values.states is not None
    q[0, 5, 9] = math.nan
    keys.mean[keys.states[1], 2, 7] = math.nan
    values.state[0][values.states[4], 1, 3] = math.nan
    out, lse = cuda_mixed_sm90.attend_coded(q, keys, values, begin, end)
    assert lse[0].isnan().tolist() == out[0].isnan().any(-1).tolist() == [row == 5 for row in range(16)]
    assert lse[1].isnan().tolist() == out[1].isnan().any(-1).tolist() == [row // 4 == 2 for row in range(16)]
    assert out[4].isnan().any(-1).tolist() == [row // 4 == 1 for row in range(16)]


def test_captured_in_a_graph_it_gives_the_same_bits(seed: int) -> None:
    check_replays(cuda_mixed_sm90.attend_coded, problem(8, 4, 192))


def test_other_sources_are_refused(seed: int) -> None:
    q, keys, values, *lengths = problem(2, 4, 96)
    with pytest.raises(ValueError, match="needs mixed latents with a basis in 8 bits, not LatentKeys"):
        cuda_mixed_sm90.attend_coded(q, keys.decoded(), values, *lengths)
    with pytest.raises(ValueError, match="takes values in vq-4x256, not dense"):
        cuda_mixed_sm90.attend_coded(q, keys, DenseRows(values.codes, values.pages), *lengths)
    with pytest.raises(RuntimeError, match="q has dtype"):
        cuda_mixed_sm90.attend_coded(q.float(), keys, values, *lengths)
    with pytest.raises(RuntimeError, match="is not made for rank 64"):
        short = replace(keys, latents=keys.latents[..., :32].contiguous(), basis=keys.basis[:, :64].contiguous())
        assert keys.widths is not None and keys.basis_step is not None
        state = {"widths": keys.widths[:, :64].contiguous(), "basis_step": keys.basis_step[:, :64].contiguous()}
        cuda_mixed_sm90.attend_coded(q, replace(short, **state), values, *lengths)
