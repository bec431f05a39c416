"""What can be wrong with a snapshot's file, and with a request by name."""

from __future__ import annotations

from pathlib import Path


class BadSnapshot(Exception):
    """A file that is not byte for byte what was written; it is never served.

    Attributes:
        path: of the file.
        problem: what is wrong with it.
        action: what was done about it.
    """

    def __init__(self, path: Path, problem: str, action: str = "not served") -> None:
        super().__init__(path, problem, action)
        self.path, self.problem, self.action = path, problem, action

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.action}"


class SnapshotGone(Exception):
    """A file that is gone, or replaced by another under its name: an ordinary miss."""


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
