"""What is kept for clients, in a folder that all processes for HTTP share: an SQLite database, and files beside it.

Everything belongs to an owner, which is an API key, and counts towards that owner's limit. Responses, which a client
has kept without asking, make room for what comes later; files and batches are removed by their owner alone.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shadowkv.serve.bodies.api_error import ApiError

logger = logging.getLogger(__name__)

Kind = Literal["file", "response", "batch", "message_batch"]

MIN_BYTES = 4096
"""What a record counts at least: one without content takes room, too."""

BUSY_SECONDS = 30.0
"""How long a process may wait for another one's transaction; each takes milliseconds."""

ID = re.compile(r"[A-Za-z0-9._:=+/@-]{1,160}")
"""Ids of records: those of responses may have a client's request id in them."""

TABLES = (
    "CREATE TABLE IF NOT EXISTS records (owner TEXT, kind TEXT, id TEXT, created REAL, used REAL, bytes INTEGER, "
    "value BLOB, PRIMARY KEY (owner, kind, id))",
    "CREATE INDEX IF NOT EXISTS by_age ON records (owner, kind, created, id)",
    "CREATE INDEX IF NOT EXISTS by_use ON records (owner, kind, used, bytes)",
)


@dataclass(frozen=True)
class Record:
    """What is kept under an id: ``value`` is JSON; ``created`` is in seconds since 1970."""

    owner: str
    kind: Kind
    id: str
    created: float
    value: Any


