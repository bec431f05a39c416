"""Numbers that Python has and C++ or CUDA have too are the same on both sides: sources are read, none is compiled."""

import re
from pathlib import Path

import pytest

from shadowkv.ops.page import PAGE

CSRC = Path(__file__).parents[2] / "csrc"

SHARED = [
    ("page.h", "kPage", PAGE),
]
"""File in ``csrc``, name there, and the number in Python."""


def constant(path: str, name: str) -> float:
    """The number by which a source defines a constant, which it does exactly once."""
    (literal,) = re.findall(rf"\bconstexpr [^;]*\b{name} = ([\w.]+)[,;]", (CSRC / path).read_text())
    return int(literal, 0) if re.fullmatch(r"0x\w+|\d+", literal) else float(literal.removesuffix("f"))


@pytest.mark.parametrize(("path", "name", "expected"), SHARED)
def test_a_constant_is_the_same_in_python(path: str, name: str, expected: float) -> None:
    assert constant(path, name) == expected
