"""Memory that this process can still take: the machine's, within the limits of its control groups, or a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Version:
    """How a version of Linux's control groups states a group's limit, its usage, and how much of that is cache."""

    mount: Path
    limit: str
    usage: str
    cache: tuple[str, ...]

    def left(self, group: Path) -> int | None:
        """Bytes that a group can still take, including cache that it gives up; None where it has no limit."""
        try:
            limit, usage = (group / self.limit).read_text().strip(), int((group / self.usage).read_text())
            lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        except OSError:  # a group without the controller, or not visible from within a container
            return None
        if limit == "max":
            return None
        return max(0, int(limit) - usage + sum(int(value) for name, value in lines if name in self.cache))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, including those that PyTorch keeps for reuse."""
    if device.type != "cuda":
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int:
    """Bytes of host memory that can still be taken without swapping or being killed for it."""
    return min([psutil.virtual_memory().available, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """Bytes that each limited control group of this process leaves, at any depth; nothing where there are none."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version = _Version(
                MOUNT, "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
            )
        elif "memory" in controllers.split(","):
            version = _Version(
                MOUNT / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_active_file", "total_inactive_file"),
            )
        else:
            continue
        group = version.mount / path.lstrip("/")
        # A container may see its own group as the root, whatever path is reported: walk up to the root.
        while group.is_relative_to(version.mount):
            left = version.left(group)
            if left is not None:
                yield left
            group = group.parent
