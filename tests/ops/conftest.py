"""``ops``: a fixture with every set of backends that this machine's CPU has. ``poisoned_outputs``: NaN in memory that
was not written."""

import math
import sys
from pathlib import Path

import pytest
import torch

from shadowkv.ops.registry import NAMES, Ops

sys.path.insert(0, str(Path(__file__).parent))

REFERENCE = Ops("cpu", overrides=dict.fromkeys(NAMES, "reference"))
CHOSEN = Ops("cpu")
BACKENDS = {"reference": REFERENCE} | ({"chosen": CHOSEN} if CHOSEN.backends != REFERENCE.backends else {})


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a backend takes is NaN until it is written."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(math.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(math.nan))
