"""Fails if a CUDA build of torch was installed on a machine without an NVIDIA GPU."""

import shutil
import sys
from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Whether there is a driver."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def main() -> int:
    """Returns the exit status."""
    import torch

    if torch.version.cuda is None or has_nvidia_gpu():
        return 0
    print(
        f"error: this machine has no NVIDIA GPU, yet pip chose torch {torch.__version__}, a CUDA build, with gigabytes "
        "of libraries.\nPoint it at a CPU build (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), delete .venv and try again.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
