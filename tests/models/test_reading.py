"""Weights that are read ahead on threads come in order, within their bytes, with their errors in their place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shadowkv.models.checkpoints import reading
from shadowkv.models.checkpoints.files import ModelFileError
from shadowkv.models.checkpoints.reading import Reading, read_ahead, read_bytes


class Counted:
    """Weights of a number each, which counts how many bytes of them are read and not used."""

    def __init__(self, sizes: list[int], bad: int | None = None) -> None:
        self.sizes, self.bad, self.lock, self.held, self.most, self.began = sizes, bad, threading.Lock(), 0, 0, 0

    def reading(self, number: int) -> Reading:
        def read() -> Tensor:
            with self.lock:
                self.began += 1
                self.held += self.sizes[number]
                self.most = max(self.most, self.held)
            if number == self.bad:
                raise OSError(f"{number} is bad")
            return torch.tensor(number)

        return Reading(f"w{number}", self.sizes[number], read)

    def used(self, number: int) -> None:
        with self.lock:
            self.held -= self.sizes[number]


@pytest.fixture(autouse=True)
def ten_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", 10)


def test_order_and_bytes() -> None:
    counted = Counted([3, 4, 30, 1, 1, 1, 9, 2] * 20)
    names = []
    for name, stored in read_ahead(counted.reading(number) for number in range(160)):
        names.append(name)
        assert isinstance(stored, Tensor) and int(stored) == len(names) - 1
        counted.used(len(names) - 1)
    assert names == [f"w{number}" for number in range(160)]
    assert counted.most <= 30


def test_an_error_comes_in_its_place() -> None:
    counted = Counted([1] * 50, bad=7)
    stream = read_ahead(counted.reading(number) for number in range(50))
    assert [next(stream)[0] for _ in range(7)] == [f"w{number}" for number in range(7)]
    with pytest.raises(OSError, match="7 is bad"):
        next(stream)
    assert counted.began <= 18


def test_who_stops_early_leaves_no_thread_behind() -> None:
    counted = Counted([1] * 50)
    stream = read_ahead(counted.reading(number) for number in range(50))
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    assert counted.began <= 11


def test_bytes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(100)))
    assert read_bytes(file, 10, 14).tolist() == [10, 11, 12, 13]
    assert read_bytes(file, 50, 50).shape == (0,)
    with pytest.raises(ModelFileError, match="it ends after 100 bytes, but its tensors end at 120"):
        read_bytes(file, 90, 120)
