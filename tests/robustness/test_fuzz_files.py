"""The fuzzer of files: nothing breaks in a short run, and a reader that breaks is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustness import fuzz_files
from robustness.fuzz_files import Target, all_targets, changed


def bad_read(raw: bytes) -> None:
    raise KeyError("x")


def test_nothing_breaks() -> None:
    found = fuzz_files.fuzz(fuzz_files.parse(["--cases", "40"]))
    assert not [example for one in found.values() for example in one.examples]
    assert all(one.cases == 40 and 0 < one.refused < 40 for one in found.values())


def test_a_case_depends_on_the_seed_and_its_number_alone() -> None:
    def cases(seed: int) -> list[bytes]:
        return [changed(target, fuzz_files.generator(seed, "x", number)) for number in range(9)]

    target = Target(bad_read, (b"0123456789" * 50,), ValueError)
    assert cases(1) == cases(1) != cases(2)


def test_good_files_are_good() -> None:
    with all_targets() as targets:
        assert not [(name, seed) for name, one in targets.items() for seed in one.seeds if one.fault(seed) is not None]


@pytest.mark.parametrize("message, fine", [
    ("/folder/config.json: no", True), ("no", False), ("/folder/config.json: no\nnot at all", False),
])  # fmt: skip
def test_refusals_are_a_line_that_says_where(message: str, fine: bool) -> None:
    def read(raw: bytes) -> None:
        raise ValueError(message)

    assert (Target(read, (b"x",), ValueError, Path("/folder")).fault(b"") == "") == fine
    assert Target(read, (b"x",), UnicodeError, Path("/folder")).fault(b"")


def test_a_reader_that_breaks_fails_the_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz_files.py", "--cases", "3", "--targets", "body"])
    assert fuzz_files.main() == 0
    monkeypatch.setattr(fuzz_files, "read_json", bad_read)
    assert fuzz_files.main() == 1
    assert "KeyError" in capfd.readouterr().out
