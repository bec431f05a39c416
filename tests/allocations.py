"""Memory that a call takes on the CPU, as PyTorch's profiler sees its allocations."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that ``function`` has allocated at a time on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    allocations = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for one in sorted(allocations, key=lambda one: one.start_ns()):
        now += one.nbytes()
        most = max(most, now)
    return most
