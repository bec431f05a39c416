"""Answers the batches that clients have sent to a server, beside its other requests.

Each API key has one batch in progress at a time. A batch uses at most half of the sequences that the engine can run.
Batches and their answers so far are in the storage folder. If that folder outlives the server (--storage-dir), the next
server continues the batches.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from shadowkv.serve.batch.answers import LineAnswers, answer_with
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.batch.run import BatchRun
from shadowkv.serve.bodies.api_error import MESSAGES_URL, ApiError
from shadowkv.serve.http.owners import set_prompt_owner, set_tenant
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.storage.store import MIN_BYTES, NOT_FOUND, OUTPUT, Record, RecordStore

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient
    from shadowkv.serve.http.metrics import Metrics

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two checks for new batches and for cancelled ones."""

FAILED_SECONDS = 10.0
"""Seconds until the storage is tried again after it could not be read, which the log says each time."""

BATCH_SECONDS = 24 * 3600
"""Time limit of a batch, as in both APIs; requests without an answer then expire."""

LINE_BYTES = 2**22
"""Maximum length of a batch's line. Parsing a line of this length takes 0.1 s, during which the server sends no
tokens."""

REQUESTS, ANSWERS, RESULTS = "requests.jsonl", "answers.jsonl", "results.jsonl"
"""Files in a batch's folder; only Anthropic's batches have ``REQUESTS`` and ``RESULTS``."""


def new_batch(**fields: Any) -> dict[str, Any]:
    """The value of a new batch's record, in either API; times are in seconds since 1970."""
    counts = {"total": 0, "completed": 0, "failed": 0, "canceled": 0, "expired": 0}
    times = dict.fromkeys(("started_at", "finalizing_at", "cancelling_at", "ended_at"))
    return {"status": "validating", "counts": counts, "error": None, "output": None, "errors": None, **times, **fields}


BATCHES = "batches"
"""The tenant of all batches on a server without API keys."""


