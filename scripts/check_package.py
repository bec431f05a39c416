"""Builds the source distribution and a wheel of it, installs that in an environment of its own, and there, without a
compiler on the path, imports every module and starts a server on the CPU, which answers.

    python scripts/check_package.py [WHEEL]

A WHEEL that is there already (``make wheel``) is checked instead. Needs setuptools, torch and the default model, and no
network: what the package depends on is taken from the environment that this runs in. Compiling the C++ ops takes a
minute or two, the CUDA ops (``SHADOWKV_CUDA_OPS=yes``) five more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
ADDRESS = re.compile(r"http://[\w.]+:\d+")
IMPORT = """
import importlib, pkgutil, sys
import shadowkv
assert shadowkv.__file__.startswith(sys.argv[1]), shadowkv.__file__
optional, count = [], 0
for module in pkgutil.walk_packages(shadowkv.__path__, "shadowkv."):
    if module.name.endswith(".__main__") or "._cpu_" in module.name:
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


def build(base: Path) -> Path:
    """An sdist and the wheel made of it, in ``base``; ends the script where files are missing in the former."""
    tree = base / "tree"
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
    if lost := [file_name for file_name in tracked() if not (source / file_name).is_file()]:
        raise SystemExit(f"not in {sdist.name}: {', '.join(lost)}")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", base, source)
    (wheel,) = base.glob("*.whl")
    return wheel


def install(wheel: Path, base: Path) -> Path:
    """An environment with the wheel, which finds everything else where this one has it; returns its ``bin``."""
    home = base / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    packages = Path(paths["purelib"])
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if lost := [file_name for file_name in tracked() if not (packages / file_name).is_file()]:
        raise SystemExit(f"not in {wheel.name}: {', '.join(lost)}")
    print(f"{wheel.name} has all {len(tracked())} files of the package")
    print(run(python, "-c", IMPORT, packages, cwd=base, env=without_compilers()).strip())
    return home / "bin"


def without_compilers() -> dict[str, str]:
    """An environment in which nothing is on the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": "/nonexistent"}


def serve(commands: Path, base: Path) -> None:
    """Starts a server and asks it something; ends the script where no answer comes."""
    log = base / "log"
    flags = ["--port", "0", "--device", "cpu", "--batch", "2", "--max-model-len", "1024"]
    with log.open("w") as file:
        server = subprocess.Popen(
            [commands / "shadowkv", "serve", *flags], cwd=base, env=without_compilers(), stdout=file, stderr=file
        )
    try:
        while server.poll() is None and not (address := ADDRESS.search(log.read_text())):
            time.sleep(0.2)
        if server.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()}")
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{address[0]}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.wait(60)
    said = [line for line in log.read_text().splitlines() if line.startswith(("kernels", "slow"))]
    print(*said, f"it answers: {text!r}", sep="\n")


def main() -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        wheel = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else build(base)
        commands = install(wheel, base)
        print(run(commands / "shadowkv", "doctor", "--device", "cpu", cwd=base, env=without_compilers()).strip())
        serve(commands, base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
