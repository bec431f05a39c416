"""Dense attention on a GPU, few queries and many, against the reference in float64, with NaN in all that must not be
read."""

import math

import pytest
import torch
from plain_formulas import SHAPES
from precision import assert_close_like_lowp
from test_dense_attention import CACHED, LENGTHS, doubles, packed, with_cached

from shadowkv.ops.dense_attention import cuda, cuda_masked, cuda_sm90, reference
from shadowkv.ops.registry import Ops

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from shadowkv.ops.dense_attention import triton

ON_HOPPER = not cuda_sm90.missing()
BACKENDS = {"cuda": cuda} | ({"cuda_sm90": cuda_sm90} if ON_HOPPER else {})
backends = pytest.mark.parametrize("backend", BACKENDS)
hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper and the attend_blocks_sm90 library")
by_size = pytest.mark.parametrize("fewest", [None, 1], ids=["by size", "ours"])
"""The choice of kernel on a Hopper as it is, and always our kernel."""
MORE_SHAPES = [*SHAPES, (1, 6, 128), (2, 3, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "group", "dim"), MORE_SHAPES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 77), (64, 64), (37, 300), (300, 300), (5, 5000), (700, 1500)])
def test_blocks_of_a_longer_buffer(
    heads: int, group: int, dim: int, n: int, m: int, causal: bool, dtype: torch.dtype
) -> None:
    q = torch.randn(n, heads * group, dim, device="cuda").to(dtype)
    # As blocks and new tokens are strided: heads outside, or inside.
    buffers = torch.full((2, heads, m + 1, dim), torch.nan, device="cuda", dtype=dtype)
    if causal:
        buffers = buffers.transpose(1, 2).contiguous().transpose(1, 2)
    buffers[:, :, :m] = torch.randn(2, heads, m, dim, device="cuda")
    k, v = buffers[:, :, :m]
    out, lse = cuda.partial(q, k.transpose(0, 1), v.transpose(0, 1), causal)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    assert lse.dtype == torch.float32
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    exact, low = reference.partial(*doubles(q, k, v), causal), reference.partial(q, k, v, causal)
    assert_close_like_lowp(out, exact[0], low[0])
    assert_close_like_lowp(lse, exact[1], low[1])


@pytest.mark.parametrize("backend", [cuda, cuda_masked], ids=["flash", "masked"])
@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 77), (64, 64), (37, 300), (300, 300), (700, 1500)])
def test_the_last_queries_see_everything_up_to_themselves(
    backend, heads: int, group: int, dim: int, n: int, m: int
) -> None:
    q = torch.randn(n, heads * group, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, m, heads, dim, device="cuda").bfloat16()
    assert_close_like_lowp(backend.causal(q, k, v), reference.causal(*doubles(q, k, v)), reference.causal(q, k, v))


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (20, torch.bfloat16), (264, torch.float16)])
@pytest.mark.parametrize(("n", "m"), [(1, 77), (64, 64), (37, 300)])
def test_what_flash_attention_does_not_take(n: int, m: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(rows, heads, dim, device="cuda").to(dtype) for rows, heads in ((n, 6), (m, 2), (m, 2)))
    exact, low = reference.causal(*doubles(q, k, v)), reference.causal(q, k, v)
    assert_close_like_lowp(cuda_masked.causal(q, k, v), exact, low)


