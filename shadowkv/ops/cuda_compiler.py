"""Finds the CUDA compiler that builds the CUDA ops: a CUDA toolkit's, or the one in NVIDIA's packages on PyPI.

setup.py and csrc/build_cuda.py run this file by its path before the package is installed, so it imports only the
standard library.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

OLDEST_TORCH = (2, 11)
"""The CUDA ops use PyTorch's stable ABI of this version. A library built with one torch loads in all later ones."""

OLDEST_CAPABILITY = (8, 0)
"""Lowest compute capability of GPUs that the CUDA ops run on."""

PACKAGES = ("cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]>=13,<14", "ninja")
"""Packages of the extra ``nvcc`` (271 MB), for machines without a CUDA toolkit. PyPI has no nvcc of CUDA 12."""

PYPI_MAJOR = 13

PYPI = "PyPI's packages"
"""``CudaCompiler.origin`` of a compiler from PyPI."""

INSTALLED = Path("/usr/local/cuda")
"""Where the CUDA toolkit installs itself."""


class CompilerNotFound(FileNotFoundError):
    """There is no suitable compiler. The message says what was found and what to install."""


@dataclass(frozen=True)
class CudaCompiler:
    """A CUDA compiler.

    Attributes:
        nvcc: path of the program.
        version: the compiler's version, such as ``13.0.88``: major and minor version of CUDA, and the release.
        origin: where it was found, for messages.
        link_flags: flags with which nvcc finds its own libraries.
    """

    nvcc: Path
    version: str
    origin: str
    link_flags: tuple[str, ...] = ()

    @property
    def major(self) -> int:
        """Major version of CUDA. Libraries run with drivers of this major version and later."""
        return int(self.version.partition(".")[0])

    def __str__(self) -> str:
        return f"nvcc {self.version} of {self.origin} ({self.nvcc})"


def find_compiler(major: int | None) -> CudaCompiler:
    """Returns the first suitable CUDA compiler. Looks in $CUDA_HOME, on the path, in ``INSTALLED``, and in this
    interpreter's packages from PyPI.

    Args:
        major: major version of CUDA that torch was built with. A library built with another version may need a newer
            driver than torch does. None, for a CPU build of torch, accepts any version.

    Raises:
        CompilerNotFound: there is no suitable compiler, or no C++ compiler for it to use. The message gives the remedy.
    """
    passed_over = []
    for compiler in _compilers():
        if major in (None, compiler.major):
            if shutil.which(os.environ.get("NVCC_CCBIN") or "g++") is None:
                raise CompilerNotFound(f"{compiler} needs a C++ compiler: install g++ (apt-get install g++)")
            return compiler
        passed_over.append(str(compiler))
    fitting = "a CUDA compiler" if major is None else f"a compiler of CUDA {major}, which torch was built with"
    unfit = f"; compilers of other versions: {', '.join(passed_over)}" if passed_over else ""
    raise CompilerNotFound(f"{fitting}, is not installed{unfit}. {_remedy(major)}")


def find_ninja() -> str:
    """Returns the path of ninja, which runs the compilations. Raises CompilerNotFound, with the remedy, if it is not
    installed."""
    beside_python = str(Path(sys.executable).parent)  # pip puts ninja here, even if the environment is not activated
    ninja = shutil.which("ninja", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if ninja is None:
        raise CompilerNotFound(f"ninja is not installed: {pip_install('ninja')}")
    return ninja


def pip_install(*requirements: str) -> str:
    """Returns the command that installs requirements for this interpreter, as a user would type it in the current
    folder."""
    python = sys.executable.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{shlex.quote(python)} -m pip install {shlex.join(requirements)}"


def _remedy(major: int | None) -> str:
    if major in (None, PYPI_MAJOR):
        return f"To install it: {pip_install(*PACKAGES)}"
    return (
        f"Install NVIDIA's toolkit of CUDA {major} and set CUDA_HOME, or a torch for CUDA {PYPI_MAJOR}, "
        "whose compiler is on PyPI too"
    )


def _compilers() -> list[CudaCompiler]:
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    places = [(Path(home, "bin/nvcc"), "$CUDA_HOME")] if home else []
    places += [(Path(on_path), "the path")] if on_path else []
    places.append((INSTALLED / "bin/nvcc", "CUDA's toolkit"))
    found = [CudaCompiler(nvcc, version, origin) for nvcc, origin in places if (version := _version(nvcc))]
    for folder in _packages():
        root = folder / f"cu{PYPI_MAJOR}"
        if version := _version(root / "bin/nvcc"):  # without the flag, nvcc looks in lib64
            found.append(CudaCompiler(root / "bin/nvcc", version, PYPI, (f"-L{root}/lib",)))
    return found


def _packages() -> list[Path]:
    """Folders of the Python package ``nvidia``, which NVIDIA's wheels share."""
    nvidia = find_spec("nvidia")
    return [Path(folder) for folder in (nvidia and nvidia.submodule_search_locations) or ()]


def _version(nvcc: Path) -> str | None:
    """The program's version, such as ``13.0.88``; None if it is missing or does not run."""
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"V(\d+\.\d+\.\d+)", version)
    return release and release[1]
