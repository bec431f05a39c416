"""A backend of one's own for one of the engine's operations, and a server that uses it.

    python examples/custom_op.py --model smollm2-135m-instruct

An installed package names ``register`` as an entry point of the group ``shadowkv.plugins``, and then every server uses
the backend. ``shadowkv/ops/*/reference.py`` are the signatures.
"""

from __future__ import annotations

import sys

from torch import Tensor
from torch.nn import functional

from shadowkv.cli import main as shadowkv
from shadowkv.ops import registry


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` of ``shadowkv/ops/activation_rows``, by PyTorch's own operation."""
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def register() -> None:
    """Puts the backend before all others of the op, on CPUs and GPUs."""
    registry.register("rms_norm", "torch", rms_norm)


def main(argv: list[str]) -> int:
    """Serves; ``argv`` are further flags of ``shadowkv serve``."""
    register()
    return shadowkv(["serve", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
