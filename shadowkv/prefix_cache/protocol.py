"""Names, results and errors of saving and restoring prompts, which the server and the prefix cache share.

The server imports this module without NumPy and PyTorch.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

LINK_BYTES = 20
"""Bytes of a link in the chain of hashes (``page_hashes.py``). A snapshot's name is a link in hex."""

SNAPSHOT_NAME = f"[0-9a-f]{{{2 * LINK_BYTES}}}"
"""Regular expression of a snapshot's name."""

SAVE_NAME = "[A-Za-z0-9._-]{1,64}"
"""Regular expression of names under which clients save prompts. They are valid file names without a path."""

OWNER_DIGITS = 16
"""Hex digits of a save's owner. Saves have an owner only on servers that keep the saves of different API keys apart."""

KEPT_NAME = f"(?:[0-9a-f]{{{OWNER_DIGITS}}}[.])?{SAVE_NAME}"
"""Regular expression of names on the disk. If a save has an owner, its name starts with the owner and a dot."""

_SNAPSHOT_NAME, _SAVE_NAME, _KEPT_NAME = map(re.compile, (SNAPSHOT_NAME, SAVE_NAME, KEPT_NAME))


def is_snapshot_name(text: str) -> bool:
    """Whether ``text`` has the form of a snapshot's name."""
    return _SNAPSHOT_NAME.fullmatch(text) is not None


def check_save_name(name: str) -> str:
    """Returns ``name`` if clients may save prompts under it. Raises ValueError with the name otherwise."""
    if _SAVE_NAME.fullmatch(name) is None:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        raise ValueError(f"{shown!r} is no valid name: use 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name


def check_kept_name(name: str) -> str:
    """Returns ``name`` if it can be a name on the disk. Raises ValueError otherwise."""
    return name if _KEPT_NAME.fullmatch(name) else check_save_name(name)


@dataclass(frozen=True)
class Saved:
    """The result of saving or restoring a prompt.

    Attributes:
        tokens: number of tokens, from the prompt's first token on.
        nbytes: bytes of the snapshots' files.
        snapshots: names of the snapshots. Each continues the one before.
    """

    tokens: int
    nbytes: int
    snapshots: tuple[str, ...] = ()


Answer = Future[Saved]
"""The result of a request to save or restore. It raises SaveError. A caller that has given up cancels it."""


def settle(answer: Future[Any], outcome: object) -> None:
    """Sets a future's result or exception, unless it is done or cancelled."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


class SaveError(Exception):
    """A prompt cannot be saved or restored. The message has the reason."""


class UnknownName(SaveError):
    """No prompt is saved under the name, or not any more."""


class UnusableName(SaveError):
    """The name's save belongs to another model or policy, or its file is corrupt."""


class NotDone(SaveError):
    """The tiers have no room for the prompt, or have failed."""


class WrittenByAnotherServer(NotDone):
    """Another server has stored the start of this prompt. This server's pages cannot extend that server's files. This
    server must compute the whole prompt itself before it can save the prompt."""


class DiskTooSlow(SaveError):
    """The disk has not answered in time."""
