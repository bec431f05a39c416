"""Reads PDFs as the server does, and counts words of their known texts that come out otherwise: lost, or joined.

python -m robustness.pdf_words paper.pdf paper.txt [FILE.pdf FILE.txt ...]

A word is a run of letters and digits. It counts as lost where the sequence of words that was read does not have it in
its place; by a space where only spaces between letters differ: words were joined or divided. Words that only the PDF
has, such as numbers of pages, count for nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.page.documents import read_document
from shadowkv.wording import counted

MOST = 0.005
"""Share of words that may be lost."""


def words(text: str) -> list[str]:
    """The words of a text, with ligatures as letters and without soft hyphens."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).replace("\u00ad", "").casefold())


def lost(known: list[str], read: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Runs of known words that were lost, each with what was read in their place."""
    matcher = SequenceMatcher(None, known, read, autojunk=False)
    for here, there in pairwise([(0, 0, 0), *matcher.get_matching_blocks()]):
        first, last = here[0] + here[2], there[0]
        if first < last:
            yield known[first:last], read[here[1] + here[2] : there[1]]


def main() -> int:
    """Prints a line for each PDF; returns 1 where one is refused or loses more than ``MOST``."""
    parser = argparse.ArgumentParser(prog="python -m robustness.pdf_words", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a PDF and its text, one after the other")
    parser.add_argument("--show", action="store_true", help="print what was lost, and what was read instead")
    options = parser.parse_args()
    if len(options.files) % 2:
        parser.error("every PDF needs a text after it")
    failed = False
    for document, text in zip(options.files[::2], options.files[1::2], strict=True):
        known = words(text.read_text(encoding="utf-8"))
        try:
            found = read_document(document.read_bytes())
        except ApiError as error:
            print(f"{document.name}: refused: {error}")
            failed = True
            continue
        runs = list(lost(known, words(found.text)))
        number = sum(len(run) for run, _ in runs)
        joined = sum(len(run) for run, read in runs if "".join(run) == "".join(read))
        size = f"{counted(found.pages, 'page')}, {counted(len(known), 'word')}"
        print(f"{document.name}: {size}, {number} lost ({number / len(known):.2%}), {joined} by a space")
        failed |= number > MOST * len(known)
        if options.show:
            print(*(f"    {' '.join(run)!r}, read as {' '.join(read)!r}" for run, read in runs), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
