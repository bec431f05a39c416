"""Package discovery, the C++ extension and the CUDA ops. The metadata is in pyproject.toml.

The extension, shadowkv/_cpu_torch<version>.*.so, holds faster CPU backends of some ops; without a compiler, or where
torch is not importable while building, it is left out, and those ops run in PyTorch. The CUDA ops, shadowkv/_cuda/*.so,
are built (csrc/build_cuda.py) where torch is a CUDA build and a CUDA compiler that fits it and ninja are installed, and
otherwise left out. With SHADOWKV_CUDA_OPS=yes they are built for any torch, and the build fails if they cannot be; with
"no" they are left out.
"""

import itertools
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info
from setuptools.modified import newer_group

CUDA_BUILDER = runpy.run_path("csrc/build_cuda.py")
SOURCES = runpy.run_path("shadowkv/ops/sources.py")


def skip(reason: object) -> None:
    print(f"shadowkv: CPU extension left out, its ops will run in PyTorch: {reason}", file=sys.stderr)


def extensions() -> list[Extension]:
    if sys.platform == "win32":
        skip("its sources need GCC or Clang")
        return []
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        skip(f"{error}; install torch, then build with --no-build-isolation")
        return []
    # OpenMP is compiled for but not linked: the symbols come with libtorch_cpu. A second OpenMP runtime would bring a
    # second pool of threads, and waiting threads spin.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    major, minor = torch.__version__.split(".")[:2]
    cpu = Extension(
        f"shadowkv._cpu_torch{major}_{minor}",  # PyTorch's interface in C++ changes with each minor version
        sources=sorted(map(str, Path("csrc/cpu").rglob("*.cpp"))),
        depends=["setup.py", *map(str, Path("csrc").glob("*.h")), *map(str, Path("csrc/cpu").rglob("*.h"))],
        define_macros=[("SHADOWKV_CPU_SOURCES", f'"{SOURCES["cpu_digest"](Path())}"')],
        include_dirs=["csrc", *include_paths()],
        library_dirs=library_paths(),
        libraries=["c10", "torch_cpu"],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden", *openmp],
        language="c++",
        optional=True,  # editable installs copy what was built, and would miss it
    )
    return [cpu]


def check_cuda() -> None:
    """Raises RuntimeError where no GPU would be used."""
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is a CPU build")


class BuildIfPossible(build_ext):
    def run(self) -> None:
        super().run()
        choice = CUDA_BUILDER["choice"]()
        if choice == "no":
            return
        try:
            if choice != "yes":
                check_cuda()
            libraries = CUDA_BUILDER["build"]()
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            if choice == "yes":
                raise
            print(f"shadowkv: CUDA ops left out: {error}", file=sys.stderr)
            return
        if not self.inplace:  # they are built in the tree, where the next build finds what has not changed
            shutil.copytree(libraries, Path(self.build_lib, "shadowkv", libraries.name), dirs_exist_ok=True)

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_filename(ext.name))  # in the tree, by an earlier build whose progress was seen
        current = built.exists() and SOURCES["is_current"](built, Path())
        if current and not newer_group([*ext.sources, *ext.depends], str(built)):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, target)
            return
        compile_file, numbers = self.compiler._compile, itertools.count(1)

        def told(built_object: str, source: str, *rest: Any) -> None:
            print(f"C++ ops: file {next(numbers)} of {len(ext.sources)}, {source}", flush=True)
            compile_file(built_object, source, *rest)

        self.compiler._compile = told
        self.force = True  # or files that are older than the library would not be compiled
        try:
            super().build_extension(ext)
        except Exception as error:
            skip(error)


class MetadataOfBuild(egg_info):
    """Asks for the torch that the C++ ops need, where there are any."""

    def run(self) -> None:
        for extension in self.distribution.ext_modules:
            version = extension.name.partition("_cpu_torch")[2].replace("_", ".")
            needed = [
                f"torch=={version}.*" if re.fullmatch(r"torch\b.*", requirement) else requirement
                for requirement in self.distribution.install_requires
            ]
            self.distribution.install_requires = self.distribution.metadata.install_requires = needed
        super().run()


setup(
    packages=find_packages(include=["shadowkv", "shadowkv.*"]),
    package_data={
        "shadowkv": ["py.typed"],
        "shadowkv.serve.page": ["static/*", "static/*/*"],
        "shadowkv.models": ["catalogue/*.json", "adapters/*/*"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildIfPossible, "egg_info": MetadataOfBuild},
)
