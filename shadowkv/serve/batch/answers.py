"""Answers the requests of a batch file with an engine, through the server's endpoints without HTTP."""

from __future__ import annotations

import asyncio
import logging
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
    from shadowkv.serve.openai.jobs import Job

logger = logging.getLogger(__name__)

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
        """Returns the record of a request's answer or error. Raises ApiError if no engine is left: then no further line
        can be answered."""
        try:
            status, body = 200, await self._patiently(request)
        except Exception as failure:
            wrong = as_api_error(failure)
            of_this_line = isinstance(failure, EngineDead) and self._engine.serves
            if wrong.status == SERVICE_UNAVAILABLE and not of_this_line:
                raise wrong from failure
            status, body = wrong.status, wrong.body(request.url)
        response = {"status_code": status, "request_id": body.get("id", request.id), "body": body}
        return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}

    async def _patiently(self, request: LineRequest) -> dict[str, Any]:
        """Returns the answer. While the engine's queue is full, tries again every ``BUSY_SECONDS``. A line whose engine
        dies begins anew in another one. If that dies, too, the line may be the reason, so EngineDead is raised."""
        endpoint, moved = self._endpoints[request.url], False
        while True:
            job = await self._job(request, endpoint)
            for choice in job.choices:
                choice.moved = moved
            try:
                return await endpoint.answer(job)
            except EngineBusy:
                await asyncio.sleep(BUSY_SECONDS)
            except EngineDead:
                moved_in_vain = any(one.moved and one.engine and not one.engine.is_alive for one in job.choices)
                if moved_in_vain or not self._engine.serves:
                    raise
                moved = True
                logger.warning("line %s of a batch begins anew in another engine (request %s)", request.id, job.id)

    async def _job(self, request: LineRequest, endpoint: Endpoint) -> Job:
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
        return job


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
    try:
        return run_files(files, lambda run: asyncio.run(answer_with(answers, run, concurrency)))
    finally:
        engine.disconnect()
