"""Responses that are answered while no client waits (``background``): each is kept from its beginning, can be read at
any time, and cancelled."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import Any

from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.http.errors import as_api_error
from shadowkv.serve.responses.output import ResponseOutput
from shadowkv.serve.storage.store import Record, RecordStore

UNFINISHED = ("queued", "in_progress")
"""States of a response that has no answer yet."""

BEAT_SECONDS = 5.0
"""Seconds between two looks at the store: whether the response is still wanted, which another process may know, and
that this one is still at work."""

LOST_SECONDS = 60.0
"""Seconds without such a look after which the process that was at work is taken for gone."""

MAX_OF_AN_OWNER = 32
"""Responses that one process answers for an owner at a time: each writes to the store at every look."""

NOT_FOUND = 404


class Background:
    """The responses at work in this process, all of which ``store`` keeps."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._owners: dict[asyncio.Task[None], str] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    async def begin(self, owner: str, items: list[Any], output: ResponseOutput) -> dict[str, Any]:
        """Begins a response to the items of an input, and returns it as it is now, without an answer; raises ApiError
        where it cannot be kept, or too many are at work."""
        if [*self._owners.values()].count(owner) >= MAX_OF_AN_OWNER:
            reason = f"no more than {MAX_OF_AN_OWNER} responses may be at work in the background"
            raise ApiError(reason, status=429, code="rate_limit_exceeded")
        queued = {**output.answer, "status": "queued"}
        value = {"input": items, "response": queued, "seen": time.time()}
        record = await asyncio.to_thread(self._store.put, owner, "response", queued["id"], value)
        task = asyncio.create_task(self._work(record, output))
        self._owners[task] = owner
        task.add_done_callback(self._owners.pop)
        return queued

    async def get(self, owner: str, id: str) -> dict[str, Any]:
        """A response that is kept, whether it was in the background or not; raises ApiError where there is none."""
        record = await asyncio.to_thread(self._store.get, owner, "response", id)
        response: dict[str, Any] = record.value["response"]
        if response["status"] in UNFINISHED and time.time() > record.value["seen"] + LOST_SECONDS:
            error = {"code": "server_error", "message": "the server that was answering has ended"}
            lost = {**response, "status": "failed", "error": error}
            return await self._change(record, lost, UNFINISHED)
        return response

    async def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """Ends the work on a response and returns it; one that has its answer stays as it is. Raises ApiError."""
        record = await asyncio.to_thread(self._store.get, owner, "response", id)
        response = record.value["response"]
        if not response["background"]:
            raise ApiError("Cannot cancel a synchronous response.", param="response_id")
        response = await self._change(record, {**response, "status": "cancelled"}, UNFINISHED)
        if id in self._answering and response["status"] == "cancelled":
            self._answering[id].cancel()
        return response

    async def close(self) -> None:
        """Ends all work: the server stops."""
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
        """Whether a response is neither cancelled nor deleted; says that this process is at work."""

        def beat(value: dict[str, Any]) -> bool:
            value["seen"] = time.time()
            return False

        try:
            value: dict[str, Any] = (await asyncio.to_thread(self._store.change, record, beat)).value
        except ApiError as error:
            return error.status != NOT_FOUND  # otherwise the disk does not do its part, for now
        return value["response"]["status"] in UNFINISHED

    async def _keep(self, record: Record, output: ResponseOutput) -> None:
        """Keeps a response with its answer, or without where that leaves no room."""
        with suppress(ApiError):  # it was deleted, or the disk does not do its part
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
        """Keeps ``response`` instead of one that is in one of ``states``; returns what is kept then. ``content`` is
        that of ``RecordStore.change``."""

        def change(value: dict[str, Any]) -> bool:
            if value["response"]["status"] in states:
                value["response"] = response
            return False

        kept: dict[str, Any] = (await asyncio.to_thread(self._store.change, record, change, content)).value["response"]
        return kept