class BatchRunner:
    """Answers the stored batches, in one process of a server.

    Args:
        store: the store of the batches.
        engine, model, settings, metrics: as for ``LineAnswers``.
    """

    def __init__(
        self, store: RecordStore, engine: EngineClient, model: str, settings: ServerSettings, metrics: Metrics
    ) -> None:
        self._store, self._engine = store, engine
        self._answers = LineAnswers(engine, model, settings, metrics)
        self._keeps_keys_apart = settings.keeps_keys_apart
        self._concurrency = max(1, engine.max_num_seqs // 2)
        self._in_flight: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A context in which batches are answered. Batches that are unfinished at its end stay open, so that the next
        server can continue them."""
        task = asyncio.create_task(self._run()) if self._store.is_on else None
        try:
            yield
        finally:
            for one in filter(None, (task, *self._in_flight.values())):
                one.cancel()
            await asyncio.gather(*filter(None, (task, *self._in_flight.values())), return_exceptions=True)

    async def _run(self) -> None:
        lock: FileLock | None = None
        while True:
            try:
                records = await asyncio.to_thread(self._store.open_records)
                if records and lock is None:
                    lock = FileLock(self._store.lock)
                    lock.acquire(timeout=0)
                for record in records:
                    if record.owner not in self._in_flight and self._engine.is_alive:
                        task = self._in_flight[record.owner] = asyncio.create_task(self._answer(record))
                        task.add_done_callback(partial(self._has_ended, record.owner))
            except Timeout:
                logger.error("another server answers the batches in --storage-dir; this server does not")
                return
            except ApiError:  # logged where it was raised
                await asyncio.sleep(FAILED_SECONDS)
            await asyncio.sleep(POLL_SECONDS)

    def _has_ended(self, owner: str, task: asyncio.Task[None]) -> None:
        self._in_flight.pop(owner, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a batch failed", exc_info=error)

    async def _answer(self, record: Record) -> None:
        """Answers a batch, or continues an interrupted one. Records how it ended."""
        set_tenant(record.owner or BATCHES)
        if self._keeps_keys_apart:
            set_prompt_owner(record.owner)
        folder = self._store.work_folder(record.id)
        try:
            await self._answer_in(record, folder)
        except ApiError as error:
            if self._engine.is_alive:
                await self._fail(record, folder, error)
        except (OSError, ValueError) as error:
            logger.error("batch %s cannot be answered: %s", record.id, error)
            await self._fail(record, folder, ApiError("batch files cannot be read or written", code="storage_failed"))

    async def _answer_in(self, record: Record, folder: Path) -> None:
        source = await asyncio.to_thread(self._source, record)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = folder / ANSWERS
        files = BatchFiles(source, output, resume=output.exists() or BatchFiles(source, output).partial.exists())
        urls = (record.value["endpoint"],)
        run = await asyncio.to_thread(BatchRun, files, urls, LINE_BYTES, False)

        def begin(value: dict[str, Any]) -> bool:
            value["started_at"] = value["started_at"] or int(time.time())
            if value["status"] == "validating":
                value["status"] = "in_progress"
            return True

        await self._change(record, begin)
        answering = asyncio.create_task(answer_with(self._answers, run, self._concurrency))
        try:
            ending = await self._watch(record, source, run, answering)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        await self._count(record, source, run)  # includes the latest answers
        answers = output if output.exists() else files.partial
        await self._finish(record, source, answers, ending)
        await asyncio.to_thread(self._tidy, record, folder)

    def _source(self, record: Record) -> Path:
        if record.kind == "message_batch":
            return self._store.work_folder(record.id) / REQUESTS
        self._store.get(record.owner, "file", record.value["input_file_id"])
        path = self._store.file(record.owner, record.value["input_file_id"])
        with path.open("rb") as file:
            if not any(line.strip() for line in file):
                raise ApiError("the input file has no requests", code="empty_file")
        return path

    async def _watch(self, record: Record, source: Path, run: BatchRun, answering: asyncio.Task[None]) -> str:
        """Waits for the answers and counts them, until all requests are answered, the batch is cancelled, or its time
        is over. Returns the final status."""
        while not answering.done():
            await asyncio.wait((answering,), timeout=POLL_SECONDS)
            value = await self._count(record, source, run)
            if answering.done():
                break
            if value["status"] == "cancelling":
                return "cancelled"
            if time.time() > record.created + BATCH_SECONDS:
                return "expired"
        answering.result()
        return "completed"

    async def _count(self, record: Record, source: Path, run: BatchRun) -> dict[str, Any]:
        """Records a batch's progress and the size of its files, which counts towards its owner's limit. Raises ApiError
        if the limit is exceeded."""

        def count(value: dict[str, Any]) -> bool:
            answered = len(run.lines.answered)
            value["counts"].update(total=run.total, completed=answered + run.done - run.failed, failed=run.failed)
            return True

        # The size also reserves room for the output files. A batch of messages becomes one file of results, which is
        # shorter than the requests and their records together. The records of other batches are split into at most two
        # files, each of which counts for at least ``MIN_BYTES``.
        beside = source.stat().st_size if record.kind == "message_batch" else 2 * MIN_BYTES
        value: dict[str, Any] = (await self._change(record, count, beside + run.written)).value
        return value

    async def _finish(self, record: Record, source: Path, answers: Path, ending: str) -> None:
        """Makes the output files of a batch from its answers."""
        if record.kind == "message_batch":
            results = self._store.work_folder(record.id) / RESULTS
            counts = await asyncio.to_thread(write_results, source, answers, results, ending)
            made: dict[str, Any] = {}
            content = results.stat().st_size
        else:
            output, errors, counts = await asyncio.to_thread(self._split, record, answers)
            made, content = {"output": output, "errors": errors}, 0

        def end(value: dict[str, Any]) -> bool:
            now = int(time.time())
            value.update(status=ending, ended_at=now, finalizing_at=now, **made)
            value["counts"].update(counts)
            return False

        await self._change(record, end, content)

    def _split(self, record: Record, answers: Path) -> tuple[str | None, str | None, dict[str, int]]:
        """Splits the records into a file of successes and a file of failures. Returns the ids of both files (None for
        an empty one), and the counts."""
        ids: list[str | None] = [None, None]
        counts = [0, 0]
        with self._store.new_file() as output, self._store.new_file() as errors:
            with output.open("wb") as good, errors.open("wb") as bad:
                for line in _lines(answers):
                    is_bad = not _is_answer(json.loads(line))
                    (bad if is_bad else good).write(line)
                    counts[is_bad] += 1
            for number, (part, kind) in enumerate(((output, "output"), (errors, "error"))):
                if counts[number]:
                    name = f"{record.id}_{kind}.jsonl"
                    file = self._store.add_file(record.owner, part, name, OUTPUT, room_of=record)
                    ids[number] = file.id
        return ids[0], ids[1], {"completed": counts[0], "failed": counts[1]}

    async def _fail(self, record: Record, folder: Path, error: ApiError) -> None:
        def fail(value: dict[str, Any]) -> bool:
            value.update(status="failed", ended_at=int(time.time()))
            value["error"] = {"code": error.code or "failed", "message": error.message}
            return False

        try:
            await self._change(record, fail, 0)
        except ApiError as failure:
            if failure.status != NOT_FOUND:  # a temporary disk error: the batch continues later
                return
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _change(
        self, record: Record, change: Callable[[dict[str, Any]], bool], content: int | None = None
    ) -> Record:
        return await asyncio.to_thread(self._store.change, record, change, content)

    @staticmethod
    def _tidy(record: Record, folder: Path) -> None:
        if record.kind == "batch":
            shutil.rmtree(folder, ignore_errors=True)
        else:
            for path in folder.iterdir():
                if path.name != RESULTS:
                    path.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _is_answer(record: dict[str, Any]) -> bool:
    return record["response"] is not None and record["response"]["status_code"] == 200


def write_results(source: Path, answers: Path, results: Path, ending: str) -> dict[str, int]:
    """Writes the results of a batch of messages, one line per request. Requests without a record have expired if
    ``ending`` is "expired"; otherwise they were canceled. Returns the number of requests of each outcome."""
    missing = "expired" if ending == "expired" else "canceled"
    counts = {"completed": 0, "failed": 0, "canceled": 0, "expired": 0}
    left = dict.fromkeys(json.loads(line)["custom_id"] for line in _lines(source))
    with results.open("wb") as file:

        def write(name: str, result: dict[str, Any]) -> None:
            file.write(json.dumps({"custom_id": name, "result": result}, ensure_ascii=False).encode() + b"\n")

        for line in _lines(answers):
            record = json.loads(line)
            left.pop(record["custom_id"], None)
            if _is_answer(record):
                counts["completed"] += 1
                write(record["custom_id"], {"type": "succeeded", "message": record["response"]["body"]})
            else:
                counts["failed"] += 1
                body = record["response"]["body"] if record["response"] else ApiError(record["error"]["message"])
                error = body.body(MESSAGES_URL) if isinstance(body, ApiError) else body
                write(record["custom_id"], {"type": "errored", "error": error})
        for name in left:
            counts[missing] += 1
            write(name, {"type": missing})
    return counts
