"""Rows times the inverse of a Cholesky factor against float64. The CUDA kernel runs on a CPU too, whose threads take
turns."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from compiled_source import kernel_on_cpu
from devices import DEVICE
from torch import Tensor

from shadowkv.ops.whiten_rows import cuda, reference

BACKENDS = ["reference", "threads", *([] if cuda.missing() else ["cuda"])]

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel, compiled for a CPU."""
    return kernel_on_cpu("whiten_rows", tmp_path_factory.mktemp("source"))


def by_threads(library: ctypes.CDLL, rows: Tensor, products: Tensor, shift: float = 0.0) -> Tensor:
    out = torch.full_like(rows, float("nan"))
    places = (ctypes.c_void_p(x.data_ptr()) for x in (rows, products, out))
    library.whiten_rows.restype = ctypes.c_bool
    assert library.whiten_rows(*places, *rows.shape, ctypes.c_float(shift)), "threads wait for others that have ended"
    return out


@pytest.fixture(params=BACKENDS)
def backend(request, threads, monkeypatch):
    if request.param == "threads":
        yield SimpleNamespace(whiten_rows=lambda *args: by_threads(threads, *args))
        return
    # Outputs hold NaN before.
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: torch.full_like(x, float("nan"), **kwargs))
    with torch.device(DEVICE):
        yield {"reference": reference, "cuda": cuda}[request.param]


def exact(rows: Tensor, products: Tensor, shift: float) -> Tensor:
    """The result in float64."""
    scale = products.double().diagonal(dim1=1, dim2=2).rsqrt()
    scaled = products.double() * scale[:, :, None] * scale[:, None]
    root = torch.linalg.cholesky(scaled + shift * torch.eye(rows.shape[1], dtype=torch.float64))
    return torch.linalg.inv(root) @ (rows.double() * scale[:, :, None])


SIZES = [
    (1, 1, 1),
    (2, 1, 40),
    (1, 31, 32),
    (3, 32, 33),
    (2, 33, 100),
    (2, 64, 64),
    (1, 96, 192),
    (2, 160, 70),
    (1, 256, 40),
]


@pytest.mark.parametrize(("matrices", "rank", "n"), SIZES)
def test_rows_of_any_number_and_length(backend, matrices: int, rank: int, n: int) -> None:
    rows = torch.randn(matrices, rank, n) * torch.logspace(-3, 3, rank)[:, None]
    samples = torch.randn(matrices, rank, 2 * rank + 8)
    products = samples @ samples.mT * torch.logspace(2, -2, rank) * torch.logspace(2, -2, rank)[:, None]
    for shift in (0.0, 1e-2):
        expected = exact(rows, products, shift)
        error = (backend.whiten_rows(rows, products, shift) - expected).abs()
        assert (error <= 1e-5 * expected.abs().amax()).all()


@pytest.mark.parametrize("rank", [5, 96, 160])
def test_by_their_own_products_rows_become_orthonormal(backend, rank: int) -> None:
    rows = torch.randn(1, rank, 200) @ torch.diag(torch.logspace(0, -3, 200))
    for shift in (1e-5, 1e-7):
        rows = backend.whiten_rows(rows, rows @ rows.mT, shift)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(rank).expand(1, -1, -1), atol=1e-5, rtol=0)


def test_each_row_is_of_the_span_of_those_up_to_it(backend) -> None:
    rows = torch.randn(1, 40, 60)
    changed = rows.clone()
    changed[:, 33:] = torch.randn(1, 7, 60)
    found, other = (backend.whiten_rows(x, x @ x.mT) for x in (rows, changed))
    torch.testing.assert_close(found[:, :33], other[:, :33])
    assert not torch.allclose(found[:, 33:], other[:, 33:])


def test_of_an_identity_comes_the_inverse_of_the_root(backend) -> None:
    samples = torch.randn(3, 64, 200)
    products = samples @ samples.mT
    inverse = backend.whiten_rows(torch.eye(64).expand(3, -1, -1).contiguous(), products)
    assert (inverse.triu(1) == 0).all()
    torch.testing.assert_close(inverse @ products @ inverse.mT, torch.eye(64).expand(3, -1, -1), atol=1e-4, rtol=0)


def test_rows_of_zeros_stay_zeros(backend) -> None:
    rows = torch.randn(1, 40, 50)
    rows[:, 7] = 0
    found = backend.whiten_rows(rows, rows @ rows.mT, 1e-5)
    assert (found[:, 7] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("noise", [1e-6, 1e-4])
def test_products_that_rounding_has_made_indefinite_leave_finite_rows(backend, noise: float) -> None:
    """All rows are nearly alike: the reference's factor is of no use from the first pivot on that is not positive."""
    if backend is reference:
        pytest.skip("for kernels")
    rows = torch.ones(1, 96, 64) + 1e-5 * torch.randn(1, 96, 64)
    error = noise * torch.randn(1, 96, 96) * 64
    found = backend.whiten_rows(rows, rows @ rows.mT + error + error.mT, 1e-5)
    assert found.isfinite().all() and found.abs().max() < 1e3


def test_what_the_kernel_takes(threads) -> None:
    assert not cuda.takes(160, torch.device("cpu"))
    for rows in (1, 32, 33, 160, cuda.LARGEST):
        assert cuda.shared_bytes(rows) == threads.whiten_shared_bytes(rows)
    assert cuda.shared_bytes(cuda.LARGEST) <= 227 * 1024


@pytest.mark.skipif(bool(cuda.missing()), reason="needs a GPU and the CUDA ops")
def test_what_is_wrong_is_refused() -> None:
    rows, products = torch.zeros(2, 300, 64, device="cuda"), torch.zeros(2, 300, 300, device="cuda")
    with pytest.raises(RuntimeError, match="rank 300 is above 256"):
        cuda.whiten_rows(rows, products)
    with pytest.raises(RuntimeError, match="products has size 300 in dimension 1, not 20"):
        cuda.whiten_rows(rows[:, :20].contiguous(), products)
