"""An engine in another process, for event loops: requests go in, streams of outputs come out."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import zmq

from shadowkv.engine.answer_text import AnswerText
from shadowkv.engine.engine import EngineStats
from shadowkv.engine.outputs import TextOutput, TokenOutput
from shadowkv.engine.process import messages
from shadowkv.engine.process.facts import EngineFacts
from shadowkv.engine.process.fair_turns import FairTurns
from shadowkv.engine.request import EngineBusy, EngineDead, EngineStopped, RequestError, SchemaTimeout
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.structured.json_schema import check_schema
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.prefix_cache import protocol
from shadowkv.prefix_cache.cache import PrefixSegment
from shadowkv.prefix_cache.protocol import ComputedTwice, DiskTooSlow, NotDone, Saved, SaveError
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

DISK_SECONDS = 120.0
"""How long saving a prompt by name may take to reach the disk, or restoring one to come back from there."""

SENDING_SECONDS = 30.0
"""How long the answer to a prompt that another server continues waits for the disk."""


@dataclass(eq=False)
class ClientRequest:
    """A request that an engine may be asked to serve, once.

    Attributes:
        max_tokens: most tokens of its answer.
        packed: its prompt, for the wire.
        looked_up, tenant, priority: as in ``Request``.
        arrival: when it came, in seconds of ``time.monotonic``.
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


Observe = Callable[[], AbstractContextManager[Callable[[TextOutput], None] | None]]


