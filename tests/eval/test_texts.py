"""Texts that are at hand: whole source files in an order of the seed."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from shadowkv.eval.prompts.texts import read_own_texts, source_code


def named(code: str) -> list[str]:
    return re.findall(r"^# File (\S+\.py)$", code, re.M)


@pytest.mark.parametrize("names", [("code",), ("essays",), ("a/x.txt", "b/x.txt")])
def test_texts_of_one_name_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text " * 100)
    with pytest.raises(ValueError, match=f"another text has the name {Path(names[-1]).name!r}; rename the file"):
        read_own_texts([tmp_path / name for name in names])


def test_source_code_depends_on_the_seed_alone() -> None:
    code = source_code("a", 40_000)
    assert len(code) >= 40_000
    assert source_code("a", 40_000) == code
    assert source_code("a", 10_000) == code[: len(source_code("a", 10_000))]
    assert named(source_code("b", 40_000)) != named(code)


def test_source_files_are_whole_and_named_without_tests() -> None:
    code = source_code("a", 5_000_000)
    names = named(code)
    assert len(set(names)) == len(names) > 100
    assert 0 < sum(name.startswith("torch/") for name in names) < len(names)
    (name,) = [name for name in names if not name.startswith("torch/")][:1]
    path = Path(sysconfig.get_path("stdlib")) / name
    assert path.read_text(encoding="utf-8", errors="replace").strip() in code
    assert not [name for name in names if re.search(r"(^|/)(tests?|site-packages)/", name)]
    assert not [name for name in names if name.startswith("/")]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="the installed source files lack"):
        source_code("a", 10**9)
