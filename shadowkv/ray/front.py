"""The front of the replicas: it accepts requests like a plain server, forwards them to replicas, and merges their
metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from starlette.types import Message, Receive, Scope, Send

from shadowkv.ray.prefixes import prefix_of
from shadowkv.ray.router import ForwardedRequest, sendable
from shadowkv.serve.app import add_middleware
from shadowkv.serve.bodies.api_error import MESSAGES_URL, ApiError, server_stopping
from shadowkv.serve.bodies.reader import SHORT_BYTES, BodyReader
from shadowkv.serve.http.errors import RETRY_SECONDS, error_response, handle_errors
from shadowkv.serve.http.metrics import ConnectionMetrics, labelled, replicas_gauge
from shadowkv.serve.http.owners import current_tenant, prompt_owner
from shadowkv.serve.http.replies import encoded_event, unless_disconnected
from shadowkv.serve.http.request_record import current_record
from shadowkv.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

logger = logging.getLogger(__name__)

ACCEPT_SECONDS = 60.0
"""Maximum time, in seconds, that a request waits for a replica to accept it. A replica may just be starting."""

METRICS_SECONDS = 5.0
RESPONSES_URL = "/v1/responses"
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')

LABEL = "replica"
"""Name of the label that each sample of the replicas' metrics gets. Its value is the replica's id."""


def build_front(handle: DeploymentHandle[Any], app_name: str, model: str, settings: ServerSettings) -> Front:
    """The front of a deployment of replicas, with its application.

    Args:
        handle: the deployment's handle.
        app_name: name of the Ray Serve application.
        model: the name that clients use for the model.
    """
    front = Front(handle, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        front.bodies.close()

    # No documentation here: requests for it are forwarded to the replicas, too.
    app = FastAPI(openapi_url=None, lifespan=lifespan)
    app.state.settings, app.state.metrics = settings, ConnectionMetrics(model, prefix=settings.metrics_prefix)
    add_middleware(app, settings)
    handle_errors(app)
    app.router.default = front.forward

    @app.get("/health")
    async def get_health() -> Response:
        alive = await asyncio.to_thread(_any_running, app_name)
        return JSONResponse({"status": "ok" if alive else "dead"}, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        page = merged(await front.metrics(), await app.state.metrics.text(), settings.metrics_prefix)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    front.app = app
    return front


def _any_running(app_name: str) -> bool:
    """Whether Ray Serve considers any replica healthy. Ray Serve checks the replicas every few seconds."""
    application = serve.status().applications.get(app_name)
    deployments = [] if application is None else application.deployments.values()
    states = [deployment.replica_states for deployment in deployments]
    return any(counts.get("RUNNING", 0) for counts in states)


class Front:
    """Forwards requests to the replicas of a deployment, and the replicas' answers to clients.

    If a replica dies before the client has received any of the answer, the request is sent to another replica, at most
    once. Otherwise the answer ends with an error, as if a server's engine had died.
    """

    app: FastAPI

    def __init__(self, handle: DeploymentHandle[Any], settings: ServerSettings) -> None:
        self._handle = handle
        self._answers = handle.options(stream=True, method_name="answer")
        self.bodies = BodyReader(settings.max_body_bytes)
        self._in_flight: set[DeploymentResponseGenerator[Any]] = set()
        self._stopped = False

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application for all requests that the front does not answer itself."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        record = current_record()
        assert record is not None  # the request log has set it
        request = ForwardedRequest(
            sendable(scope, record.id, prompt_owner(), current_tenant()),
            bytes(body),
            await self._prefix(scope, body),
        )
        answer = _Answer(scope, receive, send)
        await unless_disconnected(receive, self._answer(request, answer))

    async def stop(self) -> None:
        """Ends requests in progress with an error; nothing more is forwarded."""
        self._stopped = True
        for response in list(self._in_flight):
            await asyncio.to_thread(response.cancel)

    async def metrics(self) -> dict[str, bytes]:
        """Returns the metrics page of each replica that answers; the keys are the replicas' ids."""
        try:
            replies = await self._handle.broadcast("metrics").results_async(
                timeout_s=METRICS_SECONDS, return_exceptions=True
            )
        except DeploymentUnavailableError:  # there are no replicas
            return {}
        except TimeoutError as error:
            text = f"a replica has not returned its metrics within {METRICS_SECONDS:g} s"
            raise ApiError(text, status=503, code="timeout") from error
        return dict(reply for reply in replies if not isinstance(reply, BaseException))

    async def _prefix(self, scope: Scope, body: bytearray) -> tuple[int, ...]:
        if scope["method"] != "POST":
            return ()
        if len(body) <= SHORT_BYTES:
            return await asyncio.to_thread(prefix_of, body)
        try:
            return await self.bodies.apart(body, prefix_of, current_tenant())
        except ApiError:  # too large for the reader: the replica reports it
            return ()

    async def _answer(self, request: ForwardedRequest, answer: _Answer) -> None:
        for last in (False, True):
            replica: str | None = None
            try:
                async with aclosing(self._messages(request)) as items:
                    async for item in items:
                        if isinstance(item, str):
                            replica = item
                            continue
                        for message in item:
                            await answer.send(message)
                return
            except asyncio.TimeoutError:
                reason = f"no replica has accepted the request within {ACCEPT_SECONDS:g} s"
                return await answer.fail(ApiError(reason, status=503, code="no_replica"))
            except (RayError, RayServeException) as error:
                if answer.is_whole:
                    return
                if last or answer.has_begun or self._stopped:
                    died = ApiError("the engine has died with its replica", status=503, code="engine_dead")
                    return await answer.fail(server_stopping() if self._stopped else died)
                logger.warning("a request is sent to another replica than %s: %s", replica, type(error).__name__)
                request = replace(request, avoid=replica)

    async def _messages(self, request: ForwardedRequest) -> AsyncGenerator[str | list[Message], None]:
        """Yields the id of the replica that accepts the request, then the answer's messages. Closing the generator
        before their end cancels the request."""
        response = self._answers.remote(request)
        self._in_flight.add(response)
        ended = False
        try:
            yield await asyncio.wait_for(anext(response), ACCEPT_SECONDS)
            async for item in response:
                yield item
            ended = True
        finally:
            self._in_flight.discard(response)
            if not ended:
                response.cancel()


