"""Every op from every set of backends that this machine's CPU has, and a seed that is fixed once and fresh once."""

import secrets
import sys
from pathlib import Path

import pytest
import torch

from shadowkv.ops.registry import NAMES, Ops

sys.path.insert(0, str(Path(__file__).parent))

REFERENCE = Ops("cpu", dict.fromkeys(NAMES, "reference"))
CHOSEN = Ops("cpu")
BACKENDS = {"reference": REFERENCE} | ({"chosen": CHOSEN} if CHOSEN.backends != REFERENCE.backends else {})


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]


@pytest.fixture(params=["fixed", "fresh"])
def seed(request: pytest.FixtureRequest) -> int:
    """Also seeds torch; a failing test prints it."""
    value = 20241028 if request.param == "fixed" else secrets.randbits(32)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
