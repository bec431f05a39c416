"""Background responses, which requests ask for with ``background``. They are stored from the beginning, and generated
without a connection to the client. Clients can read and cancel them at any time."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import Any

from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.http.errors import as_api_error
from shadowkv.serve.responses.output import ResponseOutput
from shadowkv.serve.storage.store import NOT_FOUND, Record, RecordStore

UNFINISHED = ("queued", "in_progress")
"""Statuses of a response that has no answer yet."""

BEAT_SECONDS = 5.0
"""Seconds between two heartbeats. A heartbeat checks in the store whether another process has cancelled or deleted the
response, and records that this process is still working on it."""

LOST_SECONDS = 60.0
"""Seconds without a heartbeat after which the process that was working on a response counts as gone."""

MAX_OF_AN_OWNER = 32
"""Maximum number of responses that one process generates for an owner at a time. There is a limit because each response
writes to the store at every heartbeat."""


class Background:
    """Generates the background responses that this process was asked for. ``store`` has the responses of all
    processes."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._owners: dict[asyncio.Task[None], str] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    async def begin(self, owner: str, items: list[Any], output: ResponseOutput) -> dict[str, Any]:
        """Starts a response to the input ``items``. Returns the response, which has no answer yet. Raises ApiError if
        it cannot be stored, or if the owner has too many unfinished responses."""
        if [*self._owners.values()].count(owner) >= MAX_OF_AN_OWNER:
            reason = f"at most {MAX_OF_AN_OWNER} responses can run in the background at once"
            raise ApiError(reason, status=429, code="rate_limit_exceeded")
        queued = {**output.answer, "status": "queued"}
        value = {"input": items, "response": queued, "seen": time.time()}
        record = await asyncio.to_thread(self._store.put, owner, "response", queued["id"], value)
        task = asyncio.create_task(self._work(record, output))
        self._owners[task] = owner
        task.add_done_callback(self._owners.pop)
        return queued

    async def get(self, owner: str, id: str) -> dict[str, Any]:
        """Returns a stored response, whether it is a background response or not. If the process that was working on it
        is gone, the response is first marked as failed. Raises ApiError if there is no such response."""
        record = await asyncio.to_thread(self._store.get, owner, "response", id)
        response: dict[str, Any] = record.value["response"]
        if response["status"] in UNFINISHED and time.time() > record.value["seen"] + LOST_SECONDS:
            error = {"code": "server_error", "message": "the server that was answering has ended"}
            lost = {**response, "status": "failed", "error": error}
            return await self._change(record, lost, UNFINISHED)
        return response

    async def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """Cancels a background response, unless it is finished, and returns it. Raises ApiError if there is no such
        response."""
        record = await asyncio.to_thread(self._store.get, owner, "response", id)
        response = record.value["response"]
        if not response["background"]:
            raise ApiError("Cannot cancel a synchronous response.", param="response_id")
        response = await self._change(record, {**response, "status": "cancelled"}, UNFINISHED)
        if id in self._answering and response["status"] == "cancelled":
            self._answering[id].cancel()
        return response

    async def close(self) -> None:
        """Stops all work. It is called when the server stops."""
        tasks = [*self._owners]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, record: Record, output: ResponseOutput) -> None:
        answering = self._answering[record.id] = asyncio.create_task(self._answer(record, output))
        try:
            while not answering.done():
                await asyncio.wait((answering,), timeout=BEAT_SECONDS)
                if not answering.done() and not await self._is_wanted(record):
                    break
        except asyncio.CancelledError:
            output.failure(server_stopping())
            raise
        finally:
            del self._answering[record.id]
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if output.answer["status"] not in UNFINISHED:
                await self._keep(record, output)

    async def _answer(self, record: Record, output: ResponseOutput) -> None:
        try:
            async with aclosing(output.events()) as events:
                async for event in events:
                    if event["type"] == "response.in_progress":
                        await self._change(record, {**output.answer}, ("queued",))
        except Exception as error:
            output.failure(as_api_error(error))

    async def _is_wanted(self, record: Record) -> bool:
        """Records a heartbeat. Returns whether the response is still wanted: neither cancelled nor deleted."""

        def beat(value: dict[str, Any]) -> bool:
            value["seen"] = time.time()
            return False

        try:
            value: dict[str, Any] = (await asyncio.to_thread(self._store.change, record, beat)).value
        except ApiError as error:
            return error.status != NOT_FOUND  # other errors are temporary failures of the disk: the work goes on
        return value["response"]["status"] in UNFINISHED

    async def _keep(self, record: Record, output: ResponseOutput) -> None:
        """Stores a response with its answer. If there is no room for the answer, stores the response as failed and
        without output."""
        with suppress(ApiError):  # the response was deleted, or the disk fails
            try:
                await self._change(record, output.answer, UNFINISHED, 0)
            except ApiError as error:
                if error.status == NOT_FOUND:
                    raise
                output.failure(error)
                await self._change(record, {**output.answer, "output": []}, UNFINISHED)

    async def _change(
        self, record: Record, response: dict[str, Any], states: tuple[str, ...], content: int | None = None
    ) -> dict[str, Any]:
        """Replaces the record's response by ``response``, if the old response's status is in ``states``. Returns the
        response that is stored afterwards. ``content`` is passed on to ``RecordStore.change``."""

        def change(value: dict[str, Any]) -> bool:
            if value["response"]["status"] in states:
                value["response"] = response
            return False

        kept: dict[str, Any] = (await asyncio.to_thread(self._store.change, record, change, content)).value["response"]
        return kept
