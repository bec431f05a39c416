"""Logs and tables that are made up: the same from a seed everywhere, and of the form that they claim."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable

import pytest

from shadowkv.eval.prompts.generated import SECTION, logs, tables

ACCESS = re.compile(
    r'\d+\.\d+\.\d+\.\d+ - - \[\d\d/\w{3}/2026:\d\d:\d\d:\d\d \+0000\] "[A-Z]+ /\S+ HTTP/1\.1" \d{3} \d+ "'
)
SYSLOG = re.compile(r"\w{3} \d\d \d\d:\d\d:\d\d [\w-]+ [\w-]+(\[\d+\])?: .+")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (logs, "591cf63f6035de5322dc6c844f728bb9f795f7f072183d3a009849cdd673ba07"),
        (tables, "7cc47ceaf12aa40a94ac0606dbe56c8349fb88afd644bbcb8f041db824125d17"),
    ],
)
def test_a_seed_gives_the_same_text_everywhere(text: Callable[[str, int], str], wanted: str) -> None:
    made = text("a", 100_000)
    assert len(made) >= 100_000
    assert hashlib.sha256(made.encode()).hexdigest() == wanted
    assert made.startswith(text("a", 10_000))
    assert text("b", 10_000) != text("a", 10_000)
    assert made.endswith("\n")


def test_logs_alternate_between_two_forms() -> None:
    sections = logs("a", 100_000).split("\n\n")[:-1]
    for number, section in enumerate(sections):
        header, *lines = section.splitlines()
        assert re.fullmatch(r"==> [\w-]+:/var/log/(nginx/access\.log|syslog) <==", header)
        assert len(lines) == SECTION
        form = SYSLOG if number % 2 else ACCESS
        assert all(form.match(line) for line in lines)
    assert len(sections) >= 6


def test_tables_have_as_many_cells_in_every_row() -> None:
    sections = tables("a", 100_000).split("\n\n")[:-1]
    markdown = [section for section in sections if "|---" in section.replace(" ", "")]
    assert 0 < len(markdown) < len(sections)
    for section in sections:
        title, *lines = section.splitlines()
        assert re.match(r"Table \d+: [\w ]+, \w+, \d\d \w+ 20\d\d$", title)
        if section in markdown:
            rows = [line.strip("|").split("|") for line in lines]
            assert len(rows) == SECTION + 2
        else:
            rows = list(csv.reader(lines))
            assert len(rows) == SECTION + 1
        assert len({len(row) for row in rows}) == 1
        assert len({tuple(row) for row in rows}) == len(rows)
