"""Attention over selected tokens from latents on Hopper against the reference; and that it is chosen there."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_cuda_attend_selected import DEVICE, YARN, check, check_replay, log_weights, problem
from test_cuda_attend_selected import attend as attend_selected

from shadowkv.ops.attend_selected import cuda_sm90
from shadowkv.ops.case import Case
from shadowkv.ops.registry import Ops

if cuda_sm90.missing():
    pytest.skip("needs a Hopper and the attend_latents_sm90 library", allow_module_level=True)

CODES = ("4-bit codes", "3-bit codes", "2-bit codes")


attend = partial(attend_selected, backend=cuda_sm90)


def ascending(args: tuple) -> tuple:
    """The arguments with chunks in ascending order, then -1s."""
    selected = args[3].masked_fill(args[3] < 0, 2**40).sort(-1)[0]
    return (*args[:3], selected.masked_fill(selected == 2**40, -1))


@pytest.mark.parametrize("group", [*range(1, 10), 12, 15, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("values", CODES)
def test_every_group_over_ragged_selections(seed, group, dim, values):
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(3, group, dim, "int4", values, tokens=tokens)
        check(args, attend(args))


@pytest.mark.parametrize("blocks", [None, 1, 5, 40])
@pytest.mark.parametrize(("group", "dim"), [(4, 128), (8, 64), (16, 128)])
@pytest.mark.parametrize("tokens", [[0, 64, 5000, 0, 0, 129, 8, 700], [9000, *[100] * 70], [40] * 33 + [3000]])
def test_work_is_shared_out_by_what_rows_have(seed, monkeypatch, blocks, group, dim, tokens):
    """Also where blocks have nothing, and rows more room than chunks. What no block has written is not read."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **form: new_empty(x, *size, **form).fill_(math.nan))
    args = ascending(problem(2, group, dim, "int4", "3-bit codes", tokens=tokens, rank=96, count=600))
    monkeypatch.setattr(cuda_sm90, "blocks_for", lambda tiles, most: min(tiles, blocks or most))
    own = (args[3] >= 0).sum(-1).amax(-1)
    for most in (own, own + 5, torch.full_like(own, 600)):
        check(args, attend((*args, None, most)))


