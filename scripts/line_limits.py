"""Holds files to 600 lines, functions to 80, which a screen shows, and folders to 16 files: ``make lint`` runs it."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_A_FILE, OF_A_FUNCTION = 600, 80
"""Lines, at most."""
OF_A_FOLDER = 16
"""Files of source, at most, without those of folders in it; tests are not counted."""

FOLDERS = ("shadowkv", "scripts", "training", "benchmarks", "robustness", "csrc", "tests")
FILES_ALONE = "tests/"
"""Functions and folders of this one are not measured."""

EXCEPTIONS = {
    "shadowkv/ops/select_by_sketch/reference.py: select_by_sketch": "half of it says what all backends promise",
}
"""Functions that are longer, and why they may be."""

NO_CODE = re.compile(
    r'R"([^\s()\\]*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"'  # texts
    r"|(?<!\w)'(?:[^'\\\n]|\\.)+'"  # characters, but not 1'000'000
    r"|//[^\n]*|/\*.*?\*/"
    r"|^[ \t]*#(?:[^\n\\]|\\.)*",
    re.DOTALL | re.MULTILINE,
)
"""Of C++, what may have braces that count for nothing."""

ATTRIBUTES = re.compile(r"\b(?:alignas|__align__|__launch_bounds__)\s*\([^()]*\)")
SCOPE = re.compile(r"\b(?:namespace|struct|class|union|enum)\b[^()]*$|\bextern\s*$")


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lines of functions, of methods with their class before; not of functions in others."""

    def of(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + node.name, (node.end_lineno or 0) - node.lineno + 1
            else:
                yield from of(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)

    return of(ast.parse(text), "")


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """The same of C++ and CUDA: braces behind parentheses, in nothing but namespaces and types, whose names are left
    out. Raises ValueError where braces do not match."""
    text = NO_CODE.sub(lambda match: " " + "\n" * match[0].count("\n"), text)
    opened: list[tuple[str, int]] = []  # what braces that are open hold, and where their declarations begin
    start = 0
    for match in re.finditer("[{};]", text):
        sign, end = match[0], match.end()
        head, outside = text[start : end - 1], all(kind == "scope" for kind, _ in opened)
        kind = ""
        if sign == "{":
            head = ATTRIBUTES.sub("", head)
            is_value = "(" not in head or head.count("(") > head.count(")") or head.rstrip().endswith("=")
            kind = "scope" if outside and SCOPE.search(head) else "value" if is_value else "function"
            opened.append((kind, start))
        elif sign == "}":
            if not opened:
                raise ValueError("a brace is closed that was not opened")
            kind, began = opened.pop()
            outside = all(other == "scope" for other, _ in opened)
            if outside and kind == "function":
                definition = ATTRIBUTES.sub("", text[began:end]).strip()
                yield re.findall(r"([\w~]+)\s*\(", definition)[0], definition.count("\n") + 1
        if outside and (sign == ";" or kind == "scope" or (sign == "}" and kind == "function")):
            start = end
    if opened:
        raise ValueError("a brace is not closed")


FUNCTIONS = {".py": python_functions, **dict.fromkeys((".cu", ".cuh", ".cpp", ".h"), cpp_functions)}


def too_long(root: Path, exceptions: Mapping[str, str]) -> list[str]:
    """What is longer than it may be, and exceptions that nothing needs, a line each."""
    problems: list[str] = []
    needed: set[str] = set()
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*")):
        functions = FUNCTIONS.get(file.suffix)
        if functions is None or not file.is_file():
            continue
        path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > OF_A_FILE:
            problems.append(f"{path}: {lines} lines, more than {OF_A_FILE}")
        try:
            long = [(name, lines) for name, lines in functions(text) if lines > OF_A_FUNCTION]
            long = [] if path.startswith(FILES_ALONE) else long
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        needed |= {f"{path}: {name}" for name, _ in long}
        problems += [
            f"{path}: {name} has {lines} lines, more than {OF_A_FUNCTION}"
            for name, lines in long
            if f"{path}: {name}" not in exceptions
        ]
    return problems + [f"{name} needs no exception" for name in exceptions if name not in needed]


def crowded(root: Path) -> list[str]:
    """Folders with too many files, a line each."""
    sources = (file for folder in FOLDERS if f"{folder}/" != FILES_ALONE for file in (root / folder).rglob("*"))
    counts = Counter(file.parent.relative_to(root).as_posix() for file in sources if file.suffix in FUNCTIONS)
    return [
        f"{folder}: {count} files, more than {OF_A_FOLDER}: which of them are a room of their own?"
        for folder, count in sorted(counts.items())
        if count > OF_A_FOLDER
    ]


def main() -> int:
    """Command line; returns the exit status."""
    problems = too_long(ROOT, EXCEPTIONS) + crowded(ROOT)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