class Answers:
    """The outputs of some requests as they come in; those of a request that have not been read are read together."""

    def __init__(self, requests: Sequence[ClientRequest], tokenizer: Tokenizer) -> None:
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._texts = [AnswerText(tokenizer, request.params) for request in requests]
        self._outputs: dict[int, list[TokenOutput]] = {}
        self._error: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._ended: set[int] = set()
        self.unfinished = set(self._numbers)
        """Requests for which the engine has something left to do."""

    def take(self, output: TokenOutput) -> None:
        """Takes the next one."""
        self._outputs.setdefault(self._numbers[output.request_id], []).append(output)
        if output.finish_reason is not None:
            self.unfinished.discard(output.request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends them all, once what has come is read."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def read(self) -> list[tuple[int, TextOutput]]:
        """What has come since the last time, by the requests' numbers; waits for something. Raises the error that ended
        them. What comes for an answer after its end, until the engine knows of that, is left out."""
        if not self._outputs and self._error is None:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if not self._outputs:
            assert self._error is not None, "woken by nothing"
            raise self._error
        outputs, self._outputs = self._outputs, {}
        read = [(number, self._read(number, of_it)) for number, of_it in outputs.items() if number not in self._ended]
        self._ended |= {number for number, output in read if output.finish_reason is not None}
        return read

    def _read(self, number: int, outputs: list[TokenOutput]) -> TextOutput:
        try:
            return self._texts[number].read(outputs)
        except Exception as error:  # of the tokenizer: other requests go on
            logger.exception("a request failed")
            last = outputs[-1]
            what = f"internal error ({type(error).__name__}); the log has the details"
            counts = last.prompt_tokens, last.completion_tokens, last.cached_tokens
            return TextOutput(last.request_id, "", [], None, "error", what, *counts, last.times)


class EngineClient:
    """Reaches an engine through its socket. What awaits is for one event loop at a time, which is never blocked.

    Args:
        facts: about the engine.
        tokenizer: its model's.
        folder: where its socket is.
        alive: whether the engine is still there, beyond what it says itself.

    Attributes:
        stopping: whether its end is wanted.
        watch: called with what each step adds to this client's requests, before anybody else sees it.
        name: its own to engines.
    """

    def __init__(
        self, facts: EngineFacts, tokenizer: Tokenizer, folder: str, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._facts, self.tokenizer, self._folder, self._alive = facts, tokenizer, folder, alive
        self.advice, self.max_concurrency = facts.advice, facts.max_concurrency
        self.watch: Callable[[Sequence[TokenOutput]], None] = lambda outputs: None
        self.model_name, self.max_model_len = facts.model_name, facts.limits.max_model_len
        self.model_path = facts.model_path
        self.default_max_tokens = facts.limits.default_max_tokens
        config = facts.config
        self.max_queued_seqs, self.kv, self.role = config.max_queued_seqs, config.policy, config.role
        self.max_num_seqs, self.scheduling_policy = config.max_num_seqs, config.scheduling_policy
        self.sampling_defaults = facts.sampling_defaults
        self.stopping, self._ended, self._error = False, False, cast("str | None", None)
        self.name, self._numbers = secrets.token_hex(4), itertools.count()
        self._answers: dict[str, Answers] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._checking, self._checks = ThreadPoolExecutor(1, "shadowkv-schema"), FairTurns(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def describe(self) -> list[str]:
        """Lines for the start of a server: model, policy, and how many sequences of which length fit where."""
        return self._facts.notes

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that are others where the model's name or a setting is another."""
        return hashlib.sha256(f"{self._facts.model_name} {self._facts.config!r}".encode()).hexdigest()[:8]

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return not self._ended and self._alive()

    # -- the sockets ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Opens the sockets on the running event loop, if they are not open there."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("an engine's client is for one event loop at a time")
        self.disconnect()
        self._loop = loop
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        # Once more where this client has had another loop: what that one had asked for is aborted.
        address = messages.socket_address(self._folder, f"{self.name}-{next(self._numbers)}")
        self._events, self._commands = context.socket(zmq.PULL), context.socket(zmq.DEALER)
        for socket in (self._events, self._commands):
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.LINGER, 0)
        self._events.bind(address)
        self._commands.set(zmq.IDENTITY, self.name.encode())
        self._commands.connect(messages.socket_address(self._folder, self._facts.socket))
        self._send(messages.Greeting(messages.VERSION, address))
        for socket in (self._events, self._commands):
            loop.add_reader(socket, self._receive)

    def disconnect(self) -> None:
        """Closes the sockets; what is still waited for never comes."""
        if self._loop is None:
            return
        for socket in (self._events, self._commands):
            if not self._loop.is_closed():
                self._loop.remove_reader(socket)
            socket.close(linger=0)
        self._loop = None
        self._answers.clear()
        self._questions.clear()

    def _send(self, command: messages.Command) -> None:
        self._commands.send(messages.encode(command))
        # The descriptor tells changes alone, and sending may hide one.
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
        elif (question := self._questions.pop(event.number, None)) is not None and not question.done():
            if isinstance(event, messages.Reply):
                question.set_result(event.value)
            else:
                question.set_exception(_error_of(event))

    def has_ended(self, error: str) -> None:
        """Tells everybody who waits that the engine's process is gone; may be called from any thread."""

        def end() -> None:
            self._receive()  # its last words
            self._end_all(error)

        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it is closed just now
                self._loop.call_soon_threadsafe(end)
                return
        self._ended, self._error = True, error

    def _end_all(self, error: str | None) -> None:
        if self._ended:
            return
        self._ended, self._error = True, error
        for answer in self._answers.values():
            answer.fail(self._end())
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._end())

    def _end(self) -> EngineDead:
        """Why nothing more is served."""
        if self.stopping or (self._ended and self._error is None):
            return EngineStopped("the engine has been shut down")
        return EngineDead(self._error or "the engine has died")

    async def _ask(self, question: messages.Question, seconds: float | None, kind: Any) -> Any:
        """The answer, of type ``kind``; raises EngineDead, SaveError, and asyncio.TimeoutError after ``seconds``."""
        answer = self._expect(question.number)
        try:
            self._send(question)
            return await self._answered(question.number, answer, seconds, kind)
        finally:
            self._forget(question.number)

    def _number(self) -> int:
        self._connect()
        if not self.is_alive:
            raise self._end()
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
        """Prepares a JSON schema or other rules so that using them is fast; raises RequestError if nothing can satisfy
        them, SchemaTimeout if they take too much.

        Large ones may take seconds, which only other large ones wait for; so may patterns.
        """
        loop = asyncio.get_running_loop()
        async with self._checks.of(tenant):
            cost = await loop.run_in_executor(self._checking, check_schema, rules)
        await self._ask(messages.Compile(self._number(), rules, one_line, cost.effort, tenant), None, None)

    def request(
        self, prompt_token_ids: list[int], params: SamplingParams, tenant: str = "", priority: int = 0
    ) -> ClientRequest:
        """A request for ``generate``, of which ``Request`` says what the arguments are; raises RequestError if it could
        never be served.

        May be called from any thread, but preferably not an event loop's: long prompts and JSON schemas take a while.
        """
        limits = self._facts.limits
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
        """Outputs of requests as they are generated, with the number of each one; closing the iterator aborts them.

        Args:
            timeout: seconds after which all of them are aborted, and asyncio.TimeoutError is raised.
            save: of a single request, number of a question that is answered once its prompt is on the disk, and a name
                for that.

        Raises EngineBusy if too many are waiting, RequestError if there is not enough memory for one in all, EngineDead
        if the engine has stopped.
        """
        self._connect()
        if not self.is_alive:
            raise self._end()
        assert self._loop is not None
        answers = Answers(requests, self.tokenizer)
        names = [request.request_id for request in requests]
        timer = (
            None if timeout is None else self._loop.call_later(max(0.0, timeout), answers.fail, asyncio.TimeoutError())
        )
        self._answers.update(dict.fromkeys(names, answers))
        left = set(names)
        try:
            for request in requests:
                what = request.packed, request.params, request.arrival, request.looked_up
                self._send(messages.Add(request.request_id, *what, request.tenant, request.priority, save))
            while left:
                for number, output in await answers.read():
                    if output.finish_reason is not None:
                        self._leave(names[number], answers, stopped=output.stop_string is not None)
                        left.discard(names[number])
                    yield number, output
        finally:
            if timer is not None:
                timer.cancel()
            for name in left:
                self._leave(name, answers, stopped=False)

    def _leave(self, name: str, answers: Answers, stopped: bool) -> None:
        self._answers.pop(name, None)
        if name in answers.unfinished and self.is_alive:
            answers.unfinished.discard(name)
            self._send(messages.Stop(name) if stopped else messages.Abort(name))

    # -- what is cached ---------------------------------------------------------------------------------------------

    async def stats(self, usage: bool = False) -> EngineStats:
        """Requests in flight and memory in use, with ``usage`` also the share of it that they hold; raises
        EngineDead."""
        stats: EngineStats = await self._ask(messages.Statistics(self._number(), usage), None, EngineStats)
        return stats

    async def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        """Where cached prompts are (``PrefixCache.segments``), between two steps; raises EngineDead."""
        kind = tuple[list[PrefixSegment], int]
        segments: tuple[list[PrefixSegment], int] = await self._ask(messages.Segments(self._number(), most), None, kind)
        return segments

    async def save(self, name: str, request: ClientRequest, observe: Observe = lambda: nullcontext()) -> Saved:
        """Has the cached part of a request's prompt kept on the disk under ``name``, which must be valid. The request
        is served first, and once more without the cache if what that holds cannot be saved; each time its outputs are
        given to what the context that ``observe`` returns gives.

        Raises SaveError where that is not possible, RequestError where nothing of the prompt can ever be saved, and
        what ``generate`` does.
        """
        self._check_directory()
        if not self._shareable(request):
            tokens = counted(len(request.prompt_token_ids), "token")
            raise RequestError(
                f"the prompt has {tokens}; pages of {PAGE} are saved, as many as come before its last token",
                "prompt",
            )
        try:
            return await self._save(name, request, observe)
        except ComputedTwice:
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
            raise DiskTooSlow(f"the disk has not taken the prompt within {DISK_SECONDS:g} s") from None
        finally:
            self._forget(number)

    async def restore(self, name: str) -> Saved:
        """Has what a name keeps brought to host memory, for the next prompt that begins with it.

        Raises SaveError where that is not possible, RequestError without a directory, EngineDead if it has stopped.
        """
        self._check_directory()
        try:
            saved: Saved = await self._ask(messages.Restore(self._number(), name), DISK_SECONDS, Saved)
        except asyncio.TimeoutError:
            raise DiskTooSlow(f"the disk has not given {name!r} within {DISK_SECONDS:g} s") from None
        return saved

    async def hand_over(self, request: ClientRequest) -> tuple[str, ...]:
        """Waits until what is cached of the prompt of a request that has been served is on the disk, where another
        server finds it.

        Returns the names of its snapshots; none if there is nothing to hand over, or the engine has the decode role.
        Raises SaveError or asyncio.TimeoutError where it does not get there, EngineDead if the engine has stopped.
        """
        if self.role == "decode" or not self._keeps_files or not self._shareable(request):
            return ()
        packed, salt = messages.pack_ids(request.prompt_token_ids), request.params.cache_salt
        saved: Saved = await self._ask(messages.HandOver(self._number(), packed, salt), SENDING_SECONDS, Saved)
        return saved.snapshots

    async def expect(self, names: tuple[str, ...], tokens: int) -> bool:
        """Waits until snapshots of prompts of ``tokens`` that another server has written, or is about to, are known
        here: at most as long as computing them would take, within bounds. Returns whether they are; raises EngineDead.
        """
        if self.role == "prefill" or not self._keeps_files or not names:
            return True
        arrived: bool = await self._ask(messages.Expect(self._number(), names, tokens), None, bool)
        return arrived

    @property
    def _keeps_files(self) -> bool:
        return self._facts.config.kv_disk_dir is not None

    def _shareable(self, request: ClientRequest) -> bool:
        return (
            self._facts.config.enable_prefix_caching
            and request.params.cache_prompt
            and len(request.prompt_token_ids) > PAGE
        )

    def _check_directory(self) -> None:
        if not self._keeps_files:
            raise RequestError("this server keeps nothing on a disk: it was started without --kv-disk-dir")


def _error_of(failure: messages.Failure) -> Exception:
    for refused in (RequestError, SchemaTimeout):
        if failure.kind == refused.__name__:
            return refused(failure.message, failure.param)
    kind = getattr(protocol, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SaveError):
        return kind(failure.message)
    return RuntimeError(f"{failure.kind}: {failure.message}")
