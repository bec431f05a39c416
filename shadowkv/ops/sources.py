"""Tells whether the libraries of the compiled backends are built from the sources of a clone.

``setup.py`` compiles a digest of the C++ sources into their library. ``csrc/build_cuda.py`` records digests of the CUDA
sources in ``built.json``. Both run this file by its path before the package is installed, so it imports only the
standard library.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def cpu_digest(root: Path) -> str:
    """Returns the digest of all C++ sources.

    Args:
        root: a clone's folder.
    """
    folder = root / "csrc"
    return _digest(folder, (path for pattern in ("*.h", "cpu/**/*.h", "cpu/**/*.cpp") for path in folder.glob(pattern)))


def is_current(library: Path, root: Path) -> bool:
    """Whether a library is built from the C++ sources in a clone's folder."""
    return cpu_digest(root).encode() in library.read_bytes()


def cuda_sources(binding: Path, root: Path) -> set[Path]:
    """Returns a CUDA source ``binding`` and all files that it includes, directly or not.

    Args:
        root: a clone's folder.
    """
    found, left = set[Path](), [binding.resolve()]
    while left:
        path = left.pop()
        found.add(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = ((folder / name).resolve() for folder in (path.parent, root / "csrc"))
            left += [place for place in places if place.is_file() and place not in found]
    return found


def cuda_digest(binding: Path, root: Path) -> str:
    """Returns the digest of ``cuda_sources``. Arguments are as there."""
    return _digest(binding.resolve().parent, cuda_sources(binding, root))


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    """Returns the SHA-256 of the files' contents and of their paths relative to ``folder``, in hexadecimal digits."""
    result = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        result.update(f"{Path(os.path.relpath(path, folder)).as_posix()} {content}\n".encode())
    return result.hexdigest()