class _Answer:
    """An answer on its way to a client. Its header is held back until a part of the body exists, because the request
    can be sent to another replica only as long as the client has received nothing."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        self._is_stream = False
        self._event = b""
        self.has_begun = self.is_whole = False

    async def send(self, message: Message) -> None:
        """Forwards one ASGI message of a replica's application to the client, or holds it back."""
        if message["type"] == "http.response.start":
            # The id is removed here, since the front's middleware adds it to any answer.
            headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
            self._is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
            self._start = {**message, "headers": headers}
            return
        if not self.has_begun:
            assert self._start is not None
            self.has_begun = True
            await self._send(self._start)
        self._event = message.get("body") or self._event
        self.is_whole = not message.get("more_body")
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error. If the answer has not begun, the error is the whole answer. In a stream, the
        error is the last event. Otherwise this raises ``error``, which closes the connection."""
        path = self._scope["path"]
        if not self.has_begun:
            response = error_response(error, path)
            response.headers["Retry-After"] = str(RETRY_SECONDS)
            return await response(self._scope, self._receive, self._send)
        record = current_record()
        assert record is not None
        record.cut = error.code
        if not self._is_stream:
            raise error  # the connection is closed: the client sees that the answer is incomplete
        await self._send({"type": "http.response.body", "body": self._last_events(error, path), "more_body": False})

    def _last_events(self, error: ApiError, path: str) -> bytes:
        if path.startswith(RESPONSES_URL):
            number = SEQUENCE_NUMBER.search(self._event)
            return encoded_event(
                {"type": "error", "code": "server_error", "message": error.message, "param": None}
                | {"sequence_number": int(number[1]) + 1 if number else 0},
                named=True,
            )
        if path.startswith(MESSAGES_URL):
            return encoded_event(error.body(path), named=True)
        return encoded_event(error.body(path), named=False) + b"data: [DONE]\n\n"


def merged(pages: Mapping[str, bytes], own: bytes, prefix: str) -> bytes:
    """Merges the metrics pages of replicas into one, with the number of replicas.

    Args:
        pages: the replicas' pages; keys are the replicas' ids.
        own: the front's page; its samples get no label, and replace the replicas' samples of the same metrics.
        prefix: prefix of the metric with the number of replicas.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages, own, prefix))
    return generate_latest(registry)


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, bytes], own: bytes, prefix: str) -> None:
        self._pages, self._own, self._prefix = pages, own, prefix

    def collect(self) -> Iterator[Metric]:
        yield replicas_gauge(self._prefix, len(self._pages))
        own = {family.name: family for family in text_string_to_metric_families(self._own.decode())}
        pages = {name: text_string_to_metric_families(page.decode()) for name, page in self._pages.items()}
        families = {family.name: family for family in labelled(LABEL, pages)}
        yield from {**families, **own}.values()
