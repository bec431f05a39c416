"""The device that kernels are tested on: a GPU, or a CPU, on which Triton may run in its interpreter."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_RUNS = ON_GPU or INTERPRETED


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_threads(call: Callable[[], Result]) -> list[Result]:
    """What a call returns with one, two and five threads."""
    results = []
    for count in (1, 2, 5):
        with threads(count):
            results.append(call())
    return results