def case(n: int, m: int, heads: int, group: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries [n, H_q, d], keys and values [m, H, d], parts of larger tensors with NaN behind them."""
    k, v = torch.full((2, m + 130, heads, dim), math.nan, device="cuda", dtype=dtype)[:, :m]
    for x in (k, v):
        x.copy_(torch.randn(m, heads, dim, device="cuda"))
    return [torch.randn(n, heads * group, dim, device="cuda").to(dtype), k, v]


def set_fewest_tiles(monkeypatch: pytest.MonkeyPatch, fewest: int | None, backend: str, dim: int) -> None:
    """Sets ``MIN_TILES``. Skips head dims that the kernel for Hopper does not support."""
    if backend == "cuda_sm90" and dim not in (64, 128):
        pytest.skip("not a head dim of the kernel for Hopper")
    if fewest is not None:
        monkeypatch.setattr(cuda_sm90, "MIN_TILES", fewest)


@backends
@by_size
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 7, 128), (2, 1, 64), (2, 3, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "m", "masked"),
    [
        (1, 1, False), (37, 300, False), (64, 64, True), (37, 300, True), (1, 300, True), (300, 37, False),
        (4096, 4096, False), (4096, 4096, True), (4200, 4200, True), (1700, 10240, False), (1700, 10300, False),
        (3000, 6000, True), (130, 128, False),
    ],
)  # fmt: skip
def test_a_block(
    monkeypatch, fewest, backend, n: int, m: int, masked: bool, heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    set_fewest_tiles(monkeypatch, fewest, backend, dim)
    q, k, v = case(n, m, heads, group, dim, dtype)
    out, lse = BACKENDS[backend].partial(q, k, v, masked)
    exact, exact_lse = reference.partial(*doubles(q, k, v), masked)
    low, _ = reference.partial(q, k, v, masked)
    assert out.dtype == dtype
    assert_close_like_lowp(out, exact, low)
    torch.testing.assert_close(lse, exact_lse.float(), atol=2e-3, rtol=1e-3)


@backends
@by_size
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 7, 128), (2, 1, 64), (2, 3, 96)])
@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (4500, 4500), (1000, 20000), (3000, 9000), (512, 75000)])
def test_large_blocks_of_a_prompt(
    monkeypatch, fewest, backend, n: int, m: int, heads: int, group: int, dim: int
) -> None:
    set_fewest_tiles(monkeypatch, fewest, backend, dim)
    q, k, v = case(n, m, heads, group, dim, torch.bfloat16)
    found = BACKENDS[backend].causal(q, k, v)
    assert_close_like_lowp(found, reference.causal(*doubles(q, k, v)), reference.causal(q, k, v))


@pytest.fixture
def poisoned_outputs(monkeypatch):
    """Memory that the backend takes is NaN until it is written."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(math.nan))


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(1, 1, 64), (2, 3, 64), (2, 2, 128), (8, 4, 128)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("lengths", [*LENGTHS, [128], [127, 129, 256], [1500, 2, 700, 1024], [40] * 70], ids=str)
def test_packed_sequences_see_themselves_alone(seed, poisoned_outputs, heads, group, dim, lengths, dtype):
    *args, pack = packed(lengths, heads, group, dim, dtype)
    exact = reference.packed(*doubles(*args), pack)
    assert_close_like_lowp(cuda_sm90.packed(*args, pack), exact, triton.packed(*args, pack))


@hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "cached"), [*CACHED, ([17] * 15 + [1793], [1024] * 15 + [0]), ([129, 300], [1, 4000])], ids=str
)
def test_queries_see_what_their_sequences_have_cached(seed, poisoned_outputs, lengths, cached, dim):
    *args, pack = with_cached(lengths, cached, 2, 4, dim, torch.bfloat16)
    pack = pack._replace(lengths=None)
    exact = reference.packed(*doubles(*args), pack)
    assert_close_like_lowp(cuda_sm90.packed(*args, pack), exact, triton.packed(*args, pack))


@hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_not_a_number_stays_in_its_sequence(seed, poisoned_outputs, dim):
    q, k, v, pack = packed([200, 300, 77, 130], 2, 4, dim, torch.bfloat16)
    expected = cuda_sm90.packed(q, k, v, pack)
    for x in (q, k, v):
        x[200:500] = math.nan
    out = cuda_sm90.packed(q, k, v, pack)
    assert torch.equal(out[:200], expected[:200])
    assert torch.equal(out[500:], expected[500:])
    assert out[200:500].isnan().all()


@hopper
def test_tiles_in_any_order_give_the_same_bits(seed, poisoned_outputs):
    args = packed([3000, 100, 2000, 1, 900], 4, 4, 128, torch.bfloat16)
    first = cuda_sm90.packed(*args)
    for _ in range(10):
        assert torch.equal(cuda_sm90.packed(*args), first)


@pytest.mark.parametrize("backend", [pytest.param(cuda_sm90, marks=hopper), triton], ids=["cuda_sm90", "triton"])
def test_the_host_does_not_wait(seed, backend):
    args = packed([100, 1, 300], 2, 4, 128, torch.bfloat16)
    backend.packed(*args)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.packed(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@hopper
def test_wrong_arguments_are_refused(seed):
    q, k, v, pack = packed([200, 100], 2, 2, 128, torch.bfloat16)
    for *wrong, said in (
        (q[:200], k, v, pack, "not as many"),
        (q, k[:299], v[:299], pack, "more than"),
        (q, k, v, pack._replace(cu_seqlens=pack.cu_seqlens.long()), "starts has dtype"),
        (q, k.half(), v, pack, "k has dtype"),
        (q, k, v, pack._replace(cu_seqlens_k=pack.cu_seqlens[:-1]), "key_starts"),
    ):
        with pytest.raises(RuntimeError, match=said):
            cuda_sm90.packed(*wrong)


@hopper
def test_it_is_what_16_bits_get() -> None:
    assert Ops("cuda").backends["dense_attention.packed"] == "cuda_sm90"
