"""Writes docs/structure.md: where each method is, and one line per folder. ``--check`` only compares."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

import methods

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "structure.md"
FOLDERS = ("shadowkv", "scripts", "training", "benchmarks", "robustness")
INTRODUCTION = """# Structure

A request passes `serve` → `engine/process` (another process) → `engine.Engine.step` → `Scheduler` (admission) →
`Runner` (prefill, decode) → `models.Decoder` → `layers` → `KVCache.append / start / finish_prefill` → parts → `ops`.
From Python, `LLM` calls `Engine.step` in its own process.

Imports point one way: `ops ← kvcache ← layers ← models ← engine ← serve, eval, plan, hf`,
`kvcache ← prefix_cache ← engine`, `kvcache ← baselines`, `serve ← ray`, `eval ← bench`. `cli` imports all of them.
There are no import cycles within a package either. `make lint` checks this (`[tool.importlinter]` in `pyproject.toml`).

`models/` and `eval/` at the top are links to `shadowkv/models/` and `shadowkv/eval/`. `benchmarks/` measures speed,
`robustness/` injects faults, `training/` makes adapters, and `scripts/` has tools for developers.

A policy is a `KVSpec`: keys × index × values × place × prefill. The cache knows no method by name. A sequence owns all
its pages from admission on. Exact pages, compressed pages and the host tier share one set of page tables over all
layers (`kvcache/memory/arenas.py` defines page ids).

## Where a method is

An op, or a group of small ones, has a folder with a file for each backend. `reference.py` is PyTorch and takes every
case. The table names the other backends. A backend that does not take every case has a function `supports`. Where
`csrc` has no CUDA source, CUDA means PyTorch's own kernels. An engine has one `Ops`, the backends chosen for it. Its
layers, its cache and its sampler call these (`give_ops` in `engine/startup/loading.py`). `tests/ops` has more tests of
CUDA and Triton.
"""
FOLDERS_OF_CODE = """
## Folders

One line per folder, from the folder's docstring. Each module has a docstring of its own. `python scripts/structure.py`
writes this file, and `make lint` checks it.
"""


def summary(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{file.relative_to(ROOT)} has no docstring")
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def render() -> str:
    """The whole page."""
    lines = [INTRODUCTION, *methods.table(), FOLDERS_OF_CODE]
    for top in FOLDERS:
        summaries = {file: summary(file) for file in sorted((ROOT / top).rglob("*.py"))}
        packages = sorted(file.parent for file in summaries if file.name == "__init__.py")
        lines += [f"- `{folder.relative_to(ROOT)}/`: {summaries[folder / '__init__.py']}" for folder in packages]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file is out of date")
    page = render()
    if not parser.parse_args().check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page:
        print("docs/structure.md is out of date: run `python scripts/structure.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
