"""Builds the CUDA ops where there is an NVIDIA GPU, for ``make``: with a toolkit that fits torch, or with the compiler
that is on PyPI, which it installs then. Where it cannot, it says why and what to do, and make stops: without them a
server on a GPU would start all the same, and be slow.

    python scripts/set_up_cuda.py [pip's options ...]
    python scripts/set_up_cuda.py --extras             # those of the package that this machine's server is to have
"""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

from check_cpu_install import has_nvidia_gpu

BUILDER = runpy.run_path(str(Path(__file__).resolve().parents[1] / "csrc/build_cuda.py"))
FINDER = BUILDER["FINDER"]
WITHOUT = f"or go on without the CUDA ops: {BUILDER['CHOICE']}=no make ..."


def why_no_gpu_runs() -> str | None:
    """What keeps torch from the GPU of this machine, with the remedy; None if nothing does."""
    import torch

    if torch.version.cuda is None:
        remedy = "install a CUDA build of torch into .venv"
        return f"torch {torch.__version__} is a CPU build, and the server would run on the CPU: {remedy}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        remedy = "update NVIDIA's driver, or install a torch for its version of CUDA into .venv"
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: {error}: {remedy}"
    return None


def build(pip_options: list[str]) -> None:
    """Installs what is missing and builds; raises OSError, RuntimeError or CalledProcessError."""
    import torch

    if reason := why_no_gpu_runs():
        raise RuntimeError(reason)
    capability, oldest = torch.cuda.get_device_capability(), FINDER["OLDEST_CAPABILITY"]
    if capability < oldest:
        least = ".".join(map(str, oldest))
        print(f"CUDA ops: none, {torch.cuda.get_device_name()} has a compute capability below {least}")
        return
    BUILDER["check_torch"]()
    install = [sys.executable, "-m", "pip", "install", *pip_options]
    try:
        BUILDER["find_compiler"]()
        FINDER["find_ninja"]()
    except FINDER["CompilerNotFound"] as error:
        if int((torch.version.cuda or "0").partition(".")[0]) != FINDER["PYPI_MAJOR"]:
            raise
        print(f"CUDA ops: {error}\nDoing so: 271 MB", flush=True)
        subprocess.run([*install, *FINDER["PACKAGES"]], check=True)
        importlib.invalidate_caches()
    print("CUDA ops: compiling takes about five minutes of one core's time", flush=True)
    BUILDER["build"]()


def extras() -> list[str]:
    """Extras of the package: on a GPU of CUDA 13 products with weights in few bits, too."""
    found = ["json", "page"]
    if not has_nvidia_gpu() or BUILDER["choice"]() == "no" or why_no_gpu_runs():
        return found
    import torch

    major, recent = (torch.version.cuda or "").partition(".")[0], FINDER["OLDEST_CAPABILITY"]
    fits = major == str(FINDER["PYPI_MAJOR"]) and torch.cuda.get_device_capability() >= recent
    return [*found, "gpu"] if fits else found


def main() -> int:
    """Returns the exit status."""
    if sys.argv[1:] == ["--extras"]:
        print(",".join(extras()))
        return 0
    if not has_nvidia_gpu() or BUILDER["choice"]() == "no":
        return 0
    try:
        build(sys.argv[1:])
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: this machine has an NVIDIA GPU, but {error}\n({WITHOUT})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
