"""The low-rank basis of a GPU against the reference; its float32 path runs on any device."""

import pytest
import torch
from devices import DEVICE, ON_GPU

from shadowkv.ops.low_rank_basis import cuda, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]


def keys_of(rows: int, squares: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, n] with squared singular values about ``squares``."""
    n = len(squares)
    mixing = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q * squares.double().sqrt()
    return (torch.randn(rows, n, dtype=torch.float64) @ mixing).to(dtype).to(DEVICE)


def basis_of(backend, keys, rank, mean=None):
    """Basis, kept energy and largest latents of one matrix, which is found together with another."""
    other = torch.randn_like(keys.float()).to(keys.dtype)
    means = None if mean is None else torch.stack((mean, -mean))
    found = backend.low_rank_basis(torch.stack((keys, other)), rank, means)
    basis, variance, largest, total = (x[0] for x in found)
    return basis, variance.sum() / total.clamp(min=1e-30), largest


def energy(keys: torch.Tensor, basis: torch.Tensor, mean: torch.Tensor | None = None) -> float:
    wide = keys.double() - (0 if mean is None else mean.double())
    return float((wide @ basis.double().T).square().sum() / wide.square().sum())


def orthonormal(basis: torch.Tensor) -> None:
    identity = torch.eye(len(basis), device=DEVICE)
    torch.testing.assert_close(basis @ basis.T, identity, atol=1e-5, rtol=0)


FALL = torch.arange(1, 257, dtype=torch.float64)
SPECTRA = {
    "1/i": FALL**-1,
    "1/i^2": FALL**-2,
    "1/i^4": FALL**-4,
    "exponential": torch.exp(-FALL / 20),
    "one direction": torch.cat((torch.tensor([1e3]), FALL[1:] ** -1.5)),
    "three far ahead": torch.cat((torch.full((3,), 1e7), FALL[3:] ** -1.0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("squares", SPECTRA.values(), ids=SPECTRA)
@pytest.mark.parametrize("centred", [False, True])
def test_as_much_energy_is_kept_as_by_the_eigenvectors(squares, centred, dtype) -> None:
    keys = keys_of(3000, squares, dtype)
    mean = None
    if centred:
        keys += torch.randn(256, device=DEVICE).to(dtype)
        mean = keys.float().mean(0).to(dtype)
    basis, kept, largest = basis_of(cuda, keys, 96, mean)
    best, best_kept, _ = basis_of(reference, keys, 96, mean)
    orthonormal(basis)
    least = 1 - energy(keys, best, mean)
    assert least - 1e-6 <= 1 - energy(keys, basis, mean) <= 1.03 * least + 1e-5
    assert 1 - float(kept) == pytest.approx(1 - float(best_kept), rel=0.03, abs=3e-5)
    latents = (keys.float() - (0 if mean is None else mean.float())) @ basis.T
    torch.testing.assert_close(largest, latents.abs().amax(0), atol=1e-5, rtol=1e-2)


def test_strongest_directions_come_first() -> None:
    keys = keys_of(500, 0.5 ** torch.arange(32))
    basis, *_ = basis_of(cuda, keys, 8)
    strength = (keys @ basis.T).square().sum(0)
    # Neighbours change places where the start is unlucky, in 2 of 100 matrices.
    assert (strength[2:] < strength[:-2]).all() and (strength[:3].diff() < 0).all()


@pytest.mark.parametrize("rows", [1, 10])
def test_fewer_rows_than_the_rank(rows: int) -> None:
    keys = torch.randn(rows, 64, device=DEVICE)
    basis, kept, _ = basis_of(cuda, keys, 16)
    orthonormal(basis)
    torch.testing.assert_close(keys @ basis.T @ basis, keys, atol=1e-3, rtol=0)
    assert float(kept) == pytest.approx(1, abs=1e-5)


def test_full_rank() -> None:
    keys = torch.randn(150, 64, device=DEVICE)
    basis, kept, _ = basis_of(cuda, keys, 64)
    torch.testing.assert_close(keys @ basis.T @ basis, keys, atol=1e-4, rtol=0)
    assert float(kept) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_the_basis_of_nonsense_is_still_orthonormal(bad: float) -> None:
    keys = torch.full((20, 32), bad, device=DEVICE)
    orthonormal(basis_of(cuda, keys, 8)[0])


def test_a_seldom_direction_that_overflows_leaves_the_others_alone() -> None:
    keys = keys_of(300, 0.7 ** torch.arange(32))
    keys[7, 3] = float("inf")
    orthonormal(basis_of(cuda, keys, 8)[0])


def test_inference_mode_and_no_inference_mode_in_turns() -> None:
    keys = keys_of(300, FALL[:40] ** -2)
    with torch.inference_mode():
        basis, *_ = basis_of(cuda, keys, 9)
    again, *_ = basis_of(cuda, keys, 9)
    assert torch.equal(basis, again)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_the_host_does_not_wait() -> None:
    keys = keys_of(1000, FALL**-1, torch.bfloat16)
    basis_of(cuda, keys, 96, keys[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        basis_of(cuda, keys, 96, keys[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
