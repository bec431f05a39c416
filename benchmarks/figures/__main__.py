"""Writes the tables, single figures and plots in README.md and docs/ from benchmarks/results; ``--check`` only
compares.

Two comments in the Markdown mark a place for a figure, around a table or within a sentence::

    <!-- figures: gain turbo 61440 -->9.8×<!-- end -->

The first word after ``figures:`` is a name in ``FIGURES`` of ``speed.py``, ``models.py`` or ``answers.py`` in this
folder. The other words are the arguments of its function. A plot is a file ``docs/figures/NAME.svg``, where NAME is a
key of ``PLOTS`` in ``plots.py``. Only plots whose figures have changed are drawn again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import answers, models, plots, speed
from benchmarks.figures.results import ROOT

PLACE = re.compile(r"<!-- figures: (.+?) -->(.*?)<!-- end -->", re.DOTALL)
DRAWN = ROOT / "docs" / "figures"
FIGURES: dict[str, Callable[..., str]] = speed.FIGURES | models.FIGURES | answers.FIGURES


def fill(text: str, figures: dict[str, Callable[..., str]]) -> str:
    """Returns a page with its marked places filled.

    Raises:
        KeyError: if a place has a name that no figure has.
        ValueError: if a place within a sentence begins a line. Markdown would take the whole line for HTML.
    """

    def place(match: re.Match[str]) -> str:
        marked, before = match[1], match[2]
        name, *arguments = shlex.split(marked)
        block = before.startswith("\n")
        if not block and (match.start() == 0 or text[match.start() - 1] == "\n"):
            raise ValueError(f"figures: {name} begins a line, and has to stand within one")
        made = figures[name](*arguments)
        return f"<!-- figures: {marked} -->" + (f"\n\n{made}\n\n" if block else made) + "<!-- end -->"

    return PLACE.sub(place, text)


def pages() -> list[Path]:
    """Returns README.md and all pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a figure differs from its result file")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text, FIGURES)
        if filled != text:
            stale.append(page)
            if not check:
                page.write_text(filled, encoding="utf-8")
    for name, make in plots.PLOTS.items():
        path, plot = DRAWN / f"{name}.svg", make()
        if not path.exists() or plot.figures() not in path.read_text(encoding="utf-8"):
            stale.append(path)
            if not check:
                plots.draw(plot, path)
    for path in stale:
        print(path.relative_to(ROOT), "differs from benchmarks/results" if check else "written", file=sys.stderr)
    if check and stale:
        print("run `python -m benchmarks.figures`", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
