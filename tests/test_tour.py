"""docs/tour.md quotes the code as it is, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^## (\d+)\. [^\n]*: `([^`]+)`\n.*?```python\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)
GONE = "…"


@pytest.mark.parametrize(("number", "path", "quoted"), STOPS)
def test_a_stop_quotes_its_file(number: str, path: str, quoted: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    at = 0
    for part in re.split(rf"^ *{GONE}\n", quoted, flags=re.MULTILINE):
        found = text.find(part, at)
        assert found >= 0, f"stop {number}: not in {path} after what is quoted before it:\n{part}"
        at = found + len(part)


def test_there_are_twelve_stops() -> None:
    assert [int(number) for number, *_ in STOPS] == list(range(1, 13))


@pytest.mark.parametrize(("which", "fewest", "at_most"), [(0, 10, 16), (1, 8, 12), (2, 5, 10)])
def test_the_files_on_the_way_exist(which: int, fewest: int, at_most: int) -> None:
    listed = re.split(r"^1\. ", TEXT[TEXT.index("## The files on the way") :], flags=re.MULTILINE)[1 + which]
    lines = re.findall(r"^(\d+\.|-) `([^`]+)`(.*)$", "1. " + listed, re.MULTILINE)
    assert fewest < sum(number != "-" for number, *_ in lines) <= at_most
    assert len({path for _, path, _ in lines}) == len(lines)
    for number, path, rest in lines:
        text = (ROOT / "shadowkv" / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+(?:\.\w+)?)`", rest.partition(":")[0]):
            for part in name.split("."):
                assert re.search(rf"\b(?:def|class) {part}\b", text), f"{number} {path} has no {part}"
