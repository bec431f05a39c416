"""What a server and the prefix cache say to one another: names, what was saved under them, and why not.

Needs neither NumPy nor PyTorch.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

LINK_BYTES = 20
"""Size of a link in the chain that names of snapshots are made of (``page_names.py``)."""

SNAPSHOT_NAME = f"[0-9a-f]{{{2 * LINK_BYTES}}}"
"""Regular expression of a snapshot's name."""

SAVE_NAME = "[A-Za-z0-9._-]{1,64}"
"""Regular expression of what a prompt may be saved as: also valid as a file name, and leads out of no directory."""

OWNER_DIGITS = 16
"""Hex digits that stand for whom a save belongs to, where a server keeps its API keys apart."""

KEPT_NAME = f"(?:[0-9a-f]{{{OWNER_DIGITS}}}[.])?{SAVE_NAME}"
"""Regular expression of the name on the disk, which begins with its owner if it has one."""

_SNAPSHOT_NAME, _SAVE_NAME, _KEPT_NAME = map(re.compile, (SNAPSHOT_NAME, SAVE_NAME, KEPT_NAME))


def is_snapshot_name(text: str) -> bool:
    """Whether ``text`` has the form of a snapshot's name."""
    return _SNAPSHOT_NAME.fullmatch(text) is not None


def check_save_name(name: str) -> str:
    """Returns a valid name to save as; raises ValueError, with the name in its message, for another."""
    if _SAVE_NAME.fullmatch(name) is None:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        raise ValueError(f"{shown!r} is no name to save as: that is 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name


def check_kept_name(name: str) -> str:
    """Returns a name that can be on the disk; raises ValueError for another."""
    return name if _KEPT_NAME.fullmatch(name) else check_save_name(name)


@dataclass(frozen=True)
class Saved:
    """What was saved or restored.

    Attributes:
        tokens: number of the prompt's tokens, from its first on.
        nbytes: of the files that hold them.
        snapshots: names of their snapshots, each after the one that it continues.
    """

    tokens: int
    nbytes: int
    snapshots: tuple[str, ...] = ()


Answer = Future[Saved]
"""Raises SaveError; a caller that cancels it has given up."""


def settle(answer: Future[Any], outcome: object) -> None:
    """Sets a result, or an exception, unless the future is done or the caller has given up."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


class SaveError(Exception):
    """A prompt that cannot be saved or restored by name, and why."""


class UnknownName(SaveError):
    """Nothing is saved under a name, or not any more."""


class UnusableName(SaveError):
    """What is saved under a name belongs to another model or policy, or its file is not what was written."""


class NotDone(SaveError):
    """The tiers have no room for it, or have failed."""


class ComputedTwice(NotDone):
    """A prompt continues what the disk has as others computed it; recomputed here, it can be saved."""


class DiskTooSlow(SaveError):
    """The disk has not answered in time."""
