"""Checks that no source file is longer than 400 lines and no function longer than a screen of 80.

``make lint`` runs it. What may be longer is listed here with the reason, and only as long as it is longer.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 400, 80
PYTHON, NATIVE = (".py",), (".cpp", ".cu", ".cuh", ".h")
LONGER = {
    "shadowkv/engine/config.py:add_arguments": "a list of flags, each with its help",
    "shadowkv/ops/select_by_sketch/reference.py:select_by_sketch": "half of it is the docstring of the op",
}
"""Functions that may be longer, as ``path:name``, and why."""

NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
"""Comments, strings and characters of C++, whose braces are none."""
ATTRIBUTE = re.compile(r"\b(?:alignas|__launch_bounds__|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)")
NAME = re.compile(r"(\w+)\s*\([^{};]*\)[^(){};]*$")
"""The name of a function, at the end of what stands before its body."""
NO_FUNCTION = {"if", "for", "while", "switch", "catch"}


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Names of all functions and their lines, decorators excluded."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def native_functions(source: str) -> Iterator[tuple[str, int]]:
    """Names of functions in C++ or CUDA and the lines of their bodies, braces included; lambdas are part of theirs."""
    text = NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)
    open_at: list[tuple[int, str | None]] = []
    before = 0
    for match in re.finditer(r"[{};]", text):
        place = match.start()
        if match.group() == "{":
            name = None
            if not any(function for _, function in open_at):
                found = NAME.search(ATTRIBUTE.sub("", text[before:place]))
                name = found.group(1) if found and found.group(1) not in NO_FUNCTION else None
            open_at.append((place, name))
        elif match.group() == "}" and open_at:
            first, name = open_at.pop()
            if name:
                yield name, text.count("\n", first, place) + 1
        before = place + 1


def violations(path: str, source: str) -> Iterator[str]:
    """What is too long in a file."""
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path} has {lines} lines, more than {FILE_LINES}"
    functions = python_functions if path.endswith(PYTHON) else native_functions
    for name, length in functions(source):
        if length > FUNCTION_LINES and f"{path}:{name}" not in LONGER:
            yield f"{path}: {name} has {length} lines, more than {FUNCTION_LINES}"


def unneeded(sources: dict[str, str]) -> Iterator[str]:
    """Entries of ``LONGER`` that are not longer any more."""
    for entry in LONGER:
        path, _, name = entry.partition(":")
        if not any(one == name and length > FUNCTION_LINES for one, length in python_functions(sources.get(path, ""))):
            yield f"{entry} has no more than {FUNCTION_LINES} lines: take it off LONGER in scripts/line_limits.py"


def main() -> int:
    """Command line; returns the exit status."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in listed.split("\0") if path.endswith((*PYTHON, *NATIVE)) and (ROOT / path).is_file()]
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    found = [line for path, source in sources.items() for line in violations(path, source)] + [*unneeded(sources)]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
