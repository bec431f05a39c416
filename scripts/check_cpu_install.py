"""Fails if CUDA libraries were installed on a machine without an NVIDIA GPU."""

import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def main() -> int:
    pulled = sorted({name for d in distributions() if (name := (d.name or "").lower()).startswith("nvidia-")})
    if not pulled or has_nvidia_gpu():
        return 0
    print(
        f"error: this machine has no NVIDIA GPU, yet {len(pulled)} CUDA packages were installed: {', '.join(pulled)}.\n"
        "pip chose a CUDA build of torch. Point it at a CPU build (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL),\n"
        "delete .venv and try again.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
