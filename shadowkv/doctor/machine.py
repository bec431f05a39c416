"""The parts of this machine's hardware and software on which an engine's speed depends."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shadowkv import __version__
from shadowkv.installation import adding, clone, has, version_of
from shadowkv.kvcache.memory.free_memory import free_host_bytes
from shadowkv.ops.cuda_compiler import OLDEST_TORCH, CompilerNotFound, find_compiler, find_ninja
from shadowkv.ops.extension import CUDA_FOLDER, built_with, cpu_library, cpu_missing, cuda_of_driver, dotted

DRIVER = Path("/proc/driver/nvidia/version")
EXTRAS = ("json", "page", "gpu", "hf", "eval", "otel", "ray")
"""Those extras of the package that are reported."""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name, compute capability and bytes of memory."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """The machine's hardware and software. The texts are to be read by people, not parsed.

    Attributes:
        shadowkv, python, torch, triton: versions; None for packages that are not installed.
        source: folder of the clone that the package runs from; None if it was installed without sources.
        cuda_runtime: version of CUDA that torch was built with; None for a CPU build.
        driver: version of NVIDIA's driver and of its CUDA; None if there is no driver.
        gpus: devices that torch can use.
        gpu_problem: why torch finds no device although there is a driver; None if it finds one or there is no driver.
        cuda_compiler, cpp_compiler: the compiler that would build the ops; if there is none, what is missing.
        cpp_ops: the library of the C++ ops; if it cannot be used, the reasons.
        cuda_ops: the libraries of the CUDA ops that were built.
        cores: logical cores that this process can use.
        simd: the instruction set of the C++ ops; without these ops, torch's instruction set.
        total_bytes: host memory.
        free_bytes: free host memory, within the limits of control groups.
        extras: maps each extra to the command that installs it, or to None if it is installed.
    """

    shadowkv: str
    source: str | None
    python: str
    torch: str
    triton: str | None
    cuda_runtime: str | None
    driver: str | None
    gpus: list[Gpu]
    gpu_problem: str | None
    cuda_compiler: str
    cpp_compiler: str
    cpp_ops: str
    cuda_ops: str
    cores: int
    simd: str
    total_bytes: int
    free_bytes: int
    extras: dict[str, str | None]

    @classmethod
    def here(cls) -> Machine:
        """Inspects this machine. This takes a second or two."""
        gpus, folder, driver = _gpus(), clone(), _driver()
        return cls(
            shadowkv=__version__,
            source=None if folder is None else str(folder),
            python=f"{platform.python_version()} ({sys.executable})",
            torch=torch.__version__,
            triton=version_of("triton"),
            cuda_runtime=torch.version.cuda,
            driver=driver and f"{driver}{f', CUDA {dotted(cuda)}' if (cuda := cuda_of_driver()) else ''}",
            gpus=gpus,
            gpu_problem=None if gpus or driver is None else _gpu_problem(),
            cuda_compiler=_cuda_compiler(),
            cpp_compiler=_cpp_compiler(),
            cpp_ops="; ".join(cpu_missing()) or cpu_library().name,
            cuda_ops=_cuda_ops(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            simd=_simd(),
            total_bytes=psutil.virtual_memory().total,
            free_bytes=free_host_bytes(),
            extras={name: None if has(name) else adding(name) for name in EXTRAS},
        )


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found: list[Any] = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [Gpu(gpu.name, (gpu.major, gpu.minor), gpu.total_memory) for gpu in found]


def _gpu_problem() -> str:
    if torch.version.cuda is None:
        return "torch is a CPU build: install a CUDA build of it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "torch finds no GPU (check $CUDA_VISIBLE_DEVICES)"


def _driver() -> str | None:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER.read_text())
        return found and found[1]
    except OSError:  # not Linux, or a container without that file
        return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _cuda_compiler() -> str:
    cuda = torch.version.cuda
    try:
        compiler = find_compiler(None if cuda is None else int(cuda.partition(".")[0]))
        find_ninja()
    except CompilerNotFound as error:
        return f"none: {error}"
    return str(compiler)


def _cpp_compiler() -> str:
    return _first_line(os.environ.get("CXX") or "g++", "--version") or "none: install g++ (apt-get install g++)"


def _cuda_ops() -> str:
    libraries, built = sorted(path.stem for path in CUDA_FOLDER.glob("*.so")), built_with()
    if not libraries:
        return "not built"
    nvcc = f" with nvcc {built}" if built else ""
    return (
        f"{len(libraries)} libraries, built{nvcc}, for torch {dotted(OLDEST_TORCH)} and later: {', '.join(libraries)}"
    )


def _simd() -> str:
    if not cpu_missing():
        return str(torch.ops.shadowkv.cpu_isa())
    return torch.backends.cpu.get_cpu_capability()


def _first_line(program: str, *arguments: str) -> str | None:
    """Returns the first line of a program's output; None if the program is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, timeout=30)
    return next(iter(done.stdout.splitlines()), "").strip() or None if done.returncode == 0 else None