class Store:
    """The records of all owners.

    Args:
        folder: where they are; None is a folder of this process's own, which goes with it.
        limit: bytes of each owner; 0 keeps nothing.

    Raises ApiError where a folder that is given cannot be used.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.limit, self._folder, self._first = limit, folder, threading.Lock()
        if folder is not None and limit:
            self._make(folder)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _failed(error) from error
        with self._transaction(folder) as database:
            for statement in TABLES:
                database.execute(statement)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return bool(self.limit)

    @property
    def lock(self) -> Path:
        """Locked by the server that answers the batches kept here."""
        return self._root / "lock"

    @property
    def _root(self) -> Path:
        if not self.limit:
            raise ApiError("this server keeps nothing (--storage-mib 0)", code="not_kept")
        with self._first:
            if self._folder is None:
                folder = Path(tempfile.mkdtemp(prefix="shadowkv-kept-"))
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self._make(folder)
                self._folder = folder
        return self._folder

    def file(self, owner: str, id: str) -> Path:
        """Where the content of a file is."""
        return content_path(self._root, owner, id)

    def folder_of(self, owner: str) -> Path | None:
        """The folder of an owner's files, for ``content_in``; None if nothing is kept."""
        return self._root / "files" / _folder_name(owner) if self.is_on else None

    @contextmanager
    def _transaction(self, folder: Path | None = None) -> Iterator[sqlite3.Connection]:
        """Raises ApiError where the disk does not do its part."""
        root = folder or self._root
        try:
            database = sqlite3.connect(root / "records.sqlite", timeout=BUSY_SECONDS, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(
                    "PRAGMA synchronous = NORMAL"
                )  # a power cut may take the last ones, and spoils nothing
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            finally:
                database.close()  # which rolls back what is not committed
        except sqlite3.Error as error:
            raise _failed(error) from error

    # -- records ---------------------------------------------------------------------------------------------------

    def put(self, owner: str, kind: Kind, id: str, value: Any, content: int = 0) -> None:
        """Keeps a record, instead of one of that id.

        Args:
            value: written as JSON.
            content: bytes of a file beside it.

        Raises ApiError where the owner's limit leaves no room.
        """
        raw = msgspec.json.encode(value)
        now, size = time.time(), max(MIN_BYTES, len(raw) + content)
        with self._transaction() as database:
            key = (owner, kind, id)
            row = database.execute(
                "SELECT created FROM records WHERE owner = ? AND kind = ? AND id = ?", key
            ).fetchone()
            database.execute("DELETE FROM records WHERE owner = ? AND kind = ? AND id = ?", key)
            self._make_room(database, owner, size)
            created = now if row is None else row[0]
            database.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", (*key, created, now, size, raw))

    def _make_room(self, database: sqlite3.Connection, owner: str, size: int) -> None:
        (used,) = database.execute("SELECT COALESCE(SUM(bytes), 0) FROM records WHERE owner = ?", (owner,)).fetchone()
        oldest = database.execute(
            "SELECT id, bytes FROM records WHERE owner = ? AND kind = 'response' ORDER BY used", (owner,)
        ).fetchall()
        for id, taken in oldest:
            if used + size <= self.limit:
                break
            database.execute("DELETE FROM records WHERE owner = ? AND kind = 'response' AND id = ?", (owner, id))
            used -= taken
        if used + size > self.limit:
            text = f"{used + size} bytes are more than the {self.limit} that are kept for an API key (--storage-mib)"
            raise ApiError(f"{text}; delete files or batches", code="storage_full")

    def get(self, owner: str, kind: Kind, id: str) -> Record:
        """The record of that id; raises ApiError if the owner has none."""
        with self._transaction() as database:
            row = database.execute(
                "SELECT created, value FROM records WHERE owner = ? AND kind = ? AND id = ?", (owner, kind, id)
            ).fetchone()
            if row is None:
                what = kind.replace("_", " ")
                text = (
                    f"there is no {what} {id[:80]!r} of this API key; it may have been deleted, or made room for others"
                )
                raise ApiError(text, status=404, code=f"{kind}_not_found")
            database.execute(
                "UPDATE records SET used = ? WHERE owner = ? AND kind = ? AND id = ?", (time.time(), owner, kind, id)
            )
        return Record(owner, kind, id, row[0], msgspec.json.decode(row[1]))

    def page(self, owner: str, kind: Kind, limit: int, after: str | None, newest_first: bool = True) -> list[Record]:
        """Up to ``limit`` records and one more where there are more, beginning after that of an id."""
        order = "DESC" if newest_first else "ASC"
        values: list[Any] = [owner, kind]
        where = "owner = ? AND kind = ?"
        if after is not None:
            values += [self.get(owner, kind, after).created, after]
            where += f" AND (created, id) {'<' if newest_first else '>'} (?, ?)"
        query = f"SELECT id, created, value FROM records WHERE {where} ORDER BY created {order}, id {order} LIMIT ?"
        with self._transaction() as database:
            rows = database.execute(query, (*values, limit + 1)).fetchall()
        return [Record(owner, kind, id, created, msgspec.json.decode(value)) for id, created, value in rows]

    def remove(self, owner: str, kind: Kind, id: str) -> None:
        """Removes a record and its content; raises ApiError if the owner has none of that id."""
        self.get(owner, kind, id)
        with self._transaction() as database:
            database.execute("DELETE FROM records WHERE owner = ? AND kind = ? AND id = ?", (owner, kind, id))
        if kind == "file":
            self.file(owner, id).unlink(missing_ok=True)

    def unfinished(self) -> list[Record]:
        """All owners' batches that are to be answered, the first to come first."""
        if self._folder is None:  # nobody has sent any
            return []
        query = "SELECT owner, kind, id, created, value FROM records WHERE kind IN ('batch', 'message_batch')"
        with self._transaction() as database:
            rows = database.execute(f"{query} ORDER BY created").fetchall()
        records = [
            Record(owner, kind, id, created, msgspec.json.decode(value)) for owner, kind, id, created, value in rows
        ]
        return [record for record in records if record.value["ended_at"] is None]

    # -- files -----------------------------------------------------------------------------------------------------

    def add_file(self, owner: str, source: Path, name: str, purpose: str) -> Record:
        """Keeps a file, which is moved here; raises ApiError where the owner's limit leaves no room."""
        id, size = f"file-{secrets.token_hex(16)}", source.stat().st_size
        path = self.file(owner, id)
        self.put(owner, "file", id, {"filename": name, "purpose": purpose, "bytes": size}, content=size)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(source, path)
            os.chmod(path, 0o600)
        except OSError as error:
            self.remove(owner, "file", id)
            raise _failed(error) from error
        return self.get(owner, "file", id)


def _failed(error: Exception) -> ApiError:
    """What a client is told; the log has the rest, which may be a path."""
    logger.error("what clients have this server keep cannot be read or written: %s", error)
    return ApiError("what this server keeps cannot be read or written now", status=503, code="storage_failed")


def content_path(folder: Path, owner: str, id: str) -> Path:
    """Where the content of an owner's file is."""
    return content_in(folder / "files" / _folder_name(owner), id)


def content_in(folder: Path, id: str) -> Path:
    """The same, in the folder of the owner's files; raises ApiError for what is no id of a file."""
    if not re.fullmatch(r"file-[0-9a-f]{32}", id):
        raise ApiError(f"{id[:80]!r} is no id of a file here", status=404, code="file_not_found")
    return folder / id


def _folder_name(owner: str) -> str:
    return owner or "shared"
