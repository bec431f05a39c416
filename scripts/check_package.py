"""Builds the source distribution and a wheel of it, installs that in an empty folder, and imports every module there.

    python scripts/check_package.py

Needs setuptools and torch, and no network. Compiling the C++ ops takes a minute or two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPORT = """
import importlib, pkgutil, sys
import shadowkv
assert shadowkv.__file__.startswith(sys.argv[1]), shadowkv.__file__
optional, count = [], 0
for module in pkgutil.walk_packages(shadowkv.__path__, "shadowkv."):
    if module.name.endswith((".__main__", "._cpu")):
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ImportError as error:
        optional.append(f"{module.name}: {error}")
print(f"{count} modules import; not here: {optional or 'none'}")
"""


def run(*command: object, **options: Any) -> str:
    """Output of a command; ends the script if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return str(done.stdout)


def tracked() -> list[str]:
    """Files of the package that are under version control, including new ones that are not ignored."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "shadowkv", cwd=ROOT).splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def main() -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        tree, target = base / "tree", base / "installed"
        # A copy: building leaves folders behind.
        files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        for file in filter(lambda file_name: (ROOT / file_name).exists(), files):
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tree / file, follow_symlinks=False)
        run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", base, cwd=tree)
        (sdist,) = base.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(base / "unpacked", filter="data")
        (source,) = (base / "unpacked").iterdir()
        lost = [file_name for file_name in tracked() if not (source / file_name).is_file()]
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", base, source)
        (wheel,) = base.glob("*.whl")
        run(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel)
        lost += [file_name for file_name in tracked() if not (target / file_name).is_file()]
        if lost:
            raise SystemExit(f"not in {sdist.name} or {wheel.name}: {', '.join(lost)}")
        print(f"{sdist.name} and {wheel.name} have all {len(tracked())} files of the packages")
        env = {**os.environ, "PYTHONPATH": str(target)}
        print(run(sys.executable, "-c", IMPORT, target, cwd=base, env=env).strip())
        print(run(sys.executable, "-m", "shadowkv.ops.extension", cwd=base, env=env).strip())
        print(run(target / "bin" / "shadowkv", "--version", cwd=base, env=env).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
