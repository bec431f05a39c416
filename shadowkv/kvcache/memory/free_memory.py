"""Free memory for this process: of the host, within the limits of its control groups, or of a GPU."""

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
    """File names of a version of Linux's control groups.

    Attributes:
        mount: where the groups are mounted.
        limit, usage: files with a group's memory limit and its usage.
        cache: entries of ``memory.stat`` that count reclaimable cache.
    """

    mount: Path
    limit: str
    usage: str
    cache: tuple[str, ...]

    def left(self, group: Path) -> int | None:
        """Bytes that a group can still take, including its reclaimable cache. None if the group has no limit."""
        try:
            limit, usage = (group / self.limit).read_text().strip(), int((group / self.usage).read_text())
            lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        except OSError:  # a group without the controller, or not visible from within a container
            return None
        if limit == "max":
            return None
        return max(0, int(limit) - usage + sum(int(value) for name, value in lines if name in self.cache))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, including the memory that PyTorch caches for reuse."""
    if device.type != "cuda":
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def unreserved_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nobody has reserved, after PyTorch has given back the blocks that it caches. Unlike in
    ``free_bytes``, the memory pool of CUDA graphs counts as taken, even if no graph uses it at the moment."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def free_host_bytes() -> int:
    """Bytes of host memory that this process can still take without swapping or being killed."""
    return min([psutil.virtual_memory().available, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """Free bytes of each control group of this process that has a limit, at any depth."""
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
        # In a container, the group can be mounted as the root, whatever path is reported. So all groups up to the root
        # are read.
        while group.is_relative_to(version.mount):
            left = version.left(group)
            if left is not None:
                yield left
            group = group.parent
