"""Texts and words of Debian's packages, for samples to be made of; nothing of them is in an adapter's repository.

``python -m training texts --out DIR`` needs Debian or Ubuntu (``apt-get download``, ``dpkg``).
"""

from __future__ import annotations

import gzip
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text", "jargon-text", "perl-doc", "wordnet-base")
"""Public domain (the King James Bible, the Jargon File), Perl's own licences, WordNet's licence."""
KINDS = {"noun": "noun", "adjective": "adj", "verb": "verb"}
"""Lists of words, named as RULER's are, and WordNet's names for them."""
SECTION = 20_000
"""Characters; sections of all texts are mixed, so that every stretch of the whole has several kinds."""
PROSE = 12_000_000
"""Characters that are kept: 3 million tokens, a small file to carry to another machine."""


@dataclass(frozen=True)
class Texts:
    """What samples are made of.

    Attributes:
        words: the prose, split at white space.
        folder: holds the word lists, ``nounlist.txt`` and so on, where RULER's generators look for them.
    """

    words: list[str]
    folder: Path


@cache
def read_texts(folder: Path) -> Texts:
    """What ``write_texts`` wrote; raises FileNotFoundError that says how to get it."""
    prose = folder / "prose.txt"
    if not prose.is_file():
        raise FileNotFoundError(f"{prose} is missing: run python -m training texts --out {folder}")
    return Texts(prose.read_text(encoding="utf-8").split(), folder)


def write_texts(out: Path) -> None:
    """Downloads the packages, and writes the prose and the word lists; raises CalledProcessError without apt."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=root, check=True)
        for archive in root.glob("*.deb"):
            subprocess.run(["dpkg", "-x", archive, root], check=True)
        sections = [text[start : start + SECTION] for text in _prose(root) for start in range(0, len(text), SECTION)]
        random.Random("sections").shuffle(sections)
        (out / "prose.txt").write_text("\n".join(sections)[:PROSE], encoding="utf-8")
        for kind, name in KINDS.items():
            words = sorted(_words(root / "usr/share/wordnet" / f"index.{name}"))
            (out / f"{kind}list.txt").write_text("\n".join(words), encoding="utf-8")


def _prose(root: Path) -> Iterator[str]:
    verses = [str(root / "usr/bin/bible"), "-l10000", "-p", str(root / "usr/lib"), "gen1:1-rev22:21"]
    done = subprocess.run(verses, capture_output=True, text=True, check=True)
    yield re.sub(r"\s+\d+ (?=[A-Z])", " ", done.stdout)
    yield gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode("utf-8", "replace")
    for pod in sorted(root.glob("usr/share/perl/*/pod/*.pod")):
        text = pod.read_text(encoding="utf-8", errors="replace")
        # Prose only: paragraphs that begin in the first column, with the names of marks taken away.
        paragraphs = (paragraph for paragraph in text.split("\n\n") if paragraph[:1].isalpha())
        if not re.search(r"delta|toc|api|intern|uniprops", pod.name):
            yield re.sub(r"[A-Z]<+([^<>]*)>+", r"\1", "\n".join(paragraphs))
    for name in KINDS.values():
        lines = (root / "usr/share/wordnet" / f"data.{name}").read_text(encoding="utf-8").splitlines()
        glosses = [line.split(" | ") for line in lines if not line.startswith("  ")]
        yield "\n".join(f"{head.split()[4].replace('_', ' ')}: {gloss.strip()}." for head, gloss in glosses)


def _words(index: Path) -> Iterator[str]:
    """Words of one part that WordNet counted in a text at least once."""
    for line in index.read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if not line.startswith(" ") and re.fullmatch(r"[a-z]{3,12}", fields[0]):
            pointers = int(fields[3])
            if int(fields[5 + pointers]) > 0:
                yield fields[0]
