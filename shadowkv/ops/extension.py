"""Loads the compiled backends; ``python -m shadowkv.ops.extension`` lists which of them are available."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.dequantise_blocks.reference import columns_of
from shadowkv.ops.page import PAGE
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries.reference import PLANES, plane_bytes

NAME = "shadowkv._cpu"

CUDA_FOLDER = Path(__file__).resolve().parent.parent / "_cuda"
"""Libraries of the CUDA backends, one per op (``csrc/build_cuda.py``)."""


@cache
def load_cpu() -> bool:
    """Makes ``torch.ops.shadowkv`` available; False if the extension was not built.

    Warns if it was built for another torch and cannot be loaded, or from older sources and lacks an op.
    """
    spec = find_spec(NAME)
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        warnings.warn(f"{spec.origin} cannot be loaded, reinstall shadowkv: {error}", stacklevel=2)
        return False
    functions = (
        _attend_selected,
        _decode_layers,
        _dequantise_blocks,
        _paged_attention,
        _quantised_matmul,
        _select_by_sketch,
        _sign_scores,
        _sketch_queries,
    )
    fakes = {fake.__name__[1:]: fake for fake in functions}
    if not all(hasattr(torch.ops.shadowkv, name) for name in fakes):
        warnings.warn(f"{spec.origin} is of an older version, reinstall shadowkv", stacklevel=2)
        return False
    for name, fake in fakes.items():
        torch.library.register_fake(f"shadowkv::{name}", fake)
    return True


def block_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one thread block on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks this one
    return int(properties.shared_memory_per_block_optin)


def _attend_selected(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _decode_layers(
    x: Tensor, attended: Any, vectors: Any, matrices: list[Tensor], forms: Any, runs: list[int], k: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, dim = k[0].shape[1], k[0].shape[3]
    q = x.new_empty(len(x), sum(len(matrix) for matrix in matrices[: runs[0]]) // dim - 2 * heads, dim)
    return x.new_empty(x.shape), q, q.new_empty(q.shape), q.new_empty(q.shape[:2])


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _sign_scores(whole: Tensor, unit: Tensor, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    return unit.new_empty(len(pages), signs.shape[1], PAGE // RUN * pages.shape[1], dtype=torch.float16)


def _select_by_sketch(whole: Tensor, unit: Tensor, coarse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (*coarse.shape[:2], rest[-1])
    return coarse.new_empty(shape, dtype=torch.int64), coarse.new_empty(shape, dtype=torch.float32)


def _sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> tuple[Tensor, ...]:
    (batch, heads, dim), unit = q.shape, q.new_empty(q.shape[:2])
    whole = q.new_empty(batch, heads, 8, plane_bytes(dim), dtype=torch.int8)
    total, planes = unit.int(), whole[:, :, :PLANES].to(torch.uint8)
    return whole, unit, total, planes, total.clone(), unit.clone()


def _quantised_matmul(x: Tensor, blocks: Tensor, form: str) -> Tensor:
    return x.new_empty(len(x), len(blocks))


def _dequantise_blocks(blocks: Tensor, form: str) -> Tensor:
    return blocks.new_empty(len(blocks), columns_of(blocks, form), dtype=torch.float32)


@cache
def load_cuda(name: str, *fakes: str) -> bool:
    """Loads the library of a CUDA backend; False if it was not built or there is no GPU.

    Warns if it cannot be loaded, or was built from older sources and lacks an op. ``fakes`` are its ops in
    ``torch.ops.shadowkv_cuda`` that only write to arguments.
    """
    path = CUDA_FOLDER / f"{name}.so"
    if not path.exists() or not torch.cuda.is_available():
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        warnings.warn(f"{path} cannot be loaded, reinstall shadowkv: {error}", stacklevel=2)
        return False
    if missing := [op for op in fakes if not hasattr(torch.ops.shadowkv_cuda, op)]:
        warnings.warn(f"{path} is of an older version and lacks {', '.join(missing)}, reinstall shadowkv", stacklevel=2)
        return False
    for op in fakes:
        torch.library.register_fake(f"shadowkv_cuda::{op}", lambda *_: None)
    return True


def main() -> int:
    """Prints a line per kind of backend; returns the exit status."""
    if load_cpu():
        print(f"C++ CPU backends: built, running on {torch.ops.shadowkv.cpu_isa()} here")
    else:
        print("C++ CPU backends: not built, ops run in PyTorch (pip install -v --no-build-isolation -e . says why)")
    built = sorted(path.stem for path in CUDA_FOLDER.glob("*.so"))
    print(f"CUDA backends: {', '.join(built) or 'not built'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
