"""Time that a prefill takes from decode steps is the device's, not that of its launches."""

import time

import pytest
import torch

from shadowkv.engine.pacing import Mark, Stopwatch


def test_a_cpus_time_is_the_hosts() -> None:
    watch = Stopwatch(torch.device("cpu"))
    time.sleep(0.2)
    assert 0.2 <= watch.passed() <= watch.passed()
    watch.start()
    assert watch.passed() < 0.2
    time.sleep(0.1)
    assert watch.launched() >= watch.piece >= 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_time_is_that_of_its_work_up_to_the_call_before() -> None:
    device, cycles = torch.device("cuda"), 50_000_000
    torch.cuda._sleep(cycles)  # before the start: does not count
    start = Mark(device)
    torch.cuda._sleep(cycles)
    one = Mark(device).since(start)
    watch, found = Stopwatch(device), []
    for _ in range(4):
        torch.cuda._sleep(cycles)
        found.append(watch.passed())
    assert found[0] == 0
    assert found[1:] == pytest.approx([one, 2 * one, 3 * one], rel=0.3)
    torch.cuda._sleep(cycles)
    assert watch.launched() == pytest.approx(5 * one, rel=0.3)
    assert watch.piece == pytest.approx(one, rel=0.3)
    watch.start()
    assert watch.launched() == watch.piece, "of a first piece nothing is known but what the last one took"
