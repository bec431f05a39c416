"""A replica: a plain server's application and its engine, in a Ray Serve process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from ray import serve
from starlette.types import Message

from shadowkv.engine.child_process import STOP_SECONDS
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import EngineDead
from shadowkv.log_format import set_up_log
from shadowkv.ray.router import ForwardedRequest
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.start import start_engine

logger = logging.getLogger(__name__)


class Replica:
    """An engine that answers the requests that the front (``front.py``) forwards. Ray Serve creates one in each
    replica's process.

    Args:
        config: the engine's config.
        compare: a second policy, as in ``shadowkv serve --compare``.
        settings: the server's settings, without those that the front handles.
    """

    def __init__(self, config: EngineConfig, compare: str | None, settings: ServerSettings) -> None:
        set_up_log()
        self._process = start_engine(config, compare)
        engine, *others = self._process.clients
        settings.check_template(engine.tokenizer.chat_template)
        self._served_name = settings.served_name(engine.model_name)
        self._app = build_app(engine, self._served_name, settings, *others)
        self._id: str = serve.get_replica_context().replica_id.unique_id

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[str | list[Message], None]:
        """Yields the replica's id as soon as the request has arrived, and then the answer's ASGI messages as they come.
        If the generator is closed, the application sees a client that disconnects.

        Raises EngineDead if the engine has died before any message was sent.
        """
        self.check_health()
        yield self._id
        messages: list[Message] = []
        more, gone = asyncio.Event(), asyncio.Event()
        body = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.append(message)
            more.set()

        task = asyncio.ensure_future(self._app(request.scope, receive, send))
        task.add_done_callback(lambda _: more.set())
        begun = False
        try:
            while messages or not task.done():
                await more.wait()
                if not begun:
                    self.check_health()  # another replica can answer, if this engine is dead
                sent, messages[:] = messages[:], []
                begun = begun or bool(sent)
                if not task.done():
                    more.clear()
                yield sent
            if (error := task.exception()) is not None:  # the client has a 500, or a part of the answer
                logger.error("a request failed", exc_info=error)
        finally:
            gone.set()
            with suppress(Exception):
                await task

    async def describe(self) -> tuple[list[str], str]:
        """Returns the lines that a server prints when it starts, and the served model name."""
        return self._process.clients[0].describe(), self._served_name

    async def metrics(self) -> tuple[str, bytes]:
        """The replica's id, and its Prometheus metrics."""
        return self._id, await self._app.state.metrics.text()

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica if this raises."""
        if not self._process.clients[0].is_alive:
            raise EngineDead("the engine has died")

    def __del__(self) -> None:
        # Called by Ray Serve at a replica's end, when all its requests are over.
        if hasattr(self, "_app"):
            self._app.state.bodies.close()
            self._app.state.documents.close()
        if hasattr(self, "_process"):
            self._process.stop(STOP_SECONDS)
