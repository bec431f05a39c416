"""A seed that is fixed once and fresh once."""

import secrets

import pytest
import torch


@pytest.fixture(params=["fixed", "fresh"])
def seed(request: pytest.FixtureRequest) -> int:
    """Also seeds torch; a failing test prints it."""
    value = 20241028 if request.param == "fixed" else secrets.randbits(32)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
