"""Names the CUDA ops whose sources differ from those that landed last, in one line: for ``make check-cuda``.

    python scripts/changed_kernels.py [COMMIT]

Compared with COMMIT is what lies in the folder; by default it is where this branch left ``main``, or the commit before
where they are the same. A change of a header counts for every op that includes it, also through others.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILDER = ROOT / "csrc/build_cuda.py"
"""A change of the flags that it has counts for all ops."""


def git(*arguments: str) -> str:
    """Output of a command of git; empty where it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def landed() -> str:
    """The commit that changes are counted from."""
    head = git("rev-parse", "HEAD")
    bases = (git("merge-base", head, branch) for branch in ("origin/main", "main"))
    return next((base for base in bases if base not in ("", head)), "HEAD~1")


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else landed()
    builder = runpy.run_path(str(BUILDER))
    bindings, sources_of = builder["bindings"](), builder["SOURCES"]["cuda_sources"]
    if not git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        print(f"no commit {since} is here to compare with: all ops count as changed", file=sys.stderr)
        print(*bindings)
        return
    names = git("diff", "--name-only", since).splitlines()
    changed = {ROOT / name for name in (*names, *git("ls-files", "--others", "--exclude-standard").splitlines())}
    print(*(op for op, source in bindings.items() if changed & {BUILDER, *sources_of(source, ROOT)}))


if __name__ == "__main__":
    main()
