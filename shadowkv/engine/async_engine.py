"""The engine on a thread of its own, for servers: requests go in, streams of outputs come out."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine, EngineStats
from shadowkv.engine.request import RequestError, RequestOutput
from shadowkv.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine's thread has ended; no request can be served."""


class EngineBusy(RuntimeError):
    """As many requests wait as may."""


class AsyncEngine:
    """Runs an ``Engine`` on a thread. Every method may be called from an event loop; nothing here blocks it."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.tokenizer = self.engine.tokenizer
        self.model_name, self.max_model_len = self.engine.model_name, self.engine.max_model_len
        self.default_max_tokens = config.default_max_tokens
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[RequestOutput | Exception], None]] = {}
        self._thread = threading.Thread(target=self._run, name="shadowkv-engine", daemon=True)
        self._error: BaseException | None = None
        self._stopped = False

    def describe(self) -> list[str]:
        """Lines for the start of a server: model, policy, and how many sequences of which length fit where."""
        return self.engine.notes

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the thread after the step at work; requests in flight get EngineDead."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread.is_alive() and not self._stopped

    def stats(self) -> EngineStats:
        """Requests in flight and memory in use."""
        return self.engine.stats()

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError for a request that can never be served."""
        self.engine.validate(prompt_token_ids, params)

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; closing the iterator aborts it.

        Raises RequestError if it can never be served, EngineBusy if too many wait, EngineDead if the engine has
        stopped.
        """
        self.validate(prompt_token_ids, params)
        if len(self._sinks) - self.engine.num_running >= self.engine.config.max_queued_seqs:
            raise EngineBusy(f"{self.engine.config.max_queued_seqs} requests are waiting already")
        # The caller's id is a label: one that is used again must not meet what is left of its first use.
        name = uuid.uuid4().hex
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | Exception]()

        def sink(item: RequestOutput | Exception) -> None:
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, item)
            except RuntimeError:  # the client's event loop is closed: nobody is left to tell
                logger.debug("request %s: its event loop is closed", name)

        self._sinks[name] = sink
        self._commands.put(lambda: self._add(name, prompt_token_ids, params))
        if not self.is_alive:
            self._sinks.pop(name, None)
            raise EngineDead(self._reason())
        finished = False
        try:
            while not finished:
                item = await outputs.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item if request_id is None else replace(item, request_id=request_id)
        finally:
            self._sinks.pop(name, None)
            if not finished:
                self._commands.put(lambda: self.engine.abort(name))

    def _add(self, name: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        try:
            self.engine.add_request(name, prompt_token_ids, params)
        except RequestError as error:  # the engine goes on for everybody else
            if name in self._sinks:
                self._sinks[name](error)

    def _run(self) -> None:
        try:
            while self._obey():
                for output in self.engine.step():
                    sink = self._sinks.get(output.request_id)
                    if sink is not None:
                        sink(output)
                    if output.finish_reason is not None:
                        self._sinks.pop(output.request_id, None)
        except BaseException as error:
            self._error = error
            logger.exception("the engine has died")
        finally:
            self._stopped = True
            for sink in list(self._sinks.values()):
                sink(EngineDead(self._reason()))

    def _obey(self) -> bool:
        """Carries out what was asked since the last step, waiting for something to do; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _reason(self) -> str:
        return f"the engine has died: {self._error}" if self._error else "the engine has been shut down"
