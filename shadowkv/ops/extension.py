"""Loads the C++ extension of the CPU backends; ``python -m shadowkv.ops.extension`` says whether it is there."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

NAME = "shadowkv._cpu"


@cache
def load_cpu() -> bool:
    """Makes ``torch.ops.shadowkv`` available; False where the extension was not built.

    Warns if it was built for another torch and cannot be loaded.
    """
    spec = find_spec(NAME)
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        warnings.warn(f"{spec.origin} cannot be loaded, reinstall shadowkv: {error}", stacklevel=2)
        return False
    torch.library.register_fake("shadowkv::paged_attention", _paged_attention_shapes)
    return True


def _paged_attention_shapes(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def main() -> int:
    """Prints one line; returns the exit status."""
    if load_cpu():
        print(f"C++ CPU backends: built, running on {torch.ops.shadowkv.cpu_isa()} here")
    else:
        print("C++ CPU backends: not built, ops run in PyTorch (pip install -v --no-build-isolation -e . says why)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
