"""``EngineClient``: sends requests to an engine in another process and streams their outputs. HTTP servers use it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import zmq

from shadowkv.engine.answer_text import AnswerText
from shadowkv.engine.engine import EngineStats
from shadowkv.engine.outputs import TextOutput, TokenOutput
from shadowkv.engine.process import messages
from shadowkv.engine.process.facts import EngineFacts
from shadowkv.engine.process.heartbeat import Heartbeat
from shadowkv.engine.request import EngineBusy, EngineDead, EngineState, EngineStopped, RequestError, SchemaTimeout
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.prefix_cache import protocol
from shadowkv.prefix_cache.prefix_cache import PrefixSegment
from shadowkv.prefix_cache.protocol import DiskTooSlow, NotDone, Saved, SaveError, WrittenByAnotherServer
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

STATS_SECONDS = 1.5
"""Time limit in seconds for an engine's statistics. After it the latest ones count."""

DISK_SECONDS = 120.0
"""Time limit in seconds for saving a prompt by name to the disk, and for restoring one from the disk."""

SENDING_SECONDS = 30.0
"""Time limit in seconds for writing a prompt to the disk, for another server that continues it. The answer to the
request waits for the write."""


@dataclass(eq=False)
class ClientRequest:
    """A request for ``generate``. It can be served only once.

    Attributes:
        max_tokens: maximum number of tokens of the answer.
        packed: the prompt as bytes (``messages.pack_ids``).
        looked_up, tenant, priority: as in ``Request``.
        arrival: time of arrival, in seconds of ``time.monotonic``.
        prefix: hashes of the prompt's pages, if several engines share the requests (``replicas.py``).
        engine: the client of the engine that serves the request; None before ``generate``.
        moved: whether another engine, which has died, had the request before.
        log_id: the id of the API request in the server's log.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    packed: bytes
    tenant: str = ""
    priority: int = 0
    looked_up: bool = True
    arrival: float = field(default_factory=time.monotonic)
    prefix: Sequence[str] = ()
    engine: EngineClient | None = None
    moved: bool = False
    log_id: str = ""


Observe = Callable[[], AbstractContextManager[Callable[[TextOutput], None] | None]]


class Answers:
    """Receives the outputs of some requests. Unread outputs of a request are read together."""

    def __init__(self, requests: Sequence[ClientRequest], tokenizer: Tokenizer) -> None:
        self.requests = {request.request_id: request for request in requests}
        self._numbers = {name: number for number, name in enumerate(self.requests)}
        self._texts = [AnswerText(tokenizer, request.params) for request in requests]
        self._outputs: dict[int, list[TokenOutput]] = {}
        self._error: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._ended: set[int] = set()
        self.unfinished = set(self._numbers)
        """Requests that the engine has not finished."""
        self.begun: set[str] = set()
        """Requests that have a token, or an error instead."""

    def take(self, output: TokenOutput) -> None:
        """Adds an output."""
        self._outputs.setdefault(self._numbers[output.request_id], []).append(output)
        if not output.is_progress:
            self.begun.add(output.request_id)
        if output.finish_reason is not None:
            self.unfinished.discard(output.request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends all requests with an error. Outputs that have arrived before can still be read."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def read(self) -> list[tuple[int, TextOutput]]:
        """Returns the new outputs since the last call, with their requests' numbers. Waits for at least one.

        Raises the error of ``fail``. Outputs after a stop string are left out. The engine sends such outputs until it
        receives ``Stop``.
        """
        if not self._outputs and self._error is None:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if not self._outputs:
            assert self._error is not None, "woken without output or error"
            raise self._error
        outputs, self._outputs = self._outputs, {}
        read = [(number, self._read(number, of_it)) for number, of_it in outputs.items() if number not in self._ended]
        self._ended |= {number for number, output in read if output.finish_reason is not None}
        return read

    def _read(self, number: int, outputs: list[TokenOutput]) -> TextOutput:
        try:
            return self._texts[number].read(outputs)
        except Exception as error:  # an error of the tokenizer ends only this request
            logger.exception("a request failed")
            last = outputs[-1]
            what = f"internal error ({type(error).__name__}); the log has the details"
            counts = last.prompt_tokens, last.completion_tokens, last.cached_tokens
            return TextOutput(last.request_id, [], "error", *counts, last.times, error=what)


class EngineClient:
    """A client of an engine in another process, over the engine's socket. A question is a message that the engine
    answers, such as ``messages.Statistics``.

    Coroutines work on one event loop at a time, and never block it.

    Args:
        facts: the engine's facts.
        tokenizer: the tokenizer of the engine's model.
        folder: the folder of the engine's socket.
        alive: returns whether the engine's process is alive.
        title: the engine's name in the log.

    Attributes:
        stopping: whether the engine is being shut down on purpose.
        watch: called with each step's outputs for this client's requests, before they are streamed.
        hand_on: called with each request that the engine has not ended when it dies, and with the answers that the
            request belongs to. Returns whether another engine serves the request now.
        name: this client's name, by which engines know it.
    """

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer,
        folder: str,
        alive: Callable[[], bool] = lambda: True,
        title: str = "the engine",
    ) -> None:
        self.facts, self.tokenizer, self.folder, self._alive = facts, tokenizer, folder, alive
        self.advice, self.max_concurrency = facts.advice, facts.max_concurrency
        self.watch: Callable[[Sequence[TokenOutput]], None] = lambda outputs: None
        self.hand_on: Callable[[ClientRequest, Answers], bool] = lambda request, answers: False
        self.model_name, self.max_model_len = facts.model_name, facts.limits.max_model_len
        self.model_path = facts.model_path
        self.default_max_tokens = facts.limits.default_max_tokens
        config = facts.config
        self.max_queued_seqs, self.kv, self.role = config.max_queued_seqs, config.policy, config.role
        self.max_num_seqs, self.scheduling_policy = config.max_num_seqs, config.scheduling_policy
        self.drafts, self.quality_meter = config.speculation is not None, config.quality_meter
        self.sampling_defaults = facts.sampling_defaults
        self.stopping, self._ended, self._error = False, False, cast("str | None", None)
        self.name, self._numbers = secrets.token_hex(4), itertools.count()
        self._answers: dict[str, Answers] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat = Heartbeat(title, self._ask_for_beat)

    def describe(self) -> list[str]:
        """Lines for a server's start: the model, the policy, and how many sequences of which length fit."""
        return self.facts.notes

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits: a hash of the model's name and all settings."""
        return hashlib.sha256(f"{self.facts.model_name} {self.facts.config!r}".encode()).hexdigest()[:8]

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves requests."""
        return not self._ended and self._alive()

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        if not self.is_alive:
            return "dead"
        return "stuck" if self._heartbeat.is_stuck else "ok"

    @property
    def serves(self) -> bool:
        """Whether the engine is alive and takes new requests."""
        return self.is_alive and not self.stopping

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The clients of the single engines: this one, if there is one engine."""
        return (self,)

    @property
    def in_flight(self) -> int:
        """Number of this client's requests that the engine has not ended."""
        return len(self._answers)

    # -- the sockets ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Opens the sockets on the running event loop, unless they are open there. From then on ``state`` is known."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("an engine client works on one event loop at a time")
        self.disconnect()
        self._loop = loop
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        # A client that connects again, from another event loop, gets a new address; its old requests are aborted.
        address = messages.socket_address(self.folder, f"{self.name}-{next(self._numbers)}")
        self._events, self._commands = context.socket(zmq.PULL), context.socket(zmq.DEALER)
        for socket in (self._events, self._commands):
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.LINGER, 0)
        self._events.bind(address)
        self._commands.set(zmq.IDENTITY, self.name.encode())
        self._commands.connect(messages.socket_address(self.folder, self.facts.socket))
        self._send(messages.Greeting(messages.VERSION, address))
        for socket in (self._events, self._commands):
            loop.add_reader(socket, self._receive)
        self._heartbeat.start(loop)

    def disconnect(self) -> None:
        """Closes the sockets. Pending requests and questions are never answered."""
        if self._loop is None:
            return
        for socket in (self._events, self._commands):
            if not self._loop.is_closed():
                self._loop.remove_reader(socket)
            socket.close(linger=0)
        self._loop = None
        self._heartbeat.stop()
        self._answers.clear()
        self._questions.clear()

    def _send(self, command: messages.Command) -> None:
        self._commands.send(messages.encode(command))
        # The socket's descriptor is edge-triggered, and sending can consume an edge: check for messages.
        assert self._loop is not None
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for socket in (self._events, self._commands):
            while not socket.closed:
                try:
                    message = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(messages.decode_event(message))

    def _take(self, event: messages.Event) -> None:
        if isinstance(event, messages.Step):
            self.watch(event.outputs)
            for output in event.outputs:
                answer = self._answers.get(output.request_id)
                if answer is not None:
                    answer.take(output)
        elif isinstance(event, messages.Refused):
            if (answer := self._answers.get(event.request_id)) is not None:
                answer.unfinished.discard(event.request_id)
                answer.fail(EngineBusy(event.message) if event.busy else RequestError(event.message, event.param))
        elif isinstance(event, messages.Ended):
            self._end_all(None if event.error is None else f"the engine has died: {event.error}")
        elif isinstance(event, messages.Reply) and event.number == self._heartbeat.asked:
            self._heartbeat.answer(event.value)
        elif (question := self._questions.pop(event.number, None)) is not None and not question.done():
            if isinstance(event, messages.Reply):
                question.set_result(event.value)
            else:
                question.set_exception(_error_of(event))

    def has_ended(self, error: str) -> None:
        """Ends all pending requests and questions, because the engine's process has ended. Any thread can call it."""

        def end() -> None:
            self._receive()  # the engine's last messages
            self._end_all(error)

        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # the loop was closed in the meantime
                self._loop.call_soon_threadsafe(end)
                return
        self._mark_ended(error)

    def _end_all(self, error: str | None) -> None:
        if self._ended:
            return
        self._mark_ended(error)
        self._heartbeat.stop()
        lost, self._answers = self._answers, {}
        for name, answers in lost.items():
            if name in answers.unfinished and not self.hand_on(answers.requests[name], answers):
                answers.fail(self.end())
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self.end())

    def _mark_ended(self, error: str | None) -> None:
        # The first reason counts: an engine that is being stopped ends because of that, and a server whose engine has
        # died stops it afterwards.
        if not self._ended:
            self._ended, self._error = True, None if self.stopping else error

    def end(self) -> EngineDead:
        """The error that says why the engine serves no more requests: EngineStopped if it was stopped before it
        died."""
        if self._error is None and (self._ended or self.stopping):
            return EngineStopped("the engine has been stopped")
        return EngineDead(self._error or "the engine has died")

    async def _ask(self, question: messages.Question, seconds: float | None, kind: Any) -> Any:
        """Sends a question and returns its answer, of type ``kind``. Raises EngineDead, SaveError, and
        asyncio.TimeoutError after ``seconds``."""
        answer = self._expect(question.number)
        try:
            self._send(question)
            return await self._answered(question.number, answer, seconds, kind)
        finally:
            self._forget(question.number)

    def _ask_for_beat(self) -> int | None:
        if not self.is_alive:
            return None
        self._send(messages.Statistics(number := next(self._numbers)))
        return number

    def _number(self) -> int:
        self.connect()
        if not self.is_alive:
            raise self.end()
        return next(self._numbers)

    def _expect(self, number: int) -> asyncio.Future[Any]:
        assert self._loop is not None
        answer = self._questions[number] = self._loop.create_future()
        return answer

    async def _answered(self, number: int, answer: asyncio.Future[Any], seconds: float | None, kind: Any) -> Any:
        return messages.decode_reply(await asyncio.wait_for(answer, seconds), kind)

    def _forget(self, number: int) -> None:
        if self._questions.pop(number, None) is not None and self.is_alive:
            self._send(messages.Forget(number))

    # -- requests ---------------------------------------------------------------------------------------------------

    async def compile_grammar(self, rules: str, one_line: bool = False, tenant: str = "") -> None:
        """Compiles a JSON schema or grammar in advance. Raises RequestError if no output can satisfy it, SchemaTimeout
        if it takes too long.

        Large schemas and patterns can take seconds. Only other slow grammars wait for them.
        """
        await self._ask(messages.Compile(self._number(), rules, one_line, tenant), None, None)

    def request(
        self, prompt_token_ids: list[int], params: SamplingParams, tenant: str = "", priority: int = 0
    ) -> ClientRequest:
        """Makes a request for ``generate``. The arguments are as in ``Request``. Raises RequestError if the request can
        never be served.

        Any thread can call it. An event loop's thread should not, because long prompts take a while.
        """
        limits = self.facts.limits
        limits.check(prompt_token_ids, params)
        max_tokens = limits.max_tokens(len(prompt_token_ids), params)
        name, packed = f"{self.name}-{next(self._numbers)}", messages.pack_ids(prompt_token_ids)
        return ClientRequest(name, prompt_token_ids, params, max_tokens, packed, tenant, priority)

    async def generate(
        self,
        requests: Sequence[ClientRequest],
        timeout: float | None = None,
        save: tuple[int, str] | None = None,
    ) -> AsyncGenerator[tuple[int, TextOutput], None]:
        """Streams the outputs of requests, each with its request's index in ``requests``. Closing the iterator aborts
        the requests.

        Args:
            timeout: seconds after which all requests are aborted and asyncio.TimeoutError is raised.
            save: for a single request, the number of a question to the engine, and a name. The prompt is saved to the
                disk under this name. The question is answered when the prompt is there.

        Raises EngineBusy if too many requests wait, RequestError if the empty cache is too small for a request,
        EngineStopped if the engine is stopped, EngineDead if it dies.
        """
        answers, loop = Answers(requests, self.tokenizer), asyncio.get_running_loop()
        timer = None if timeout is None else loop.call_later(max(0.0, timeout), answers.fail, asyncio.TimeoutError())
        left = set(range(len(requests)))
        try:
            for request in requests:
                self.begin(request, answers, save)
            while left:
                for number, output in await answers.read():
                    if output.finish_reason is not None:
                        _leave(requests[number], answers, stopped=output.stop_string is not None)
                        left.discard(number)
                    yield number, output
        finally:
            if timer is not None:
                timer.cancel()
            for number in left:
                _leave(requests[number], answers, stopped=False)

    def begin(self, request: ClientRequest, answers: Answers, save: tuple[int, str] | None = None) -> None:
        """Sends a request to the engine, whose outputs ``answers`` gets; ``save`` as for ``generate``. Raises
        EngineDead."""
        self.connect()
        if not self.is_alive:
            raise self.end()
        request.engine = self
        self._answers[request.request_id] = answers
        what = request.packed, request.params, request.arrival, request.looked_up
        self._send(messages.Add(request.request_id, *what, request.tenant, request.priority, save))

    def leave(self, name: str, answers: Answers, stopped: bool) -> None:
        """Forgets a request. If the engine has not finished it, the engine aborts it, or with ``stopped`` ends it."""
        self._answers.pop(name, None)
        if name in answers.unfinished and self.is_alive:
            answers.unfinished.discard(name)
            self._send(messages.Stop(name) if stopped else messages.Abort(name))

    # -- statistics and the prefix cache ----------------------------------------------------------------------------

    async def stats(self, usage: bool = False) -> EngineStats:
        """Returns the engine's statistics. With ``usage`` they include the share of the KV cache that requests
        hold. If the engine does not answer in time, returns the latest ones. Raises EngineDead, also if the engine has
        never answered."""
        question, latest = messages.Statistics(self._number(), usage), self._heartbeat.latest
        if latest is not None and self._heartbeat.is_unanswered:
            return latest
        try:
            stats: EngineStats = await self._ask(question, STATS_SECONDS, EngineStats)
        except asyncio.TimeoutError:
            if (latest := self._heartbeat.latest) is None:
                raise EngineDead("the engine has not answered since its start") from None
            return latest
        self._heartbeat.latest = stats
        return stats

    async def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        """Returns at most ``most`` segments of cached prompts with their tiers, and the total number of segments
        (``PrefixCache.segments``). The engine answers between two steps. Raises EngineDead."""
        kind = tuple[list[PrefixSegment], int]
        segments: tuple[list[PrefixSegment], int] = await self._ask(messages.Segments(self._number(), most), None, kind)
        return segments

    async def save(self, name: str, request: ClientRequest, observe: Observe = lambda: nullcontext()) -> Saved:
        """Serves a request and saves its prompt's full pages to the disk under ``name``, which must be valid.

        If the cached pages cannot be saved, the request is served a second time without the prefix cache.

        Args:
            observe: called each time the request is served. It returns a context manager, which yields a function to
                call with each output, or None.

        Raises SaveError if saving fails, RequestError if no page of the prompt can ever be saved, and what ``generate``
        raises.
        """
        self._check_directory()
        if not self._shareable(request):
            tokens = counted(len(request.prompt_token_ids), "token")
            raise RequestError(
                f"the prompt has {tokens}, and needs more than {PAGE}: only full pages of {PAGE} tokens before the "
                "prompt's last token are saved",
                "prompt",
            )
        try:
            return await self._save(name, request, observe)
        except WrittenByAnotherServer:
            anew = await asyncio.to_thread(
                self.request, request.prompt_token_ids, request.params, request.tenant, request.priority
            )
            anew.looked_up = False
            return await self._save(name, anew, observe)

    async def _save(self, name: str, request: ClientRequest, observe: Observe) -> Saved:
        number = self._number()
        answer = self._expect(number)
        try:
            with observe() as see:
                async with aclosing(self.generate([request], save=(number, name))) as outputs:
                    async for _, output in outputs:
                        if see is not None:
                            see(output)
                        if output.error is not None:
                            raise NotDone(f"the prompt could not be computed: {output.error}")
            saved: Saved = await self._answered(number, answer, DISK_SECONDS, Saved)
            return saved
        except asyncio.TimeoutError:
            raise DiskTooSlow(f"the prompt could not be written to the disk within {DISK_SECONDS:g} s") from None
        finally:
            self._forget(number)

    async def restore(self, name: str) -> Saved:
        """Reads the prompt saved under ``name`` into host memory, for the next request that begins with it.

        Raises SaveError if that fails, RequestError without a disk directory, EngineDead if the engine has ended.
        """
        self._check_directory()
        try:
            saved: Saved = await self._ask(messages.Restore(self._number(), name), DISK_SECONDS, Saved)
        except asyncio.TimeoutError:
            raise DiskTooSlow(f"{name!r} could not be read from the disk within {DISK_SECONDS:g} s") from None
        return saved

    async def hand_over(self, request: ClientRequest) -> tuple[str, ...]:
        """Writes the cached pages of a served request's prompt to the disk, for another server.

        Returns the names of the snapshots. There are none without a disk directory, with the decode role, or if the
        prompt has no full page to hand over. Raises SaveError or asyncio.TimeoutError if writing fails, EngineDead if
        the engine has ended.
        """
        if self.role == "decode" or not self._keeps_files or not self._shareable(request):
            return ()
        packed, salt = messages.pack_ids(request.prompt_token_ids), request.params.cache_salt
        saved: Saved = await self._ask(messages.HandOver(self._number(), packed, salt), SENDING_SECONDS, Saved)
        return saved.snapshots

    async def expect(self, names: tuple[str, ...], tokens: int) -> bool:
        """Waits for a chain of snapshots that another server writes, of ``tokens`` tokens in all.

        It waits at most about as long as the prefill would take, within the limits that ``Saves.expect`` names. Returns
        whether the snapshots have arrived. Raises EngineDead.
        """
        if self.role == "prefill" or not self._keeps_files or not names:
            return True
        arrived: bool = await self._ask(messages.Expect(self._number(), names, tokens), None, bool)
        return arrived

    @property
    def _keeps_files(self) -> bool:
        return self.facts.config.kv_disk_dir is not None

    def _shareable(self, request: ClientRequest) -> bool:
        return (
            self.facts.config.enable_prefix_caching
            and request.params.cache_prompt
            and len(request.prompt_token_ids) > PAGE
        )

    def _check_directory(self) -> None:
        if not self._keeps_files:
            raise RequestError("this server has no disk tier: it was started without --kv-disk-dir")


def _leave(request: ClientRequest, answers: Answers, stopped: bool) -> None:
    if request.engine is not None:
        request.engine.leave(request.request_id, answers, stopped)


def _error_of(failure: messages.Failure) -> Exception:
    for refused in (RequestError, SchemaTimeout):
        if failure.kind == refused.__name__:
            return refused(failure.message, failure.param)
    kind = getattr(protocol, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SaveError):
        return kind(failure.message)
    return RuntimeError(f"{failure.kind}: {failure.message}")
