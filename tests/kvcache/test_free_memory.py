"""What is free: the machine's memory, and what the control groups around the process leave of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shadowkv.kvcache.memory import free_memory
from shadowkv.kvcache.memory.free_memory import free_bytes, free_host_bytes

MACHINE = 10_000
STAT = "anon 700\nactive_file 20\ninactive_file 3\nslab_reclaimable 100\nshmem 50\n"
STAT_1 = "cache 73\nactive_file 9\ntotal_active_file 20\ntotal_inactive_file 3\ntotal_shmem 50\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for ``/sys/fs/cgroup``, and next to it the file that says which groups the process is in."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    monkeypatch.setattr(free_memory, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(free_memory, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "mount"


def group(folder: Path, limit: object, usage: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(STAT)


def group_1(folder: Path, limit: int, usage: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(STAT_1)


def test_without_control_groups_it_is_the_machines(machine: Path) -> None:
    assert free_host_bytes() == free_bytes(torch.device("cpu")) == MACHINE


@pytest.mark.parametrize("limit, free", [("max", MACHINE), (2**60, MACHINE), (5000, 5000 - 800 + 123), (600, 0)])
def test_a_group_leaves_its_limit_less_what_it_cannot_give_up(machine: Path, limit: object, free: int) -> None:
    machine.with_name("membership").write_text("0::/a\n")
    group(machine / "a", limit, 800)
    assert free_host_bytes() == free


def test_of_nested_groups_the_narrowest_counts(machine: Path) -> None:
    machine.with_name("membership").write_text("0::/a/b/c\n")
    for name, limit in (("a", 4000), ("a/b", "max"), ("a/b/c", 5000)):
        group(machine / name, limit, 800)
    assert free_host_bytes() == 4000 - 800 + 123


def test_a_container_that_sees_its_own_group_as_the_root(machine: Path) -> None:
    machine.with_name("membership").write_text("0::/docker/of-the-host\n")
    group(machine, 3000, 800)
    assert free_host_bytes() == 3000 - 800 + 123


@pytest.mark.parametrize("limit, free", [(9223372036854771712, MACHINE), (5000, 5000 - 800 + 23)])
def test_groups_of_the_first_version(machine: Path, limit: int, free: int) -> None:
    machine.with_name("membership").write_text("4:cpu:/\n3:hugetlb,memory:/docker/a\n0::/docker/a\n")
    group_1(machine / "memory", 2**60, 900)
    group_1(machine / "memory" / "docker" / "a", limit, 800)
    assert free_host_bytes() == free


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_pytorch_keeps_for_reuse_is_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    before = torch.cuda.mem_get_info(device)[0]
    del held
    assert free_bytes(device) >= before + 2**28
