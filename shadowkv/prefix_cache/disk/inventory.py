"""``Inventory``: a directory of snapshots that is read once. ``shadowkv cache`` uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from shadowkv.prefix_cache.disk.directory import Directory
from shadowkv.prefix_cache.disk.files import SnapshotFile
from shadowkv.prefix_cache.disk.header import SUFFIX, BadSnapshot, FileHeader
from shadowkv.prefix_cache.disk.names import Save
from shadowkv.prefix_cache.protocol import is_snapshot_name
from shadowkv.wording import counted


class Inventory(Directory):
    """The snapshots and saved names of a directory. Files with a bad header are not in it, but in ``bad``. Raises
    OSError if the directory cannot be read.

    Attributes:
        saves: the saves with a good file, by name.
        bad_saves: faults of the other names' files, by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.saves, self.bad_saves = self.names.all()
        self.bad = self._faults(self.listed(), self.read)

    def _faults(self, names: Iterable[str], use: Callable[[str], object]) -> dict[str, BadSnapshot]:
        """Calls ``use`` with each name. Returns the faults of files by name."""
        bad: dict[str, BadSnapshot] = {}
        for name in sorted(names):
            try:
                use(name)
            except FileNotFoundError:
                pass  # a server has removed it
            except BadSnapshot as error:
                bad[name] = error
            except OSError as error:
                bad[name] = self.unreadable(name, error)
        return bad

    def named(self, text: str) -> str:
        """Returns the only snapshot whose name starts with ``text``, which may be a file name. Raises ValueError if
        none or several start with it."""
        text = Path(text).name.removesuffix(SUFFIX)
        matching = [name for name in [*self.known(), *self.bad] if name.startswith(text)]
        if len(matching) == 1 and text:
            return matching[0]
        these = f"the names of {counted(len(matching), 'snapshot')} begin" if matching else "no snapshot's name begins"
        raise ValueError(f"{these} with {text!r} in {self.path}{'' if is_snapshot_name(text) else ' (see ls)'}")

    def rows(self) -> list[dict[str, Any]]:
        """A row of facts for each snapshot, the most recently used first."""
        return [
            {
                "name": header.name,
                "start": header.start,
                "length": header.length,
                "file_bytes": header.file_bytes,
                "state_bytes": header.state_bytes,
                "used": used,
                "created": header.created,
                "parent": header.parent,
                "usable": bool(self.chain(header.name)),
                "origin": header.origin,
                "key": header.key,
                "facts": dict(header.facts),
                "saved_as": sorted(name for name, save in self.saves.items() if header.name in save.snapshots),
            }
            for header, used in sorted(self.with_uses(), key=lambda file: (-file[1], file[0].name))
        ]

    def is_there(self, save: Save) -> bool:
        """Whether all snapshots of a save exist."""
        return save.is_of(self.chain(save.snapshots[-1]))

    def bad_names(self, bad: Collection[str]) -> dict[str, str]:
        """Returns the faults by saved name: the name's file is bad, or a snapshot that it keeps is missing or is one of
        the ``bad`` ones."""
        problems = {name: str(error) for name, error in self.bad_saves.items()}
        for name, save in self.saves.items():
            if not self.is_there(save) or not set(bad).isdisjoint(save.snapshots):
                problems[name] = f"snapshots of the saved name {name!r} are missing, or are not those that were saved"
        return problems

    @property
    def pins(self) -> set[str]:
        """Snapshots that names keep."""
        return {snapshot for save in self.saves.values() for snapshot in save.snapshots}

    def verify(self, names: Collection[str], progress: Callable[[int], object]) -> dict[str, BadSnapshot]:
        """Reads every byte of these snapshots. Returns the faults by name. ``progress`` is called with byte counts."""

        def verify(name: str) -> None:
            with SnapshotFile(self.path, name, self.files) as file:
                file.verify(progress)

        known = {name: self.bad[name] for name in names if name in self.bad}
        return known | self._faults(set(names) - known.keys(), verify)

    def surplus(
        self, limit: float | None = None, age: float | None = None, keep: Collection[str] = ()
    ) -> list[FileHeader]:
        """Returns the files to remove, in eviction order. After their removal there are at most ``limit`` bytes, and no
        file that was unused for ``age`` seconds. None means no limit. Files in ``keep`` always stay."""
        surplus, total = [], self.bytes
        for header, used in self.by_age(keep):
            over = limit is not None and total > limit
            if over or (age is not None and time.time() - used > age):
                surplus.append(header)
                total -= header.file_bytes
        return surplus

    def chains(self, names: Sequence[str]) -> list[FileHeader]:
        """Returns the snapshots and their ancestors, each once and after its own ancestors. Raises ValueError if one is
        unusable."""
        headers: dict[str, FileHeader] = {}
        for name in names:
            if name in self.bad:
                raise ValueError(str(self.bad[name]))
            chain = self.chain(name)
            if not chain:
                raise ValueError(f"the snapshot that {name} continues is missing, or is another one of the same name")
            headers |= {header.name: header for header in chain}
        return list(headers.values())

    def chosen(self, texts: Sequence[str]) -> tuple[list[FileHeader], dict[str, Save]]:
        """The snapshots and saves to export. A text is a saved name, or the start of a snapshot's name.

        A saved name adds itself and its snapshots. A snapshot adds itself, its ancestors, and all saved names whose
        snapshots are among these. Raises ValueError and UnusableName if something is missing or unusable.
        """
        saves: dict[str, Save] = {}
        snapshots = []
        for text in texts:
            if text in self.bad_saves:
                raise self.bad_saves[text]
            if (save := self.saves.get(text)) is None:
                snapshots.append(self.named(text))
            elif self.is_there(save):
                saves[text] = save
            else:
                raise ValueError(f"snapshots of the saved name {text!r} are missing, or are not those that were saved")
        along = {header.name for header in self.chains(snapshots)}
        for name, save in self.saves.items():
            if along.issuperset(save.snapshots) and self.is_there(save):
                saves[name] = save
        return self.chains(snapshots + [save.snapshots[-1] for save in saves.values()]), saves
