"""Runs mypy on the whole package.

mypy knows nothing of package_dir, so it would not find models/ and eval/ as shadowkv.models and shadowkv.eval. It gets
a folder of links that has them in place: build/typecheck/shadowkv/.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOUNTED = ("models", "eval")


def main() -> int:
    base = ROOT / "build" / "typecheck"
    tree = base / "shadowkv"
    tree.mkdir(parents=True, exist_ok=True)
    for old in tree.iterdir():
        old.unlink()
    sources = [p for p in (ROOT / "shadowkv").iterdir() if p.name != "__pycache__"]
    for source in [*sources, *(ROOT / name for name in MOUNTED)]:
        (tree / source.name).symlink_to(os.path.relpath(source, tree))

    command = [sys.executable, "-m", "mypy", "-p", "shadowkv", *sys.argv[1:]]
    env = {**os.environ, "MYPYPATH": str(base)}
    result = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    link = f"{tree.relative_to(ROOT)}{os.sep}"
    for line in result.stdout.splitlines():
        if line.startswith(link):  # name the real file
            rest = line.removeprefix(link)
            line = rest if rest.startswith(tuple(f"{m}{os.sep}" for m in MOUNTED)) else f"shadowkv{os.sep}{rest}"
        print(line)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
