"""Package discovery and the C++ extension. The metadata is in pyproject.toml.

The extension, shadowkv/_cpu.*.so, holds faster CPU backends of some ops; without a compiler, or where torch is not
importable while building, it is left out, and those ops run in PyTorch. The CUDA ops, shadowkv/_cuda/*.so, are built
where torch is a CUDA build and nvcc and ninja are installed.
"""

import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext


def skip(reason: object) -> None:
    print(f"shadowkv: CPU extension left out, its ops will run in PyTorch: {reason}", file=sys.stderr)


def extensions() -> list[Extension]:
    if sys.platform == "win32":
        skip("its sources need GCC or Clang")
        return []
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        skip(f"{error}; install torch, then build with --no-build-isolation")
        return []
    # OpenMP is compiled for but not linked: the symbols come with libtorch_cpu. A second OpenMP runtime would bring a
    # second pool of threads, and waiting threads spin.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    cpu = Extension(
        "shadowkv._cpu",
        sources=sorted(map(str, Path("csrc/cpu").rglob("*.cpp"))),
        depends=[*map(str, Path("csrc").glob("*.h")), *map(str, Path("csrc/cpu").rglob("*.h"))],
        include_dirs=["csrc", *include_paths()],
        library_dirs=library_paths(),
        libraries=["c10", "torch_cpu"],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden", *openmp],
        language="c++",
        optional=True,  # editable installs copy what was built, and would miss it
    )
    return [cpu]


class BuildIfPossible(build_ext):
    def run(self) -> None:
        super().run()
        try:
            self.build_cuda()
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # no torch, nvcc, ninja …
            print(f"shadowkv: CUDA ops left out: {error}", file=sys.stderr)

    def build_cuda(self) -> None:
        import torch

        if torch.version.cuda is None:
            raise RuntimeError("torch is a CPU build (python csrc/build_cuda.py builds them all the same)")
        package = Path("shadowkv" if self.inplace else self.build_lib, "" if self.inplace else "shadowkv")
        builder = runpy.run_path("csrc/build_cuda.py")
        builder["build"](
            list(builder["bindings"]()), package.resolve() / "_cuda", Path(self.build_temp).resolve() / "cuda"
        )

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            skip(error)


setup(
    packages=find_packages(include=["shadowkv", "shadowkv.*"]),
    package_data={
        "shadowkv": ["py.typed"],
        "shadowkv.serve.page": ["static/*"],
        "shadowkv.models": ["catalogue/*.json", "adapters/*/*"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildIfPossible},
)
