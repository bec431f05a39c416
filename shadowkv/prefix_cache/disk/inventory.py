"""What a directory of snapshots holds: what is there, what is bad, and what can be removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shadowkv.prefix_cache.disk.files import SnapshotFile, read_head
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.head import BadSnapshot, file_name
from shadowkv.prefix_cache.disk.index import Entry, Index
from shadowkv.prefix_cache.disk.names import Names, Save
from shadowkv.prefix_cache.disk.scan import snapshot_names
from shadowkv.prefix_cache.protocol import UnusableName, is_snapshot_name
from shadowkv.wording import counted


@dataclass(frozen=True)
class Inventory:
    """What is in a directory.

    Attributes:
        directory: the directory.
        index: files with a good header.
        bad: what is wrong with the others, by name.
        saves: what was saved under which name.
        bad_saves: what is wrong with the files of other names.
    """

    directory: Path
    index: Index
    bad: dict[str, BadSnapshot]
    saves: dict[str, Save] = field(default_factory=dict)
    bad_saves: dict[str, UnusableName] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Inventory:
        """Reads all headers; raises OSError where the directory cannot be read."""
        inventory = cls(directory, Index(), {}, *Names(directory, FileSystem()).all())
        for name in sorted(snapshot_names(directory, FileSystem())):
            try:
                head, status = read_head(directory, name)
                inventory.index.add(Entry(head, status.st_size, status.st_mtime))
            except FileNotFoundError:
                pass  # a server has removed it
            except BadSnapshot as error:
                inventory.bad[name] = error
            except OSError as error:
                inventory.bad[name] = BadSnapshot(directory / file_name(name), f"it cannot be read, {error.strerror}")
        return inventory

    def named(self, text: str) -> str:
        """The one name that begins with ``text``, which may also be a file name; raises ValueError if there is not
        exactly one."""
        text = Path(text).name.removesuffix(file_name(""))
        matching = [name for name in [*self.index.names(), *self.bad] if name.startswith(text)]
        if len(matching) == 1 and text:
            return matching[0]
        these = f"the names of {counted(len(matching), 'snapshot')} begin" if matching else "no snapshot's name begins"
        raise ValueError(f"{these} with {text!r} in {self.directory}{'' if is_snapshot_name(text) else ' (see ls)'}")

    def rows(self) -> list[dict[str, Any]]:
        """Every snapshot's facts, the most recently used first."""
        return [
            {
                "name": entry.name,
                "start": entry.head.start,
                "length": entry.head.length,
                "file_bytes": entry.file_bytes,
                "used": entry.used,
                "created": entry.head.created,
                "parent": entry.head.parent,
                "usable": bool(self.index.chain(entry.name)),
                "origin": entry.head.origin,
                "key": entry.head.key,
                "facts": dict(entry.head.facts),
                "saved_as": sorted(name for name, save in self.saves.items() if entry.name in save.snapshots),
            }
            for entry in sorted(self.index.entries(), key=lambda entry: (-entry.used, entry.name))
        ]

    def is_there(self, save: Save) -> bool:
        """Whether everything that a name keeps is there."""
        return save.is_of(self.index.chain(save.snapshots[-1]))

    def bad_names(self, bad: Collection[str]) -> dict[str, str]:
        """What is wrong with which names: their files are bad, or what they keep is missing or ``bad``."""
        problems = {name: str(error) for name, error in self.bad_saves.items()}
        for name, save in self.saves.items():
            if not self.is_there(save) or not set(bad).isdisjoint(save.snapshots):
                problems[name] = f"what is saved as {name!r} is not all there, or not what was saved"
        return problems

    @property
    def pins(self) -> set[str]:
        """Snapshots that names keep."""
        return {snapshot for save in self.saves.values() for snapshot in save.snapshots}

    def verify(self, names: Iterable[str], progress: Callable[[int], object]) -> dict[str, BadSnapshot]:
        """Reads every byte of these snapshots; returns the faults by name. ``progress`` is called with byte counts."""
        bad = {name: error for name, error in self.bad.items() if name in set(names)}
        for name in sorted(set(names) - set(bad)):
            try:
                with SnapshotFile(self.directory, name) as file:
                    file.verify(progress)
            except FileNotFoundError:
                pass  # a server has removed it
            except BadSnapshot as error:
                bad[name] = error
            except OSError as error:
                bad[name] = BadSnapshot(self.directory / file_name(name), f"it cannot be read, {error.strerror}")
        return bad

    def surplus(self, limit: float | None = None, age: float | None = None, keep: Collection[str] = ()) -> list[Entry]:
        """What to remove so that at most ``limit`` bytes stay and nothing unused for ``age`` seconds; in order, and
        nothing that is to ``keep``."""
        entries, total = self.index.by_age(keep), self.index.bytes
        surplus = []
        for entry in entries:
            over = limit is not None and total > limit
            if over or (age is not None and time.time() - entry.used > age):
                surplus.append(entry)
                total -= entry.file_bytes
        return surplus

    def remove(self, name: str) -> None:
        """Removes a snapshot's file; raises OSError."""
        FileSystem().remove(self.directory / file_name(name))
