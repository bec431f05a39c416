"""Answers requests for text over HTTP: what the routes of all APIs share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from shadowkv.serve.endpoints import Endpoint
from shadowkv.serve.metrics import Metrics
from shadowkv.serve.prepare import prepare
from shadowkv.serve.protocol import Sampling
from shadowkv.serve.replies import EventStream, reply
from shadowkv.serve.settings import ServerSettings

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine


@dataclass(frozen=True)
class Responder:
    """Answers requests within the server's limits, and ends them when the client hangs up.

    Attributes:
        engines: by model name.
        served_name: model that answers where a request names none; only its work is counted in ``metrics``.
    """

    engines: Mapping[str, AsyncEngine]
    served_name: str
    settings: ServerSettings
    metrics: Metrics

    async def __call__(self, endpoint: Endpoint, body: Sampling, request: Request) -> Response:
        """The answer, whole or as a stream, or the error."""
        seconds = self.settings.request_timeout
        deadline = time.monotonic() + seconds if seconds else None

        async def answer() -> Response:
            asked = body.model or self.served_name
            name = asked if asked in self.engines else self.served_name
            job = await prepare(self.engines[name], endpoint, body, name)
            job.deadline, job.metrics = deadline, self.metrics if name == self.served_name else None
            if body.stream:
                return EventStream(endpoint.stream(job), self.settings.keep_alive_interval)
            content = await endpoint.answer(job)
            # Writing down the log-probabilities of a long prompt takes a while.
            return await asyncio.to_thread(JSONResponse, content) if job.echo else JSONResponse(content)

        return await reply(request, answer)
