"""Digests of the sources that a library is built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadowkv.ops.sources import cuda_digest


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a binding that includes a file beside it, which includes one of another folder."""
    files = {
        "csrc/kernels/op/op.cu": '#include "shape.cuh"\n#include <cuda.h>\n#  include "kernels/absent.h"\n',
        "csrc/kernels/op/shape.cuh": '#pragma once\n#include "kernels/common/mma.cuh"\n#include "constants.h"\n',
        "csrc/kernels/common/mma.cuh": '#include "kernels/op/shape.cuh"\n',
        "csrc/kernels/common/other.cuh": "",
        "csrc/constants.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ("csrc/kernels/op/op.cu", True),
        ("csrc/kernels/op/shape.cuh", True),
        ("csrc/kernels/common/mma.cuh", True),
        ("csrc/constants.h", True),
        ("csrc/kernels/common/other.cuh", False),
    ],
)
def test_a_digest_is_of_all_files_that_a_binding_includes(clone: Path, changed: str, differs: bool) -> None:
    binding = clone / "csrc/kernels/op/op.cu"
    before = cuda_digest(binding, clone)
    with (clone / changed).open("a") as file:
        file.write("// changed\n")
    assert (cuda_digest(binding, clone) != before) is differs


def test_a_digest_does_not_depend_on_the_clones_place(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("moved") / "clone"
    before = cuda_digest(clone / "csrc/kernels/op/op.cu", clone)
    clone.rename(moved)
    assert cuda_digest(moved / "csrc/kernels/op/op.cu", moved) == before
