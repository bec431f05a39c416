"""Attention of packed sequences on Hopper against the reference in float64, with NaN in all that must not be read."""

import math

import pytest
import torch
from precision import assert_close_like_lowp
from test_ragged_attention import CACHED, LENGTHS, packed, with_cached

from shadowkv.ops.ragged_attention import cuda_sm90, reference, triton
from shadowkv.ops.registry import Ops

if cuda_sm90.missing():
    pytest.skip("needs a Hopper and the attend_blocks_sm90 library", allow_module_level=True)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that the backend takes is NaN until it is written."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(math.nan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(1, 1, 64), (2, 3, 64), (2, 2, 128), (8, 4, 128)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("lengths", [*LENGTHS, [128], [127, 129, 256], [1500, 2, 700, 1024], [40] * 70], ids=str)
def test_packed_sequences_see_themselves_alone(seed, heads, group, dim, lengths, dtype):
    args = packed(lengths, heads, group, dim, dtype)
    exact = reference.ragged_attention(*(x.double() for x in args[:3]), *args[3:])
    assert_close_like_lowp(cuda_sm90.ragged_attention(*args), exact, triton.ragged_attention(*args))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "cached"), [*CACHED, ([17] * 15 + [1793], [1024] * 15 + [0]), ([129, 300], [1, 4000])], ids=str
)
def test_queries_see_what_their_sequences_have_cached(seed, lengths, cached, dim):
    q, k, v, starts, _, key_starts = with_cached(lengths, cached, 2, 4, dim, torch.bfloat16)
    exact = reference.ragged_attention(*(x.double() for x in (q, k, v)), starts, None, key_starts)
    out = cuda_sm90.ragged_attention(q, k, v, starts, None, key_starts)
    assert_close_like_lowp(out, exact, triton.ragged_attention(q, k, v, starts, None, key_starts))


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_not_a_number_stays_in_its_sequence(seed, dim):
    q, k, v, starts, lengths = packed([200, 300, 77, 130], 2, 4, dim, torch.bfloat16)
    expected = cuda_sm90.ragged_attention(q, k, v, starts, lengths)
    for x in (q, k, v):
        x[200:500] = math.nan
    out = cuda_sm90.ragged_attention(q, k, v, starts, lengths)
    assert torch.equal(out[:200], expected[:200])
    assert torch.equal(out[500:], expected[500:])
    assert out[200:500].isnan().all()


def test_tiles_in_any_order_give_the_same_bits(seed):
    args = packed([3000, 100, 2000, 1, 900], 4, 4, 128, torch.bfloat16)
    first = cuda_sm90.ragged_attention(*args)
    for _ in range(10):
        assert torch.equal(cuda_sm90.ragged_attention(*args), first)


@pytest.mark.parametrize("backend", [cuda_sm90, triton], ids=["cuda_sm90", "triton"])
def test_the_host_does_not_wait(seed, backend):
    args = packed([100, 1, 300], 2, 4, 128, torch.bfloat16)
    backend.ragged_attention(*args)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.ragged_attention(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_arguments_are_refused(seed):
    q, k, v, starts, lengths = packed([200, 100], 2, 2, 128, torch.bfloat16)
    for wrong, said in (
        ((q[:200], k, v, starts), "not as many"),
        ((q, k[:299], v[:299], starts), "more than"),
        ((q, k, v, starts.long()), "starts has dtype"),
        ((q, k.half(), v, starts), "k has dtype"),
    ):
        with pytest.raises(RuntimeError, match=said):
            cuda_sm90.ragged_attention(*wrong, lengths)
    with pytest.raises(RuntimeError, match="key_starts"):
        cuda_sm90.ragged_attention(q, k, v, starts, lengths, starts[:-1])


def test_it_is_what_16_bits_get() -> None:
    assert Ops("cuda").backends["ragged_attention"] == "cuda_sm90"
