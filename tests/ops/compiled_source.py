"""C++ that kernels share, compiled for tests."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """Compiles a source, which may include files of ``csrc``. Skips the test without a compiler."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    # Some systems' compilers make longjmp end a program that jumps between stacks, as threads of a kernel do here.
    flags = ("-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", *flags)
    subprocess.run([COMPILER, *flags, f"-I{CSRC}", source, "-o", source.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


def kernel_on_cpu(name: str, folder: Path) -> ctypes.CDLL:
    """Compiles ``cuda_on_cpu/NAME.cpp`` in a new folder. It runs a CUDA kernel on a CPU, whose threads take turns."""
    source = shutil.copytree(Path(__file__).parent / "cuda_on_cpu", folder / name)
    return compiled(
        source / f"{name}.cpp", "-O1", "-Wno-sign-compare", "-fno-extern-tls-init", f"-iquote{source}", f"-I{source}"
    )
