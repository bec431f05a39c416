"""Stores clients' data in a folder that all HTTP processes share: an SQLite database, and files beside it.

Every record belongs to an owner, which is an API key, and counts towards that owner's limit. When room is needed, the
owner's responses and ended OpenAI batches are evicted, the least recently used first. Files, open batches and
Anthropic's batches are never evicted: only their owner removes them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from shadowkv.engine.held_folder import HeldFolder
from shadowkv.serve.bodies.api_error import ApiError

logger = logging.getLogger(__name__)

Kind = Literal["file", "response", "batch", "message_batch"]

MIN_BYTES = 4096
"""Minimum number of bytes that a record counts for: a record without content takes room, too."""

NOT_FOUND = 404
"""Status of the error for a record that is gone."""

OUTPUT = "batch_output"
"""Purpose of the files that batches write."""

BUSY_SECONDS = 30.0
"""Maximum time that a process waits for another process's transaction, in seconds. A transaction takes
milliseconds."""

TABLES = (
    "CREATE TABLE IF NOT EXISTS records (owner TEXT, kind TEXT, id TEXT, created REAL, used REAL, bytes INTEGER, "
    "open INTEGER, value BLOB, PRIMARY KEY (owner, kind, id))",
    "CREATE INDEX IF NOT EXISTS by_age ON records (owner, kind, created, id)",
    "CREATE INDEX IF NOT EXISTS by_use ON records (owner, kind, used, bytes)",
    "CREATE INDEX IF NOT EXISTS by_state ON records (open, created)",
)


OF_KEY = "FROM records WHERE owner = ? AND kind = ? AND id = ?"


@dataclass(frozen=True)
class Record:
    """A stored record: ``value`` is JSON; ``created`` is in seconds since 1970."""

    owner: str
    kind: Kind
    id: str
    created: float
    value: Any


class RecordStore:
    """The records of all owners.

    Args:
        folder: folder of the records; None for a temporary folder of this process.
        limit: maximum bytes of each owner; 0 stores nothing.

    Raises ApiError if the given folder cannot be used.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.limit, self._folder, self._first = limit, folder, threading.Lock()
        self._own: HeldFolder | None = None
        if folder is not None and limit:
            begin = time.time()
            self._make(folder)
            self._remove_leftovers(folder, begin)

    def close(self) -> None:
        """Removes the folder, if it is a temporary one."""
        if self._own is not None:
            self._own.remove()

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise storage_failed(folder, error) from error
        with self._transaction(folder) as database:
            for statement in TABLES:
                database.execute(statement)

    def _remove_leftovers(self, folder: Path, begin: float) -> None:
        """Removes files without a record, which killed servers have left. Files written after ``begin`` stay: other
        processes of this server may already be writing them."""
        with self._transaction(folder) as database:
            kept = {id for (id,) in database.execute("SELECT id FROM records WHERE kind != 'response'")}
        for pattern in ("files/new-*", "files/*/file-*", "batches/*"):
            for path in folder.glob(pattern):
                with suppress(OSError):  # another process was faster
                    if path.name not in kept and path.stat().st_mtime < begin:
                        _remove(path)

    @property
    def is_on(self) -> bool:
        """Whether this server stores anything."""
        return bool(self.limit)

    @property
    def lock(self) -> Path:
        """The lock file of the server that answers the batches stored here."""
        return self._root / "lock"

    @property
    def _root(self) -> Path:
        if not self.limit:
            raise ApiError("this server stores nothing (--storage-mib 0)", code="not_kept")
        with self._first:
            if self._folder is None:
                self._own = HeldFolder("kept-")
                self._make(Path(self._own.path))
                self._folder = Path(self._own.path)
        return self._folder

    def file(self, owner: str, id: str) -> Path:
        """Path of a file's content."""
        return content_in(self._root / "files" / _folder_name(owner), id)

    def folder_of(self, owner: str) -> Path | None:
        """The folder of an owner's files, for ``content_in``; None if nothing is stored."""
        return self._root / "files" / _folder_name(owner) if self.is_on else None

    @contextmanager
    def _transaction(self, folder: Path | None = None) -> Iterator[sqlite3.Connection]:
        """A context with a transaction; raises ApiError if the database fails."""
        root = folder or self._root
        try:
            database = sqlite3.connect(root / "records.sqlite", timeout=BUSY_SECONDS, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(
                    "PRAGMA synchronous = NORMAL"
                )  # a power cut can lose the last transactions, but corrupts nothing
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            finally:
                database.close()  # rolls back an uncommitted transaction
        except sqlite3.Error as error:
            raise storage_failed(root, error) from error

    # -- records ---------------------------------------------------------------------------------------------------

    def put(
        self,
        owner: str,
        kind: Kind,
        id: str,
        value: Any,
        content: int = 0,
        is_open: bool = False,
        room_of: Record | None = None,
    ) -> Record:
        """Stores a record and returns it. An existing record with the same id is replaced.

        Args:
            value: written as JSON.
            content: bytes of a file beside the record.
            is_open: whether the record is unfinished work.
            room_of: another record of the owner, whose size includes room for this one. The size of that record is
                reduced by the size of this one.

        Raises ApiError if the owner's limit leaves no room.
        """
        raw, key = msgspec.json.encode(value), (owner, kind, id)
        now, size = time.time(), max(MIN_BYTES, len(raw) + content)
        with self._transaction() as database:
            row = database.execute(f"SELECT created {OF_KEY}", key).fetchone()
            database.execute(f"DELETE {OF_KEY}", key)
            if room_of is not None:
                moved = (size, room_of.owner, room_of.kind, room_of.id)
                database.execute("UPDATE records SET bytes = bytes - ? WHERE owner = ? AND kind = ? AND id = ?", moved)
            removed = self._make_room(database, owner, size)
            created = now if row is None else row[0]
            row = (*key, created, now, size, int(is_open), raw)
            database.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._remove_content(owner, removed)
        return Record(owner, kind, id, created, value)

    def change(self, record: Record, change: Callable[[Any], bool], content: int | None = None) -> Record:
        """Applies ``change`` to the record's value in a transaction and returns the new record. ``change`` returns
        whether the record is still unfinished work. ``content``, if given, is as for ``put``.

        Raises ApiError if the record is gone, or the owner's limit leaves no room.
        """
        key = (record.owner, record.kind, record.id)
        with self._transaction() as database:
            row = database.execute(f"SELECT value, bytes {OF_KEY}", key).fetchone()
            if row is None:
                raise _not_found(record.kind, record.id)
            value = msgspec.json.decode(row[0])
            is_open = int(change(value))
            raw, size, removed = msgspec.json.encode(value), row[1], []
            if content is not None:
                size = max(MIN_BYTES, len(raw) + content)
                removed = self._make_room(database, record.owner, size - row[1], record.id)
            changed = (raw, is_open, size, time.time(), *key)
            columns = "value = ?, open = ?, bytes = ?, used = ?"
            database.execute(f"UPDATE records SET {columns} WHERE owner = ? AND kind = ? AND id = ?", changed)
        self._remove_content(record.owner, removed)
        return replace(record, value=value)

    def _make_room(
        self, database: sqlite3.Connection, owner: str, size: int, grown: str = ""
    ) -> list[tuple[Kind, str]]:
        """Removes responses and ended OpenAI batches, the least recently used first, until ``size`` more bytes fit. The
        record with the id ``grown`` stays: it needs these bytes. Returns the kinds and ids of the removed records."""
        removed: list[tuple[Kind, str]] = []
        (used,) = database.execute("SELECT COALESCE(SUM(bytes), 0) FROM records WHERE owner = ?", (owner,)).fetchone()
        of_oldest = "WHERE owner = ? AND kind IN ('response', 'batch') AND NOT open AND id != ? ORDER BY used LIMIT 1"
        while size > 0 and used + size > self.limit:
            oldest = database.execute(f"SELECT kind, id, bytes FROM records {of_oldest}", (owner, grown)).fetchone()
            if oldest is None:
                text = f"{used + size} bytes exceed the limit of {self.limit} bytes for an API key"
                raise ApiError(f"{text} (--storage-mib); delete files or batches", code="storage_full")
            database.execute(f"DELETE {OF_KEY}", (owner, *oldest[:2]))
            used -= oldest[2]
            removed.append(oldest[:2])
        return removed

    def get(self, owner: str, kind: Kind, id: str) -> Record:
        """Returns the owner's record with an id; raises ApiError if there is none."""
        key = (owner, kind, id)
        with self._transaction() as database:
            row = database.execute(f"SELECT created, value {OF_KEY}", key).fetchone()
            if row is None:
                raise _not_found(kind, id)
            used = (time.time(), *key)
            database.execute("UPDATE records SET used = ? WHERE owner = ? AND kind = ? AND id = ?", used)
        return Record(owner, kind, id, row[0], msgspec.json.decode(row[1]))

    def page(
        self,
        owner: str,
        kind: Kind,
        limit: int,
        after: str | None,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> list[Record]:
        """Returns the records that follow the record ``after`` in the list (None: from the beginning). Returns up to
        ``limit`` + 1 records, so that the caller sees whether there are more than ``limit``. ``purpose`` restricts
        files to one purpose."""
        order = "DESC" if newest_first else "ASC"
        values: list[Any] = [owner, kind]
        where = "owner = ? AND kind = ?"
        if after is not None:
            values += [self.get(owner, kind, after).created, after]
            where += f" AND (created, id) {'<' if newest_first else '>'} (?, ?)"
        if purpose is not None:
            values.append(purpose)
            where += " AND json_extract(CAST(value AS TEXT), '$.purpose') = ?"
        query = f"SELECT id, created, value FROM records WHERE {where} ORDER BY created {order}, id {order} LIMIT ?"
        with self._transaction() as database:
            rows = database.execute(query, (*values, limit + 1)).fetchall()
        return [Record(owner, kind, id, created, msgspec.json.decode(value)) for id, created, value in rows]

    def remove(self, owner: str, kind: Kind, id: str) -> None:
        """Removes a record and its content; raises ApiError if the owner has no such record."""
        with self._transaction() as database:
            if not database.execute(f"DELETE {OF_KEY}", (owner, kind, id)).rowcount:
                raise _not_found(kind, id)
        self._remove_content(owner, [(kind, id)])

    def _remove_content(self, owner: str, removed: Iterable[tuple[Kind, str]]) -> None:
        """Removes the content of records that are gone."""
        for kind, id in removed:
            if kind != "response":
                _remove(self.file(owner, id) if kind == "file" else self.work_folder(id))

    def open_records(self) -> list[Record]:
        """The unfinished work of all owners, oldest first."""
        if self._folder is None:  # nothing was ever stored
            return []
        query = "SELECT owner, kind, id, created, value FROM records WHERE open = 1 ORDER BY created"
        with self._transaction() as database:
            rows = database.execute(query).fetchall()
        decode = msgspec.json.decode
        return [Record(owner, kind, id, created, decode(raw)) for owner, kind, id, created, raw in rows]

    def work_folder(self, batch: str) -> Path:
        """Folder of a batch while it is answered. For Anthropic's batches, it also holds the results."""
        return self._root / "batches" / batch

    # -- files -----------------------------------------------------------------------------------------------------

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """A context with the path of a new file, for ``add_file``. A file that is not added is removed at the end.
        Raises ApiError if the disk fails."""
        folder = self._root / "files"
        path = folder / f"new-{secrets.token_hex(16)}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            yield path
        except OSError as error:
            raise storage_failed(folder, error) from error
        finally:
            path.unlink(missing_ok=True)

    def add_file(self, owner: str, source: Path, name: str, purpose: str, room_of: Record | None = None) -> Record:
        """Stores a file by moving it here; ``room_of`` as for ``put``. Raises ApiError if the owner's limit leaves no
        room."""
        id, size = f"file-{secrets.token_hex(16)}", source.stat().st_size
        path = self.file(owner, id)
        self.put(owner, "file", id, {"filename": name, "purpose": purpose, "bytes": size}, size, room_of=room_of)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(source, path)
            os.chmod(path, 0o600)
        except OSError as error:
            self.remove(owner, "file", id)
            raise storage_failed(path.parent, error) from error
        return self.get(owner, "file", id)


def _not_found(kind: Kind, id: str) -> ApiError:
    text = f"{kind.replace('_', ' ').capitalize()} with id {id[:80]!r} not found"
    reason = "this API key has no such record; it may have been deleted or evicted"
    return ApiError(f"{text}: {reason}", status=NOT_FOUND, code=f"{kind}_not_found")


def _remove(path: Path) -> None:
    """Removes a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def storage_failed(folder: Path, error: Exception) -> ApiError:
    """The error for a client. The log has the details and names the folder."""
    logger.error("%s cannot be read or written: %s", folder, error)
    return ApiError("the server's storage cannot be read or written now", status=503, code="storage_failed")


def content_in(folder: Path, id: str) -> Path:
    """Path of a file's content, in the folder of its owner's files; raises ApiError if ``id`` is not a file id."""
    if not re.fullmatch(r"file-[0-9a-f]{32}", id):
        raise ApiError(f"{id[:80]!r} is not the id of a file", status=404, code="file_not_found")
    return folder / id


def _folder_name(owner: str) -> str:
    return owner or "shared"
