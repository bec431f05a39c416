"""Answers the requests of a batch file with an engine, through the server's endpoints without HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shadowkv.engine.request import EngineBusy, EngineDead
from shadowkv.serve.anthropic.routes import Messages
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.batch.lines import LineRequest
from shadowkv.serve.batch.run import BatchRun, run_files
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import validated
from shadowkv.serve.http.errors import as_api_error
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.openai.completions import ChatCompletions, Completions
from shadowkv.serve.openai.endpoint import Endpoint, prepare
from shadowkv.serve.responses.routes import Responses

if TYPE_CHECKING:
    from shadowkv.engine.process.client import EngineClient
    from shadowkv.serve.http.metrics import Metrics

SERVICE_UNAVAILABLE = 503
BUSY_SECONDS = 0.5
"""Seconds between two attempts to enter a full queue."""


class LineAnswers:
    """Answers the requests of batch lines with an engine. Counts the requests in ``metrics``, unless it is None.
    ``model`` is the model's name in the answers."""

    def __init__(
        self,
        engine: EngineClient,
        model: str,
        settings: ServerSettings | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._engine, self._model, self._metrics = engine, model, metrics
        self._settings = settings or ServerSettings()
        kinds: tuple[type[Endpoint], ...] = (ChatCompletions, Completions, Responses, Messages)
        self._endpoints = {kind.url: kind(engine.tokenizer, settings) for kind in kinds}

    async def record(self, request: LineRequest) -> dict[str, Any]:
        """Returns the record of a request's answer or error. Raises ApiError if the engine is gone: then no further
        line can be answered."""
        try:
            status, body = 200, await self._patiently(request)
        except Exception as failure:
            wrong = as_api_error(failure)
            if wrong.status == SERVICE_UNAVAILABLE:
                raise wrong from failure
            status, body = wrong.status, wrong.body(request.url)
        response = {"status_code": status, "request_id": body.get("id", request.id), "body": body}
        return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}

    async def _patiently(self, request: LineRequest) -> dict[str, Any]:
        """Returns the answer. While the engine's queue is full, tries again every ``BUSY_SECONDS``. If one of several
        engines dies with the line, and no other engine has taken it over, it is sent anew, once."""
        lost = False
        while True:
            try:
                return await self._answer(request)
            except EngineBusy:
                await asyncio.sleep(BUSY_SECONDS)
            except EngineDead:
                if lost or not self._engine.is_alive:
                    raise
                lost = True

    async def _answer(self, request: LineRequest) -> dict[str, Any]:
        endpoint = self._endpoints[request.url]
        body = await asyncio.to_thread(validated, request.body, endpoint.request_type)
        body.model = self._settings.first_name(body.model)
        if body.stream:
            raise ApiError("stream is not supported in a batch", param="stream")
        if getattr(body, "previous_response_id", None) is not None:
            raise ApiError("a batch continues no responses: send the whole conversation", param="previous_response_id")
        if getattr(body, "background", False):
            raise ApiError("background is not supported in a batch; leave it out", param="background")
        job = await prepare(self._engine, endpoint, body, self._model)
        job.metrics = self._metrics
        return await endpoint.answer(job)


async def answer_with(answers: LineAnswers, run: BatchRun, concurrency: int) -> None:
    """Answers all lines that earlier runs have not answered, ``concurrency`` at a time. Raises ApiError if the engine
    dies, and OSError if the disk is full."""
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
    """Answers the file with an engine and prints a report; returns the exit code."""
    answers = LineAnswers(engine, model, settings)
    return run_files(files, lambda run: asyncio.run(answer_with(answers, run, concurrency)))
