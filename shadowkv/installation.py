"""Finds out how this package was installed. Messages suggest commands that install or build what is missing; this
module writes these commands.

A clone has the sources beside the package. It is either installed with ``pip install -e``, or only on Python's path.
For an installation from an sdist or a folder, pip has recorded its path. An installation from a wheel has neither
sources nor such a record.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "shadowkv-engine"
"""Name of the distribution. "shadowkv" on PyPI is another project; this one is not on PyPI."""

ROOT = Path(__file__).resolve().parent.parent


def clone() -> Path | None:
    """Returns the folder of the clone that this package runs from. Returns None if the package was installed without
    sources."""
    return ROOT if (ROOT / "csrc/build_cuda.py").is_file() else None


def adding(extra: str) -> str:
    """Returns the command that installs an extra. It lists the extra's requirements, so that pip need not find or build
    this package."""
    needed = _requirements(extra)
    return f"{_pip()} {shlex.join(needed) or shlex.quote(f'{_shown(ROOT)}[{extra}]')}"


def has(extra: str) -> bool:
    """Whether all requirements of an extra are installed, in any version."""
    needed = _requirements(extra)
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in needed]
    return bool(names) and all(_distribution(name) for name in names)


def version_of(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    found = _distribution(package)
    return None if found is None else found.version


def building_cpu() -> str:
    """Returns the command that builds the C++ ops again and shows the errors of the build. Returns advice if there are
    no sources."""
    return f"{_pip()} -v --no-build-isolation --no-deps -e {_shown(folder)}" if (folder := clone()) else _again()


def building_cuda() -> str:
    """Returns the command that builds the CUDA ops again, or advice if there are no sources."""
    return f"{_shown(sys.executable)} {_shown(folder / 'csrc/build_cuda.py')}" if (folder := clone()) else _again()


def _again() -> str:
    source = _source()
    if source is not None and source.exists():
        return f"{_pip()} -v --no-build-isolation --no-deps --force-reinstall {_shown(source)}"
    return "install a wheel that has them; 'make wheel' in a clone builds one"


def _requirements(extra: str) -> list[str]:
    """Returns the requirements of an extra. The list is empty if they are unknown, as in a clone that is only on
    Python's path."""
    installed, marker = _distribution(), re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    lines = (installed and installed.requires) or ()
    return [line.partition(";")[0].strip() for line in lines if marker.search(line)]


def _source() -> Path | None:
    """Returns the folder or sdist that pip built this installation from, or None for a wheel."""
    installed = _distribution()
    text = installed and installed.read_text("direct_url.json")
    if not text:
        return None
    url = urlsplit(json.loads(text)["url"])
    return None if url.scheme != "file" or url.path.endswith(".whl") else Path(url2pathname(url.path))


def _distribution(name: str = NAME) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:  # also raised for this package, if a clone is only on Python's path
        return None


def _pip() -> str:
    return f"{_shown(sys.executable)} -m pip install"


def _shown(path: str | Path) -> str:
    """Returns a path as a user would type it in the current folder, in quotes if the shell needs them."""
    path, here = str(path), os.getcwd()
    return "." if path == here else shlex.quote(path.removeprefix(os.path.join(here, "")))
