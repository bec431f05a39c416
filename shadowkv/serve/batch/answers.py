"""Answers the requests of a batch file with an engine in this process: the server's own code without HTTP."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shadowkv.engine.request import EngineBusy
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.batch.lines import LineRequest
from shadowkv.serve.batch.run import BatchRun, run_files
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import validated
from shadowkv.serve.http.errors import as_api_error
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.completions import ChatCompletions, Completions
from shadowkv.serve.openai.endpoint import prepare

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient

SERVICE_UNAVAILABLE = 503
BUSY_SECONDS = 0.5
"""Seconds between two attempts to get into a full queue."""


class LineAnswers:
    """Answers requests with an engine, under the name of its model."""

    def __init__(self, engine: EngineClient, model: str, settings: ServerSettings | None = None) -> None:
        self._engine, self._model, self._settings = engine, model, settings or ServerSettings()
        endpoints = (ChatCompletions(engine.tokenizer, settings), Completions(engine.tokenizer, settings))
        self._endpoints = {endpoint.url: endpoint for endpoint in endpoints}

    async def record(self, request: LineRequest) -> dict[str, Any]:
        """A request's record; raises ApiError where no further line can be answered because the engine is gone."""
        try:
            status, body = 200, await self._patiently(request)
        except Exception as failure:
            wrong = as_api_error(failure)
            if wrong.status == SERVICE_UNAVAILABLE:
                raise wrong from failure
            status, body = wrong.status, wrong.body()
        response = {"status_code": status, "request_id": body.get("id", request.id), "body": body}
        return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}

    async def _patiently(self, request: LineRequest) -> dict[str, Any]:
        """The answer, waiting for other requests while the queue is full."""
        while True:
            with suppress(EngineBusy):
                return await self._answer(request)
            await asyncio.sleep(BUSY_SECONDS)

    async def _answer(self, request: LineRequest) -> dict[str, Any]:
        endpoint = self._endpoints[request.url]
        body = validated(request.body, endpoint.request_type)
        body.model = self._settings.first_name(body.model)
        if body.stream:
            raise ApiError("stream is not supported in a batch", param="stream")
        return await endpoint.answer(await prepare(self._engine, endpoint, body, self._model))


async def answer_with(
    engine: EngineClient, model: str, settings: ServerSettings | None, run: BatchRun, concurrency: int
) -> None:
    """Answers every line that has no answer, ``concurrency`` at a time; raises ApiError if the engine dies, OSError if
    the disk is full."""
    answers = LineAnswers(engine, model, settings)
    with run.writing():
        requests = run.requests()  # one iterator for all workers

        async def work() -> None:
            for request in requests:
                run.write(await answers.record(request))

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def run_batch(
    engine: EngineClient, model: str, files: BatchFiles, concurrency: int, settings: ServerSettings | None = None
) -> int:
    """Answers the file with an engine and reports the outcome; returns the exit code."""
    return run_files(files, lambda run: asyncio.run(answer_with(engine, model, settings, run, concurrency)))
