"""``ops``: a fixture with every set of backends that this machine's CPU has."""

import sys
from pathlib import Path

import pytest

from shadowkv.ops.registry import NAMES, Ops

sys.path.insert(0, str(Path(__file__).parent))

REFERENCE = Ops("cpu", overrides=dict.fromkeys(NAMES, "reference"))
CHOSEN = Ops("cpu")
BACKENDS = {"reference": REFERENCE} | ({"chosen": CHOSEN} if CHOSEN.backends != REFERENCE.backends else {})


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]
