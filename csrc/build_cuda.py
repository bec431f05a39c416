"""Builds the CUDA ops with nvcc and ninja: one library per file of ``csrc/kernels/*/*.cu``, in
``shadowkv/_cuda/``.

``python csrc/build_cuda.py [op ...]`` builds some or all; setup.py calls it where nvcc is installed. Further bindings
(``path/name.cu``) go elsewhere: ``--to folder``. They use PyTorch's stable ABI, so that a CPU build of torch is enough
to compile them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = "0x020b000000000000"  # 2.11
ARCHITECTURES = ("arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a")


def find_nvcc() -> str | None:
    """The CUDA compiler: of $CUDA_HOME, on the path, or where CUDA installs itself."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((path for path in candidates if path and Path(path).exists()), None)


def bindings() -> dict[str, Path]:
    """The file of each op that has a CUDA binding, in order of the ops' names."""
    return {path.stem: path for path in sorted((ROOT / "csrc/kernels").glob("*/*.cu"), key=lambda path: path.stem)}


def compile_flags() -> list[str]:
    """Flags that every compilation has, whatever it makes of a source; the compiler tells registers and spills."""
    import torch

    return [
        *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-DUSE_CUDA"),
        *(f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", f"-I{ROOT}/csrc"),
        *("-isystem", f"{Path(torch.__file__).parent}/include"),
    ]


def build(names: list[str], target: Path, work: Path) -> None:
    """Compiles ``names``, ops or files, into ``target``/<name>.so where sources have changed; logs stay in ``work``."""
    import torch

    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError("nvcc is not installed: set CUDA_HOME or put it on the path")
    home = Path(torch.__file__).parent
    flags = " ".join(
        [
            *compile_flags(),
            "-Xcompiler -fPIC -cudart static",
            # Torch loads its libraries privately: symbols are found only in libraries that this one asks for by name.
            f"-Xlinker --no-as-needed -L{home}/lib -ltorch",
            *(f"-gencode '{architecture}'" for architecture in ARCHITECTURES),
        ]
    )
    target.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    sources = bindings() | {Path(name).stem: Path(name).resolve() for name in names if name.endswith(".cu")}
    # All ops are rules and ``names`` the targets, so that builds of different ops leave each other's results alone.
    lines = [
        f"rule cuda\n  command = {nvcc} {flags} -MD -MF $log.d -shared $in -o $out > $log 2>&1 || "
        "(cat $log; exit 1)\n  depfile = $log.d\n  deps = gcc",
        *(f"build {target}/{op}.so: cuda {source}\n  log = {work}/{op}.log" for op, source in sources.items()),
    ]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    subprocess.run(["ninja", "-C", str(work), *(f"{target}/{Path(name).stem}.so" for name in names)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="ops, all by default, or .cu files")
    parser.add_argument(
        "--to", type=Path, help="folder of libraries and logs, instead of shadowkv/_cuda and build/cuda"
    )
    given = parser.parse_args()
    target, work = (given.to.resolve(),) * 2 if given.to else (ROOT / "shadowkv/_cuda", ROOT / "build/cuda")
    build(given.names or list(bindings()), target, work)
