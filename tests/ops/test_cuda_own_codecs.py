"""Codecs that only these tests know go through the kernels: a functor each (``own_codecs/*.cuh``), and nothing else."""

from pathlib import Path

import pytest
import torch
from own_codecs.byte_rows import BLOCK_BYTES, ROTATED_BYTES
from own_codecs.latent_fp8 import Fp8Latents
from test_cuda_attend_selected import attend, check, log_weights, problem

from shadowkv.ops.attend_selected import cuda, cuda_sm90
from shadowkv.ops.codec import CodecId

LIBRARY = Path(__file__).parents[2] / "build/tests/attend_codecs.so"
PAIRS = [
    (Fp8Latents(), "rows"),
    (Fp8Latents(), ROTATED_BYTES),
    ("int8", ROTATED_BYTES),
    ("int8", BLOCK_BYTES),
]

if cuda.missing() or not LIBRARY.exists():
    pytest.skip(
        "needs a CUDA device and csrc/build_cuda.py --to build/tests tests/ops/own_codecs/attend_codecs.cu",
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    torch.ops.load_library(str(LIBRARY))
    for keys, values in PAIRS:
        ids = getattr(keys, "id", CodecId.LATENT_INT8), getattr(values, "id", CodecId.DENSE)
        monkeypatch.setitem(cuda.KERNELS, ids, "attend_codecs")


@pytest.mark.parametrize(("heads", "group", "dim", "rank"), [(3, 1, 64, 64), (2, 4, 128, 160), (1, 8, 256, 96)])
@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_kernels_equal_the_reference_over_ragged_selections(seed, heads, group, dim, rank, in_buffer, keys, values):
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(heads, group, dim, keys, values, in_buffer=in_buffer, tokens=tokens, rank=rank)
        check(args, attend(args))


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_splits_and_weights(seed, monkeypatch, keys, values):
    args = problem(2, 4, 128, keys, values, tokens=[3000, 5, 900], rank=160, chunk=1, count=700)
    args = (*args, log_weights(args[3]))
    monkeypatch.setattr(cuda, "splits", lambda *args: 3)
    check(args, attend(args))


@pytest.mark.skipif(bool(cuda_sm90.missing()), reason="needs a Hopper and the attend_latents_sm90 library")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [4, 7])
def test_values_go_through_the_kernel_for_hopper(seed, monkeypatch, dim, group):
    monkeypatch.setitem(cuda_sm90.KERNELS, ROTATED_BYTES.id, "attend_codecs_sm90")
    args = problem(3, group, dim, "int4", ROTATED_BYTES, tokens=[700, 0, 64, 129, 8], chunk=1, count=500, rank=64)
    check(args, cuda_sm90.attend_selected(*args))
