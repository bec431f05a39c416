"""The engine on its own thread, for servers: requests go in, streams of outputs come out."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine, EngineStats
from shadowkv.engine.request import Request, RequestError, RequestOutput
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.structured.json_schema import check_schema
from shadowkv.engine.warmup import warm_up
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.layers.group import RankFailure
from shadowkv.models.loader import LoadedModel
from shadowkv.prefix_cache.cache import PrefixSegment
from shadowkv.prefix_cache.named.saves import Saves
from shadowkv.prefix_cache.protocol import Answer, ComputedTwice, DiskTooSlow, NotDone, Saved, settle
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

DISK_SECONDS = 120.0
"""How long saving a prompt by name may take to reach the disk, or restoring one to come back from there."""

Watch = Callable[[AsyncGenerator[RequestOutput, None]], AsyncGenerator[RequestOutput, None]]


class EngineDead(RuntimeError):
    """The engine's thread has ended; no request can be served."""


class EngineStopped(EngineDead):
    """It has ended because it was stopped."""


class EngineBusy(RuntimeError):
    """The queue of waiting requests is full."""


class AsyncEngine:
    """Runs an ``Engine``, from ``loaded`` if the model is loaded already, on a thread. Every method may be called from
    an event loop; nothing here blocks it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.engine = Engine(config, loaded)
        self.tokenizer = self.engine.tokenizer
        self.model_name, self.max_model_len = self.engine.model_name, self.engine.max_model_len
        self.max_queued_seqs, self.kv, self.role = config.max_queued_seqs, config.policy, config.role
        self.sampling_defaults = self.engine.sampling_defaults
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[RequestOutput | Exception], None]] = {}
        self._answers: set[Future[Any]] = set()
        # A compilation cannot be stopped; small schemas do not wait for large ones, and requests without one for none.
        self._checking = ThreadPoolExecutor(1, "shadowkv-schema")
        self._compiling = ThreadPoolExecutor(1, "shadowkv-grammar")
        self._compiling_small = ThreadPoolExecutor(1, "shadowkv-small-grammar")
        self._thread = threading.Thread(target=self._run, name="shadowkv-engine", daemon=True)
        self._error: BaseException | None = None
        self._stopped = False
        self._warm, self._stopping = threading.Event(), threading.Event()
        self.engine.when_a_rank_fails(lambda failure: self._commands.put(partial(_raise, failure)))

    def describe(self) -> list[str]:
        """Lines for the start of a server: model, policy, and how many sequences of which length fit where."""
        return self.engine.notes

    def start(self) -> None:
        """Starts the thread, and returns once it has warmed up; raises EngineDead where that failed."""
        try:
            self._thread.start()
            self._warm.wait()
        except BaseException:  # Ctrl-C, for example: the thread must not go on working on a device that is about to go
            self.shutdown()
            raise
        if self._error is not None:
            raise self._end() from self._error

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the thread after the current step; requests in flight get EngineDead."""
        self._stopping.set()
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

    async def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        """Where cached prompts are (``PrefixCache.segments``), between two steps; raises EngineDead."""

        def tell(answer: Future[Any]) -> None:
            settle(answer, self.engine.scheduler.prefix_cache.segments(most))

        segments: tuple[list[PrefixSegment], int] = await self.ask(tell)
        return segments

    async def ask(self, begin: Callable[[Future[Any]], None], seconds: float | None = None) -> Any:
        """The engine's answer: ``begin`` is called on its thread between two steps, and must make sure that the future
        it is given is settled.

        Raises EngineDead, and asyncio.TimeoutError after ``seconds``.
        """
        answer = self._open_answer()
        try:
            self._commands.put(lambda: begin(answer))
            if not self.is_alive:
                raise self._end()
            return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
        finally:
            answer.cancel()

    async def compile_grammar(self, schema: str, one_line: bool = False) -> None:
        """Prepares a JSON schema so that using it is fast; raises RequestError if nothing can satisfy it.

        Large ones may take seconds, on a thread that only other large ones wait for.
        """
        loop = asyncio.get_running_loop()
        cost = await loop.run_in_executor(self._checking, check_schema, schema)
        thread = self._compiling_small if cost.is_small else self._compiling
        await loop.run_in_executor(thread, self.engine.requests.compile_grammar, schema, one_line)

    def request(self, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """A request for ``generate``; raises RequestError if it could never be served.

        May be called from any thread, but preferably not an event loop's: long prompts and JSON schemas take a while.
        """
        return self.engine.request(uuid.uuid4().hex, prompt_token_ids, params)

    async def generate(
        self, request: Request, at_end: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they are generated; closing the iterator aborts it. ``at_end`` is called on the
        engine's thread when the request has its last token, before anything else happens there.

        Raises EngineBusy if too many are waiting, EngineDead if the engine has stopped.
        """
        if len(self._sinks) - self.engine.num_running >= self.max_queued_seqs:
            raise EngineBusy(f"no more than {counted(self.max_queued_seqs, 'request')} may wait (--max-queued-seqs)")
        name = request.request_id
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | Exception]()

        def sink(item: RequestOutput | Exception) -> None:
            if isinstance(item, RequestOutput) and item.finish_reason in ("stop", "length"):
                at_end()
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, item)
            except RuntimeError:  # the client's event loop is closed: there is no receiver left
                logger.debug("request %s: its event loop is closed", name)

        self._sinks[name] = sink
        self._commands.put(lambda: self._add(request))
        if not self.is_alive:
            self._sinks.pop(name, None)
            raise self._end()
        finished = False
        try:
            while not finished:
                item = await outputs.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            self._sinks.pop(name, None)
            if not finished:
                self._commands.put(lambda: self.engine.abort(name))

    async def save(
        self,
        name: str,
        request: Request,
        watch: Watch = lambda outputs: outputs,
    ) -> Saved:
        """Has the cached part of a request's prompt kept on the disk under ``name``, which must be valid. The request
        is served first, and once more without the cache if what that holds cannot be saved; ``watch`` sees its outputs.

        Raises SaveError where that is not possible, RequestError where nothing of the prompt can ever be saved, and
        what ``generate`` does.
        """
        self._check_directory()
        if request.prompt is None or not request.prompt.shareable:
            tokens = counted(len(request.prompt_token_ids), "token")
            raise RequestError(
                f"the prompt has {tokens}; pages of {PAGE} are saved, as many as come before its last token",
                "prompt",
            )
        try:
            return await self._save(name, request, request.prompt.shareable, watch)
        except ComputedTwice:
            anew = await asyncio.to_thread(self.request, request.prompt_token_ids, request.params)
            anew.looked_up = False
            return await self._save(name, anew, request.prompt.shareable, watch)

    async def _save(self, name: str, request: Request, pages: list[str], watch: Watch) -> Saved:
        answer = self._open_answer()
        try:
            begin = partial(self._begin, answer, lambda saves: saves.save(name, pages, answer))
            async with aclosing(watch(self.generate(request, begin))) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise NotDone(f"the prompt could not be computed: {output.error}")
            return await self._answered(answer, f"the disk has not taken the prompt within {DISK_SECONDS:g} s")
        finally:
            answer.cancel()

    async def restore(self, name: str) -> Saved:
        """Has what a name keeps brought to host memory, for the next prompt that begins with it.

        Raises SaveError where that is not possible, RequestError without a directory, EngineDead if it has stopped.
        """
        self._check_directory()

        def begin(answer: Answer) -> None:
            self._begin(answer, lambda saves: saves.restore(name, answer))

        try:
            saved: Saved = await self.ask(begin, DISK_SECONDS)
        except asyncio.TimeoutError:
            raise DiskTooSlow(f"the disk has not given {name!r} within {DISK_SECONDS:g} s") from None
        return saved

    def _check_directory(self) -> None:
        if self.engine.config.kv_disk_dir is None:
            raise RequestError("this server keeps nothing on a disk: it was started without --kv-disk-dir")

    def _open_answer(self) -> Future[Any]:
        answer: Future[Any] = Future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    @staticmethod
    async def _answered(answer: Answer, late: str) -> Saved:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), DISK_SECONDS)
        except asyncio.TimeoutError:
            raise DiskTooSlow(late) from None

    def _begin(self, answer: Answer, begin: Callable[[Saves], None]) -> None:
        saves = self.engine.saves
        if saves is None:
            settle(answer, NotDone("the tiers below the device have failed; the server's log says why"))
        elif not answer.cancelled():
            begin(saves)

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except RequestError as error:  # the engine goes on for all other requests
            if request.request_id in self._sinks:
                self._sinks[request.request_id](error)

    def _run(self) -> None:
        try:
            warm_up(self.engine, self._stopping.is_set)
            self._warm.set()
            while self._obey():
                for output in self.engine.step():
                    sink = self._sinks.get(output.request_id)
                    if sink is not None:
                        sink(output)
                    if output.finish_reason is not None:
                        self._sinks.pop(output.request_id, None)
        except BaseException as error:
            self._error = error
            # The reason of a rank's failure is in the log already.
            logger.error("the engine has died: %s", error, exc_info=not isinstance(error, RankFailure))
        finally:
            self._stopped = True
            self._warm.set()
            for sink in list(self._sinks.values()):
                sink(self._end())
            for answer in list(self._answers):
                settle(answer, self._end())
            self._close()

    def _close(self) -> None:
        try:
            self.engine.close()
        except (OSError, RuntimeError) as error:  # there is no receiver left
            logger.warning("the prefix cache was not closed: %s", error)

    def _obey(self) -> bool:
        """Carries out what was requested since the last step, or waits for something to do; False to stop."""
        while True:
            try:
                if self.engine.settling:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _end(self) -> EngineDead:
        """Why nothing more is served."""
        if self._error:
            return EngineDead(f"the engine has died: {self._error}")
        return EngineStopped("the engine has been shut down")


def _raise(error: Exception) -> None:
    raise error
