"""Where figures come from: the code, the command and the machine, for result files."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path


def commit() -> str | None:
    """The checkout's commit, with ``-dirty`` if files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def command() -> str:
    """The command line, without Python's own name: a script's file, or ``-m`` and the module that was run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def provenance() -> dict[str, str | None]:
    """Commit, command line, GPU (None without one) and versions of PyTorch and CUDA."""
    import torch  # imported here, as a benchmark's client needs the commit alone

    return {
        "commit": commit(),
        "command": command(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
