"""Tells whether the library of the C++ backends is built from the sources of a clone. ``setup.py`` compiles a digest of
the sources into the library.

``setup.py`` runs this file by its path before the package is installed, so it imports only the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(root: Path) -> str:
    """Returns the SHA-256 of the names and contents of the C++ sources, in hexadecimal digits.

    Args:
        root: a clone's folder.
    """
    folder, result = root / "csrc", hashlib.sha256()
    for path in sorted(path for pattern in ("*.h", "cpu/**/*.h", "cpu/**/*.cpp") for path in folder.glob(pattern)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        result.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return result.hexdigest()


def is_current(library: Path, root: Path) -> bool:
    """Whether a library is built from the C++ sources in a clone's folder."""
    return digest(root).encode() in library.read_bytes()
