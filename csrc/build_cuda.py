"""Builds the CUDA ops with nvcc and ninja: one library per file of ``csrc/kernels/*/*.cu``, in
``shadowkv/_cuda/``.

``python csrc/build_cuda.py [op ...]`` builds some or all; setup.py builds them, too. Further bindings
(``path/name.cu``) go elsewhere: ``--to folder``. They use PyTorch's stable ABI, so that a CPU build of torch is enough
to compile them. The compiler is a toolkit's or PyPI's (``shadowkv/ops/cuda_compiler.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FINDER = runpy.run_path(str(ROOT / "shadowkv/ops/cuda_compiler.py"))
SOURCES = runpy.run_path(str(ROOT / "shadowkv/ops/sources.py"))
TARGET, WORK = ROOT / "shadowkv/_cuda", ROOT / "build/cuda"
TORCH = "0x{:02x}{:02x}000000000000".format(*FINDER["OLDEST_TORCH"])
TUNED_FOR = "sm_90a"
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
"""GPUs that the other half of a library is for: Ampere and Ada run what is compiled for sm_80, and for Blackwell the
driver compiles its PTX, once, when a library is loaded."""
GPUS = (f"{OTHERS[0]}-{OTHERS[-1].removeprefix('sm_')}", TUNED_FOR)
ARCHITECTURES = ("arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a")
CHOICE = "SHADOWKV_CUDA_OPS"
CHOICES = ("auto", "yes", "no")


def choice() -> str:
    """Whether to build, of the environment: ``auto`` where they run here, ``yes`` in any case, ``no``."""
    chosen = os.environ.get(CHOICE) or "auto"
    if chosen not in CHOICES:
        raise SystemExit(f"{CHOICE}={chosen!r} must be one of {', '.join(CHOICES)}")
    return chosen


def check_torch() -> None:
    """Raises RuntimeError where the torch that is installed is too old to compile the ops against, or to load them."""
    import torch

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < FINDER["OLDEST_TORCH"]:
        oldest = ".".join(map(str, FINDER["OLDEST_TORCH"]))
        raise RuntimeError(f"the CUDA ops need torch {oldest} or later, this is {torch.__version__}")


def find_compiler() -> Any:
    """The compiler that fits the installed torch; raises CompilerNotFound (an OSError) with the remedy."""
    import torch

    cuda = torch.version.cuda
    return FINDER["find_compiler"](None if cuda is None else int(cuda.partition(".")[0]))


def bindings() -> dict[str, Path]:
    """The file of each op that has a CUDA binding, in order of the ops' names."""
    return {path.stem: path for path in sorted((ROOT / "csrc/kernels").glob("*/*.cu"), key=lambda path: path.stem)}


def compile_flags() -> list[str]:
    """Flags that every compilation has, whatever it makes of a source; the compiler tells registers and spills."""
    import torch

    return [
        *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-DUSE_CUDA"),
        *(f"-DTORCH_TARGET_VERSION={TORCH}", f"-I{ROOT}/csrc"),
        *("-isystem", f"{Path(torch.__file__).parent}/include"),
    ]


def build(names: list[str] | None = None, target: Path = TARGET, work: Path = WORK) -> Path:
    """Compiles ``names``, ops or files (None: all ops), into ``target``/<name>.so where sources have changed, and
    returns ``target``; logs stay in ``work``. Raises OSError,
    RuntimeError or CalledProcessError where that fails."""
    import torch

    check_torch()
    compiler, ninja, home = find_compiler(), FINDER["find_ninja"](), Path(torch.__file__).parent
    flags = " ".join(
        [
            *compile_flags(),
            *("-Xcompiler -fPIC -cudart static", *compiler.link_flags),
            # Torch loads its libraries privately: symbols are found only in libraries that this one asks for by name.
            f"-Xlinker --no-as-needed -L{home}/lib -ltorch",
            *(f"-gencode '{architecture}'" for architecture in ARCHITECTURES),
        ]
    )
    target.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    names = list(bindings()) if names is None else names
    sources = bindings() | {Path(name).stem: Path(name).resolve() for name in names if name.endswith(".cu")}
    # All ops are rules and ``names`` the targets, so that builds of different ops leave each other's results alone.
    lines = [
        f"rule cuda\n  command = {compiler.nvcc} {flags} -MD -MF $log.d -shared $in -o $out > $log 2>&1 || "
        "(cat $log; exit 1)\n  description = compiling $out\n  depfile = $log.d\n  deps = gcc",
        *(f"build {target}/{op}.so: cuda {source}\n  log = {work}/{op}.log" for op, source in sources.items()),
    ]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    print(f"CUDA ops: {len(names)} with {compiler}, for torch {torch.__version__}", flush=True)
    subprocess.run([ninja, "-C", str(work), *(f"{target}/{Path(name).stem}.so" for name in names)], check=True)
    record = target / "built.json"  # what shadowkv doctor says of them, and which sources they are built from
    digests = json.loads(record.read_text()).get("sources", {}) if record.is_file() else {}
    digests |= {op: SOURCES["cuda_digest"](sources[op], ROOT) for op in (Path(name).stem for name in names)}
    about = {"nvcc": compiler.version, "torch": torch.__version__, "sources": digests}
    record.write_text(json.dumps(about) + "\n")
    return target


def compile_for(source: Path, gpu: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Compiles a binding for one of ``GPUS``, without what makes a library of it: the front end sees the host's code,
    and nothing is linked. Kernels are optimised for ``TUNED_FOR`` alone, where the compiler tells their registers; for
    each of ``OTHERS`` PTX becomes machine code, as their drivers would make it."""
    target = ["-cubin", f"-arch={TUNED_FOR}"]
    if gpu != TUNED_FOR:  # optimising takes most of the time of the largest sources
        target = ["--Ofast-compile=max", "-fatbin", f"-gencode=arch=compute_80,code=[{','.join(OTHERS)}]"]
    command = [find_compiler().nvcc, *compile_flags(), *target, str(source), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True)


def check(names: list[str]) -> bool:
    """Whether ops compile for every GPU that they are built for; prints the compiler's errors."""
    cases = [(name, gpu) for name in names for gpu in GPUS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = [
            threads.submit(compile_for, bindings()[name], gpu, Path(folder, f"{name}.{gpu}")) for name, gpu in cases
        ]
        done = [job.result() for job in jobs]
    for (name, gpu), result in zip(cases, done):
        print(f"{name} for {gpu}: {f'failed{chr(10)}{result.stderr}' if result.returncode else 'compiles'}")
    return not any(result.returncode for result in done)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="ops, all by default, or .cu files")
    parser.add_argument(
        "--to", type=Path, help="folder of libraries and logs, instead of shadowkv/_cuda and build/cuda"
    )
    parser.add_argument("--check", action="store_true", help="compile alone, for every GPU, and keep nothing")
    given = parser.parse_args()
    if unknown := [name for name in given.names if not name.endswith(".cu") and name not in bindings()]:
        parser.error(f"no op is called {', '.join(unknown)}; known: {', '.join(bindings())}")
    try:
        if given.check:
            return 0 if check(given.names or list(bindings())) else 1
        build(given.names or None, *((given.to.resolve(),) * 2 if given.to else ()))
    except subprocess.CalledProcessError as error:
        return error.returncode  # ninja has said why
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