def test_nobody_has_work(seed):
    args = problem(2, 4, 128, "int4", "3-bit codes", tokens=[0, 0], rank=96)
    out, lse = attend((*args, None, torch.zeros(2, dtype=torch.int64, device=DEVICE)))
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks", [None, 1, 5])
@pytest.mark.parametrize(
    ("group", "dim", "values"),
    [
        (3, 64, "4-bit codes"),
        (4, 128, "3-bit codes"),
        (8, 128, "2-bit codes"),
        (12, 128, "3-bit codes"),
        (16, 64, "4-bit codes"),
    ],
)
def test_chunks_weigh_what_they_stand_for(seed, monkeypatch, chunk, blocks, group, dim, values):
    """In runs that begin within a unit too, and go on over units that lack tiles."""
    tokens = [3000, 77, 1500, 0, 1200]
    args = problem(2, group, dim, "int4", values, tokens=tokens, rank=96, chunk=chunk, count=648 // chunk)
    whole = cuda_sm90.blocks_for
    monkeypatch.setattr(cuda_sm90, "blocks_for", lambda tiles, most: whole(tiles, blocks or most))
    log_weight = log_weights(args[3])
    found = attend((*args, log_weight))
    check((*args, log_weight), found)
    assert not torch.equal(attend(args)[1], found[1])


@pytest.mark.parametrize("rank", [32, 64, 96, 128, 160])
@pytest.mark.parametrize(("group", "dim"), [(4, 64), (4, 128), (16, 128)])
@pytest.mark.parametrize("values", CODES)
def test_every_rank(seed, rank, group, dim, values):
    args = problem(2, group, dim, "int4", values, tokens=[900, 300], rank=rank, mean=rank != 96)
    check(args, attend(args))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("group", [4, 7])
@pytest.mark.parametrize("values", CODES)
def test_every_chunk_size(seed, chunk, group, values):
    args = problem(2, group, 128, "int4", values, tokens=[1500, 77, 640], rank=160, chunk=chunk, count=700 // chunk)
    check(args, attend(ascending(args)))


@pytest.mark.parametrize("blocks", [1, 2, 5, 64])
@pytest.mark.parametrize("group", [4, 6, 12])
@pytest.mark.parametrize("values", CODES)
def test_runs_of_any_length(seed, monkeypatch, blocks, group, values):
    """A block meets many units and a unit many blocks."""
    tokens = [1500, 0, 77, 640, 1200, 1, 64, 900]
    args = problem(3, group, 128, "int4", values, tokens=tokens, rank=160, chunk=1, count=1000)
    whole = cuda_sm90.blocks_for
    monkeypatch.setattr(cuda_sm90, "blocks_for", lambda tiles, most: whole(tiles, blocks))
    check(args, attend(args))


@pytest.mark.parametrize("values", CODES)
def test_more_tiles_than_threads(seed, monkeypatch, values):
    args = problem(1, 4, 128, "int4", values, tokens=[9000], rank=160, chunk=1, count=8500)
    monkeypatch.setattr(cuda_sm90, "blocks_for", lambda tiles, most: 1)
    check(args, attend(args))


@pytest.mark.parametrize("last", [2**17, 2**18])
def test_far_positions(seed, last):
    args = problem(
        2, 4, 128, "int4", "3-bit codes", tokens=[2048, 2048], rank=160, first=last // 64 - 32, theta=500000.0
    )
    assert last - 200 < args[3].max() * 8 < last
    check(args, attend(args))


def test_scales_in_the_pages_of_the_codes(seed):
    q, keys, values, selected = problem(2, 4, 128, "int4", "3-bit codes", tokens=[900, 300], rank=160)
    args = (q, keys, replace(values, scale_pages=values.pages), selected)
    check(args, attend(args))


def test_mean_in_float(seed):
    q, keys, values, selected = problem(2, 4, 128, "int4", "4-bit codes", tokens=[900, 300], rank=160)
    args = (q, replace(keys, mean=keys.mean.float()), values, selected)
    check(args, attend(args))


def test_magnitude_of_the_rotation(seed):
    args = problem(2, 4, 128, "int4", "4-bit codes", tokens=[900, 300], **YARN)
    check(args, attend(args))


@pytest.mark.parametrize(("group", "dim", "rotary"), [(4, 128, 64), (12, 128, 64), (8, 64, 16), (16, 128, 96)])
@pytest.mark.parametrize("magnitude", [False, True])
def test_dimensions_that_do_not_rotate(seed, group, dim, rotary, magnitude):
    """GLM-4.5 rotates half of a head; no magnitude of the rotation is theirs."""
    rope = YARN if magnitude else {}
    args = problem(2, group, dim, "int4", "3-bit codes", tokens=[900, 300], rank=96, rotary_dim=rotary, **rope)
    check(args, attend(args))


@pytest.mark.parametrize("values", CODES)
def test_captured_call_equals_the_eager_one(seed, values):
    check_replay(problem(2, 4, 128, "int4", values, tokens=[900, 300], rank=160), cuda_sm90)


CASE = Case(
    frozenset({"attend_selected", "attend_coded"}), torch.bfloat16, head_dim=128, num_query_heads=32, num_kv_heads=8,
    rope_dim=128, rank=160, latent_width=96, key_codec=18, value_codec=2, capability=(9, 0), block_memory=232448,
)  # fmt: skip


def test_it_is_chosen(seed):
    backends = Ops("cuda", CASE).backends
    assert (backends["attend_selected"], backends["attend_coded"]) == ("cuda_sm90", "cuda_selected_sm90")


def test_nothing_selected(seed):
    q, keys, values, selected = problem(2, 4, 128, "int4", "4-bit codes", tokens=[900, 300], rank=160)
    out, lse = cuda_sm90.attend_selected(q, keys, values, selected[..., :0])
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("keys", "values", "rank", "error", "reason"),
    [
        ("rows", "rows", 64, ValueError, "takes latents, not DenseRows"),
        ("int4", "rows", 64, ValueError, "outside a buffer, not DenseRows"),
        ("int4", "buffered 4-bit codes", 64, ValueError, "outside a buffer, not BufferedRows"),
        ("int8", "4-bit codes", 64, RuntimeError, "keys in codec 18, not 17"),
        ("int4", "4-bit codes", 192, RuntimeError, "not made for rank 192"),
    ],
)
def test_other_sources_are_refused(seed, keys, values, rank, error, reason):
    with pytest.raises(error, match=reason):
        cuda_sm90.attend_selected(*problem(2, 4, 128, keys, values, tokens=[900, 300], rank=rank))


def test_scales_elsewhere_are_refused(seed):
    q, keys, values, selected = problem(2, 4, 128, "int4", "4-bit codes", tokens=[900, 300], rank=160)
    with pytest.raises(ValueError, match="not in the pages of their codes"):
        cuda_sm90.attend_selected(q, keys, replace(values, scale_pages=values.pages.clone()), selected)
