"""The tests that ``make sanitize`` lists by name exist."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = (HERE / "sanitized.txt").read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_every_test_of_the_list_exists(name: str) -> None:
    path, _, test = name.partition("::")
    source = (HERE.parents[1] / path).read_text()
    assert re.search(rf"^ *def {test.partition('[')[0]}\(", source, re.MULTILINE), f"{path} has no such test"
