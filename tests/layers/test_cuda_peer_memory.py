"""Sums over the memory of several GPUs.

``python -m tests.layers.test_cuda_peer_memory times FILE RANKS RANK``, one for each rank, prints what they take.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed

from shadowkv.layers.group import open_group
from shadowkv.layers.peer_memory import REGION_BYTES, PeerMemory, missing

RANKS = 2
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS or bool(missing(RANKS)), reason="needs two GPUs that address each other's memory"
)


def on_ranks(mode: str, folder: Path, seconds: float = 120, ranks: int = RANKS) -> list[str]:
    """What each rank of ``mode`` below prints."""
    command = [sys.executable, "-m", "tests.layers.test_cuda_peer_memory", mode, f"{folder}/meeting", str(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_every_rank_has_the_same_sum_of_tensors_of_every_size(tmp_path: Path) -> None:
    assert on_ranks("sums", tmp_path) == ["right\n"] * RANKS


def test_a_rank_that_does_not_come_is_waited_for_until_an_abort(tmp_path: Path) -> None:
    assert on_ranks("absent", tmp_path)[0] == "waited, then ended\n"


def memory_of(group: object) -> PeerMemory:
    memory = vars(group)["_peer_memory"]
    assert isinstance(memory, PeerMemory)
    return memory


def reduce(memory: PeerMemory, x: torch.Tensor, rank: int, two_shots: bool) -> None:
    """What ``sum`` does, in one or two shots."""
    own = vars(memory)
    torch.ops.shadowkv_cuda.all_reduce(
        x, own["_buffers"], rank, REGION_BYTES, own["_calls"], own["_aborted"], two_shots
    )


def parts(ranks: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """What the ranks add up, the same on all of them."""
    return [torch.randn(size, generator=generator, device="cuda").to(dtype) for _ in range(ranks)]


def sums(meeting: str, ranks: int, rank: int) -> None:
    group = open_group(rank, ranks, torch.device("cuda", rank), meeting)
    group.share_memory(torch.device("cuda", rank))
    memory = memory_of(group)
    generator = torch.Generator("cuda").manual_seed(5)
    sizes = [8, 24, 4096, 8 * 4093, 64 * 4096, 300 * 4096, 1000 * 4096 + 8, REGION_BYTES // 4]
    for turn in range(200):
        size = sizes[turn % len(sizes)]
        dtype = (torch.bfloat16, torch.float16, torch.float32)[turn % 3]
        all_parts = parts(ranks, size, dtype, generator)
        x = all_parts[rank].clone()
        assert memory.takes(x)
        if rank == turn % ranks and turn % 7 == 0:
            torch.cuda._sleep(10_000_000)  # comes some milliseconds late
        if turn % 2:
            reduce(memory, x, rank, two_shots=turn % 4 == 1)
        else:
            assert group.sum(x) is x
        want = all_parts[0].float()
        for part in all_parts[1:]:
            want = want + part.float()
        torch.testing.assert_close(x, want.to(dtype), rtol=0, atol=0, msg=f"turn {turn}: {size} of {dtype}")
    x = torch.full((1, 4096), 1.0 + rank, device="cuda", dtype=torch.bfloat16)
    graph, out = torch.cuda.CUDAGraph(), torch.full((1, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
    group.sum(x.clone())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(5):
            out.copy_(x)
            group.sum(out)
    for _ in range(40):
        graph.replay()
    assert bool((out == sum(range(1, ranks + 1))).all())
    assert not memory.takes(torch.zeros(3, device="cuda"))  # no multiple of 16 bytes
    assert not memory.takes(torch.zeros(8, device="cuda", dtype=torch.int64))
    assert not memory.takes(torch.zeros(8, 8, device="cuda").t())
    torch.cuda.synchronize()
    torch.distributed.barrier()
    print("right", flush=True)
    del graph
    group.close()


def absent(meeting: str, ranks: int, rank: int) -> None:
    group = open_group(rank, ranks, torch.device("cuda", rank), meeting)
    group.share_memory(torch.device("cuda", rank))
    torch.distributed.barrier()
    if rank == 0:
        x, done = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16), torch.cuda.Event()
        group.sum(x)
        done.record()
        time.sleep(0.5)
        waited = not done.query()
        memory_of(group).abort()
        torch.cuda.synchronize()
        print("waited, then ended" if waited else "did not wait", flush=True)
    else:
        time.sleep(5)
    os._exit(0)


def times(meeting: str, ranks: int, rank: int) -> None:
    group = open_group(rank, ranks, torch.device("cuda", rank), meeting)
    group.share_memory(torch.device("cuda", rank))
    memory = memory_of(group)
    if rank == 0:
        print(f"{ranks} ranks\n{'tokens of 4096':>16} {'one shot':>10} {'two shots':>10} {'NCCL':>10}  us")
    for tokens in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16) * 1e-3
        found = []
        for shots in (False, True):
            if memory.takes(x):
                found.append(_microseconds(partial(reduce, memory, x, rank, two_shots=shots)))
        found.append(_microseconds(partial(torch.distributed.all_reduce, x)))
        if rank == 0:
            print(f"{tokens:>16} " + " ".join(f"{one:>10.1f}" for one in found), flush=True)
    torch.distributed.barrier()
    os._exit(0)


def _microseconds(call: Callable[[], object], count: int = 64) -> float:
    call()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / 5 / count


if __name__ == "__main__":
    mode, meeting, ranks, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.cuda.set_device(rank)
    {"sums": sums, "absent": absent, "times": times}[mode](meeting, ranks, rank)
