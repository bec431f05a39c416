"""An engine in the tests' own process, reached as one in another process is: its parts can be looked at and broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from tempfile import TemporaryDirectory
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.process.core import EngineCore


class LocalEngine(EngineClient):
    """The client of an engine on a thread of this process, which ``engine`` and ``core`` are."""

    def __init__(self, config: EngineConfig) -> None:
        self._directory = TemporaryDirectory(prefix="shadowkv-")
        self.engine = Engine(config)
        self.core = EngineCore(self.engine, self._directory.name, "engine")
        super().__init__(self.core.facts, self.engine.tokenizer, self._directory.name, lambda: self.core.is_alive)

    def start(self) -> None:
        self.core.start()

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopping = True
        self.core.shutdown(timeout)
        if self._loop is not None and not self._loop.is_running():  # otherwise it is still told of the end
            self.disconnect()
        self._directory.cleanup()

    def another(self) -> EngineClient:
        """A second client, for another event loop."""
        return EngineClient(self.core.facts, self.tokenizer, self._directory.name, lambda: self.core.is_alive)

    async def ask(self, begin: Callable[[Future[Any]], None], seconds: float | None = None) -> Any:
        """What ``begin``, called on the engine's thread between two steps, settles a future with."""
        answer: Future[Any] = Future()
        self.core._commands.put(lambda: begin(answer))
        return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
