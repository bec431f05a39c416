"""What is in a directory of snapshots: their chains, and which is evicted next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from shadowkv.prefix_cache.disk.head import Head


@dataclass(frozen=True)
class Entry:
    """A file that was found.

    Attributes:
        head: its header.
        file_bytes: its total size.
        used: when it was last read or written, in seconds since 1970, by any process.
    """

    head: Head
    file_bytes: int
    used: float

    @property
    def name(self) -> str:
        """Name of the snapshot."""
        return self.head.name


class Index:
    """Entries by name; every method may be called from any thread, and none waits for a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._bytes = 0

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all files on the disk."""
        return self._bytes

    def add(self, entry: Entry) -> None:
        """Adds an entry, replacing any with its name."""
        with self._lock:
            self._drop(entry.name)
            self._entries[entry.name] = entry
            self._bytes += entry.file_bytes

    def remove(self, name: str) -> Entry | None:
        """Removes an entry; returns it if it was there."""
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> Entry | None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= entry.file_bytes
        return entry

    def used(self, name: str, seconds: float) -> None:
        """Records when an entry was used."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                self._entries[name] = replace(entry, used=max(seconds, entry.used))

    def get(self, name: str) -> Entry | None:
        """The entry of a name."""
        return self._entries.get(name)

    def names(self) -> set[str]:
        """All names."""
        with self._lock:
            return set(self._entries)

    def size(self, names: Collection[str]) -> int:
        """Total bytes on the disk of the named files, where present."""
        with self._lock:
            return sum(self._entries[name].file_bytes for name in names if name in self._entries)

    def entries(self) -> list[Entry]:
        """All entries."""
        with self._lock:
            return list(self._entries.values())

    def chain(self, name: str) -> list[Entry]:
        """The snapshots that lead to one, from a prompt's first token on, with itself last; empty if one of them is
        missing or is not what the next was computed on."""
        chain: list[Entry] = []
        with self._lock:
            while name:
                entry = self._entries.get(name)
                if entry is None or not self.fits(entry.head):
                    return []
                chain.append(entry)
                name = entry.head.parent
        return chain[::-1]

    def fits(self, head: Head) -> bool:
        """Whether the snapshot that ``head`` continues is there, and is the one that it was computed on."""
        if not head.parent:
            return True
        parent = self._entries.get(head.parent)
        # A parent begins before it, so no chain is a cycle, whatever files say. The parent may be longer: what
        # continues a page in its middle need not reach its end.
        return (
            parent is not None
            and parent.head.uid == head.parent_uid
            and parent.head.origin == head.origin
            and parent.head.start < head.start <= parent.head.length
        )

    def by_age(self, keep: Collection[str] = ()) -> list[Entry]:
        """All but those to ``keep``, in eviction order: first what no other continues, then the least recently used. A
        snapshot counts as used when the newest that continues it was, and its ``used`` says so; it is evicted after
        that one."""
        entries = self.entries()
        used = {entry.name: entry.used for entry in entries}
        for entry in sorted(entries, key=lambda entry: -entry.head.start):
            if entry.head.parent in used:
                used[entry.head.parent] = max(used[entry.head.parent], used[entry.name])
        order = {entry.name: (self.fits(entry.head), used[entry.name], -entry.head.start) for entry in entries}
        others = [replace(entry, used=used[entry.name]) for entry in entries if entry.name not in keep]
        return sorted(others, key=lambda entry: order[entry.name])
