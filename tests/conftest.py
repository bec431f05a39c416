"""Which files are tested first; a seed that is fixed once and fresh once; the memory of a GPU that several processes
test on."""

import os
import secrets
import signal
from collections.abc import Iterator

import pytest
import torch

LONGEST = (
    *("test_cuda_sources.py", "test_smollm2.py", "test_snapshots.py", "test_interpreted.py", "test_soak.py"),
    *("test_serve_end_to_end.py", "test_lifetimes.py", "test_exactness.py"),
)
"""Files that take longest, from the first to begin on: at the end other processes would have nothing left to do."""


# Shells have what they start in the background ignore Ctrl-C, which is tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts them first, in their order."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


# Triton's interpreter is slow: only GPUs run its kernels with both.
@pytest.fixture(params=["fresh"] if os.environ.get("TRITON_INTERPRET") == "1" else ["fixed", "fresh"])
def seed(request: pytest.FixtureRequest) -> int:
    """Also seeds torch; a failing test prints it."""
    value = 20241028 if request.param == "fixed" else secrets.randbits(32)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=torch.cuda.is_available())
def memory_for_others() -> Iterator[None]:
    """Gives back what a test left cached, if it is much."""
    yield
    if torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()
