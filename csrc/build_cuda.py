"""Builds the CUDA ops with nvcc and ninja: one library per file of ``csrc/bindings/*.cu``, in ``shadowkv/_cuda/``.

``python csrc/build_cuda.py [op ...]`` builds some or all; setup.py calls it where nvcc is installed. The bindings use
PyTorch's stable ABI, so that a CPU build of torch is enough to compile them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = "0x020b000000000000"  # 2.11
ARCHITECTURES = ("arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a")


def find_nvcc() -> str | None:
    """The CUDA compiler: of $CUDA_HOME, on the path, or where CUDA installs itself."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((path for path in candidates if path and Path(path).exists()), None)


def ops() -> list[str]:
    """Names of all ops that have a CUDA binding."""
    return sorted(path.stem for path in (ROOT / "csrc/bindings").glob("*.cu"))


def compile_flags() -> list[str]:
    """Flags that every compilation has, whatever it makes of a source; the compiler tells registers and spills."""
    import torch

    return [
        *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-DUSE_CUDA"),
        *(f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", f"-I{ROOT}/csrc"),
        *("-isystem", f"{Path(torch.__file__).parent}/include"),
    ]


def build(names: list[str], target: Path, work: Path) -> None:
    """Compiles ``names`` into ``target``/<name>.so where sources have changed; the compiler's logs stay in ``work``."""
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
    # All ops are rules and ``names`` the targets, so that builds of different ops leave each other's results alone.
    lines = [
        f"rule cuda\n  command = {nvcc} {flags} -MD -MF $log.d -shared $in -o $out > $log 2>&1 || "
        "(cat $log; exit 1)\n  depfile = $log.d\n  deps = gcc",
        *(f"build {target}/{op}.so: cuda {ROOT}/csrc/bindings/{op}.cu\n  log = {work}/{op}.log" for op in ops()),
    ]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    subprocess.run(["ninja", "-C", str(work), *(f"{target}/{name}.so" for name in names)], check=True)


if __name__ == "__main__":
    build(sys.argv[1:] or ops(), ROOT / "shadowkv/_cuda", ROOT / "build/cuda")
