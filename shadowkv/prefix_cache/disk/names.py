"""Names under which prompts are saved. A name is a small file in the directory of snapshots.

``names/NAME.json`` lists the snapshots of a prompt from its first token on. The file has neither the tokens nor the
salt. No server evicts the listed snapshots, and ``prune`` does not remove them, until the name is saved again or
forgotten. The list includes all ancestors. So a server keeps these even before it has read the snapshots' files.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.kvcache.snapshots.dataclass_json import MAX_BYTES, from_json, to_json
from shadowkv.prefix_cache.disk.filesystem import FileSystem, NewFile
from shadowkv.prefix_cache.disk.header import MAX_NUMBER, FileHeader
from shadowkv.prefix_cache.protocol import UnknownName, UnusableName, check_kept_name, is_snapshot_name

logger = logging.getLogger(__name__)

FOLDER, SUFFIX = "names", ".json"

FORMAT = "shadowkv-name-1"

CLOCK_NANOSECONDS = 2 * 10**9
"""If a folder changed less than this number of nanoseconds before it was listed, it is listed again. File systems may
round times, so a change after the listing could leave the folder's time as it was."""


@dataclass(frozen=True)
class Save:
    """The contents of a name's file: the snapshots that it keeps. Raises ValueError for impossible values.

    Attributes:
        format: format of the file.
        key: digest of what the snapshots' bytes depend on.
        tokens: number of saved tokens, from the prompt's first token on.
        snapshots: names of the snapshots. Each continues the one before.
        saved: time of saving, in seconds since 1970.
    """

    format: str
    key: str
    tokens: int
    snapshots: tuple[str, ...]
    saved: int

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"its format is {self.format[:40]!r}, not {FORMAT!r}")
        for name in (self.key, *self.snapshots):
            if not is_snapshot_name(name):
                raise ValueError(f"{name[:80]!r} is not 40 hex digits")
        if not self.snapshots or len(set(self.snapshots)) < len(self.snapshots):
            raise ValueError("it must list one snapshot or more, each once")
        if not (1 <= self.tokens <= MAX_NUMBER and 0 <= self.saved <= MAX_NUMBER):
            raise ValueError(f"{self.tokens} tokens saved at {self.saved} are impossible")

    @classmethod
    def new(cls, key: str, tokens: int, snapshots: tuple[str, ...]) -> Save:
        """Returns a save with the current time."""
        return cls(FORMAT, key, tokens, snapshots, int(time.time()))

    def is_of(self, chain: Sequence[FileHeader]) -> bool:
        """Whether ``chain`` has exactly the listed snapshots, with this key, and ends with the one that has the last
        saved token."""
        return (
            tuple(header.name for header in chain) == self.snapshots
            and all(header.key == self.key for header in chain)
            and chain[-1].start < self.tokens <= chain[-1].length
        )


def name_file(name: str) -> str:
    """Returns the path of a name's file below the directory of snapshots. Raises ValueError for an invalid name."""
    return f"{FOLDER}/{check_kept_name(name)}{SUFFIX}"


class Names:
    """The names of a directory of snapshots. Any thread may call its methods, which wait for the disk."""

    def __init__(self, directory: Path, files: FileSystem) -> None:
        self._directory, self._files, self._folder = directory, files, directory / FOLDER
        # The folder's time of change, its pins, and its bad names. They are one attribute, so that threads replace them
        # together.
        self._known: tuple[int | None, frozenset[str], frozenset[str]] = None, frozenset(), frozenset()

    @property
    def pins(self) -> frozenset[str]:
        """Snapshots that names keep, as of the last ``refresh``. Does not wait for the disk."""
        return self._known[1]

    def path(self, name: str) -> Path:
        """Path of a name's file. Raises ValueError for an invalid name."""
        return self._directory / name_file(name)

    def read(self, name: str) -> Save:
        """Returns the save of a name. Raises UnknownName, UnusableName if its file is corrupt, and OSError."""
        path = self.path(name)
        try:
            descriptor = self._files.open(path)
        except FileNotFoundError:
            raise UnknownName(f"nothing is saved as {name!r}") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _bad(path, "it is a link") from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _bad(path, "it is not a regular file")
            data, size = bytearray(MAX_BYTES + 1), 0
            while count := self._files.read(descriptor, memoryview(data)[size:], size):
                size += count
        finally:
            os.close(descriptor)
        try:
            return from_json(Save, bytes(data[:size]))
        except ValueError as error:
            raise _bad(path, str(error)) from None

    def write(self, name: str, save: Save, *, replace: bool = True) -> bool:
        """Writes a name's file. Returns False if the name exists and ``replace`` is False. If it raises OSError,
        nothing has changed."""
        path = self.path(name)
        with NewFile(self._directory, self._files) as file:
            file.write(to_json(save).encode(), 0)
            self._files.make_directory(self._folder)
            return file.publish(path, lambda: replace)

    def remove(self, name: str) -> None:
        """Removes a name, even if its file is bad. Raises UnknownName and OSError."""
        path = self.path(name)
        try:
            exists = path.name in self._files.names(path.parent)
        except FileNotFoundError:
            exists = False
        if not exists:
            raise UnknownName(f"nothing is saved as {name!r}")
        self._files.remove(path)

    def all(self) -> tuple[dict[str, Save], dict[str, UnusableName]]:
        """Returns all saves by name, and the faults of names with a bad file. Raises OSError."""
        saves: dict[str, Save] = {}
        bad: dict[str, UnusableName] = {}
        try:
            files = sorted(self._files.names(self._folder))
        except FileNotFoundError:
            return saves, bad
        for file in files:
            name = file.removesuffix(SUFFIX)
            if name == file:
                continue
            try:
                saves[name] = self.read(name)
            except UnknownName:
                pass  # the name has just been removed
            except UnusableName as error:
                bad[name] = error
            except ValueError:
                pass  # not a valid name
        return saves, bad

    def refresh(self) -> frozenset[str]:
        """Returns the current ``pins``. Reads the names again if the folder has changed. Raises OSError."""
        try:
            changed = self._files.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            self._known = None, frozenset(), frozenset()
            return frozenset()
        seen, pins, complained = self._known
        if changed != seen:
            now = time.time_ns()
            saves, bad = self.all()
            for name in bad.keys() - complained:
                logger.warning("%s", bad[name])
            pins = frozenset(snapshot for save in saves.values() for snapshot in save.snapshots)
            self._known = changed if now - changed > CLOCK_NANOSECONDS else None, pins, frozenset(bad)
        return pins


def _bad(path: Path, problem: str) -> UnusableName:
    return UnusableName(f"{FOLDER}/{path.name} is not what was written: {problem}; save it anew")
