"""The engine in its own process. ``main.py`` starts it; ``client.py`` talks to it from the serving processes.

The engine thread runs the engine's steps, and the clients' commands between two steps. It sends the outputs of a step
to each serving process in one message. The receiver thread decodes messages, checks requests, hashes the pages of their
prompts, and refuses bad requests at once, while a step runs.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import zmq

from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import RequestTimes, TokenOutput
from shadowkv.engine.process import messages
from shadowkv.engine.process.facts import EngineFacts
from shadowkv.engine.process.messages import encode
from shadowkv.engine.request import EngineDead, Request, RequestError
from shadowkv.engine.warmup import SERVER_SECONDS, GraphGrid, warm_up
from shadowkv.layers.group import RankFailure
from shadowkv.models.known import advice
from shadowkv.prefix_cache.protocol import NotDone, SaveError, settle
from shadowkv.prefix_cache.saves import Saves
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

TENANTS = 2
"""A tenant can have ``max_queued_seqs`` waiting requests. All tenants together can have ``TENANTS`` times as many. A
tenant without a waiting request can still queue one until there are ``2 * TENANTS`` times as many."""

HELD_SECONDS = 0.002
"""How long the engine thread waits for a command while all sequences wait for their grammars."""

LINGER_MS = 1000
"""Time limit in milliseconds for sending the last messages at shutdown."""


class EngineCore:
    """Serves an engine to the processes that connect to its socket.

    Args:
        engine: the engine, which only this object uses from now on.
        folder: the folder of the socket, private to this installation's processes.
        name: the socket's name in ``folder``.
    """

    def __init__(self, engine: Engine, folder: str, name: str) -> None:
        self.engine, self.name, self._limit = engine, name, engine.config.max_queued_seqs
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: dict[str, str] = {}  # request id -> tenant
        self._gone: set[str] = set()
        self._saves: dict[str, Callable[[], None]] = {}
        self._answers: dict[tuple[str, int], Future[Any]] = {}
        self._error: BaseException | None = None
        self._warm, self._stopping = threading.Event(), threading.Event()
        self._grid: GraphGrid | None = None
        self._began = math.inf  # when the engine thread began what it does; it may wait for commands forever
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(messages.socket_address(folder, name))
        self._listening, self._hang_up = self._socket(zmq.PAIR), self._socket(zmq.PAIR)
        self._listening.bind(f"inproc://hang-up-{id(self)}")
        self._hang_up.connect(f"inproc://hang-up-{id(self)}")
        self._clients: dict[str, zmq.Socket[bytes]] = {}
        self._stepper = threading.Thread(target=self._run, name="shadowkv-engine", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name="shadowkv-engine-messages", daemon=True)
        engine.when_a_rank_fails(lambda failure: self._commands.put(partial(_raise, failure)))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(kind)
        socket.set(zmq.SNDHWM, 0)  # a step never waits for a client
        socket.set(zmq.RCVHWM, 0)
        return socket

    def start(self) -> None:
        """Starts to serve and returns when the engine has warmed up. Raises EngineDead if the warm-up failed."""
        try:
            self._stepper.start()
            self._warm.wait()
        except BaseException:  # Ctrl-C, for example: the engine thread must stop before the device is released
            self.shutdown()
            raise
        if self._error is not None:
            raise EngineDead(f"the engine has died: {self._error}") from self._error
        self._receiver.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops after the current step. Requests in flight get EngineStopped. Waits up to ``timeout`` seconds for each
        thread."""
        self._stopping.set()
        self._commands.put(None)
        if self._stepper.is_alive():
            self._stepper.join(timeout)
        if self._receiver.is_alive():
            self._hang_up.send(b"")
            self._receiver.join(timeout)
        if not self._stepper.is_alive() and not self._receiver.is_alive():
            for socket in (self._router, self._listening, self._hang_up, *self._clients.values()):
                socket.close(linger=LINGER_MS)

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._stepper.is_alive()

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that its clients need."""
        engine = self.engine
        return EngineFacts(
            self.name,
            engine.notes,
            engine.model_name,
            engine.requests.limits,
            engine.sampling_defaults,
            engine.config,
            engine.model_path,
            engine.scheduler.max_concurrency,
            advice(engine.config.model),
        )

    def has_left(self, client: str) -> None:
        """Aborts all requests of a client whose process has ended. Any thread can call it."""
        self._commands.put(partial(self._forget_client, client))

    # -- the receiver thread --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._listening, zmq.POLLIN)
        while self._listening not in (ready := dict(poller.poll())):
            if self._router in ready:
                self._take_message(*self._router.recv_multipart())

    def _take_message(self, client: bytes, message: bytes) -> None:
        try:
            self._take(client, messages.decode_command(message))
        except msgspec.DecodeError:  # from a client of another version, which has been refused
            logger.exception("a message from %s could not be read", client)
        except Exception as error:  # ends the engine, because the sender would wait forever for an answer
            self._commands.put(partial(_raise, error))

    def _take(self, client: bytes, command: messages.Command) -> None:
        if isinstance(command, messages.Add):
            self._take_request(client, command)
        elif isinstance(command, messages.Stop):
            self._commands.put(partial(self._end, command.request_id, self.engine.stop))
        elif isinstance(command, messages.Abort):
            self._commands.put(partial(self._end, command.request_id, self.engine.abort))
        elif isinstance(command, messages.Statistics):
            stats = replace(self.engine.stats(command.usage), step_seconds=max(0.0, time.monotonic() - self._began))
            reply = messages.reply(command.number, stats)
            self._router.send_multipart([client, encode(reply)])
        elif isinstance(command, messages.Greeting):
            if command.version == messages.VERSION:
                self._commands.put(partial(self._connect, client.decode(), command.address))
            else:
                versions = f"{command.version}, and the engine has version {messages.VERSION}"
                ended = messages.Ended(f"this process has message version {versions}: restart the server")
                self._router.send_multipart([client, encode(ended)])
        elif isinstance(command, messages.Forget):
            self._commands.put(partial(self._forget, client.decode(), command.number))
        elif isinstance(command, messages.Compile):
            what = command.rules, command.one_line, command.tenant
            compiled = self.engine.requests.grammars.compile(*what)
            self._commands.put(partial(self._expect, client.decode(), command.number, compiled))
        else:
            self._commands.put(partial(self._begin, client.decode(), command.number, self._question(command)))

    def _question(self, question: messages.Question) -> Callable[[Future[Any]], None]:
        """Returns a function that the engine thread calls with a future. The function settles the future with the
        answer."""
        engine = self.engine
        if isinstance(question, messages.Segments):
            most = question.most
            return lambda answer: settle(answer, engine.scheduler.prefix_cache.segments(most))
        if isinstance(question, messages.Restore):
            name = question.name
            return lambda answer: self._saved_ones().restore(name, answer)
        if isinstance(question, messages.HandOver):
            pages = engine.requests.pages(messages.unpack_ids(question.prompt), question.cache_salt)
            return lambda answer: self._saved_ones().save(None, pages, answer)
        assert isinstance(question, messages.Expect), "statistics are answered at once"
        names, tokens = question.names, question.tokens

        def expect(answer: Future[Any]) -> None:
            if engine.saves is None:  # the tiers below the device have failed
                settle(answer, False)
            else:
                engine.saves.expect(names, tokens, answer)

        return expect

    def _take_request(self, client: bytes, add: messages.Add) -> None:
        waiting = len(self._in_flight) - self.engine.num_running
        waiting_of_tenant = [*self._in_flight.values()].count(add.tenant) - self.engine.num_running_of(add.tenant)
        total_limit = (TENANTS if waiting_of_tenant else 2 * TENANTS) * self._limit
        if waiting_of_tenant >= self._limit or waiting >= total_limit:
            text = f"no more than {counted(self._limit, 'request')} may wait (--max-queued-seqs)"
            self._router.send_multipart([client, encode(messages.Refused(add.request_id, text, busy=True))])
            return
        self._in_flight[add.request_id] = add.tenant
        try:
            prompt = messages.unpack_ids(add.prompt)
            request = self.engine.requests.request(add.request_id, prompt, add.params, add.tenant, add.priority)
        except RequestError as error:
            self._in_flight.pop(add.request_id, None)
            self._router.send_multipart([client, encode(messages.Refused(add.request_id, str(error), error.param))])
        except Exception as error:  # only this request fails
            logger.exception("a request could not be created")
            what = f"internal error ({type(error).__name__}); the log has the details"
            counts = len(add.prompt) // messages.ID_BYTES, 0, 0
            output = TokenOutput(add.request_id, [], "error", *counts, RequestTimes(add.arrival), error=what)
            self._commands.put(partial(self._send_outputs, [output]))
        else:
            request.times.arrival, request.looked_up = add.arrival, add.looked_up
            self._commands.put(partial(self._add, client.decode(), request, add.save))

    # -- the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._grid = warm_up(self.engine, self._stopping.is_set, SERVER_SECONDS)
            self._warm.set()
            while self._run_commands():
                self._send_outputs(self.engine.step(wait=False))
        except BaseException as error:
            self._error = error
            # The log already has the traceback of a failed rank.
            logger.error("the engine has died: %s", error, exc_info=not isinstance(error, RankFailure))
        finally:
            self._warm.set()
            ended = messages.Ended(str(self._error) if self._error else None)
            for client in self._clients:
                self._send(client, ended)
            try:
                self.engine.close()
            except (OSError, RuntimeError) as error:
                logger.warning("the prefix cache was not closed: %s", error)

    def _run_commands(self) -> bool:
        """Runs the commands that arrived since the last step. Without work it waits for a command, or captures CUDA
        graphs. Returns False when the engine must stop."""
        ran_command = False
        while True:
            try:
                command = self._next_command(ran_command)
            except queue.Empty:
                if ran_command or not self._has_spare_time:
                    return True
                assert self._grid is not None
                self._grid = self._grid if self._grid.capture() else None
                continue
            if command is None:
                return False
            command()
            ran_command = True

    def _next_command(self, ran_command: bool) -> Callable[[], None] | None:
        self._began = math.inf
        try:
            if self.engine.waits_for_rules and not ran_command:
                return self._commands.get(timeout=HELD_SECONDS)
            if self.engine.settling or self._has_spare_time:
                return self._commands.get_nowait()
            return self._commands.get(block=not self.engine.has_work)
        finally:
            self._began = time.monotonic()

    @property
    def _has_spare_time(self) -> bool:
        """Whether CUDA graphs are left to capture and the engine has no other work."""
        return self._grid is not None and not self.engine.has_work and not self.engine.settling

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        of_client: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            name = output.request_id
            if output.finish_reason is not None:
                self._in_flight.pop(name, None)
                save = self._saves.pop(name, None)
                if save is not None and output.finish_reason != "error":
                    save()
            of_client[name.partition("-")[0]].append(output)
        for client, of_it in of_client.items():
            self._send(client, messages.Step(of_it))

    def _send(self, client: str, event: messages.Event) -> None:
        if client in self._clients:
            self._clients[client].send(encode(event))

    def _connect(self, client: str, address: str) -> None:
        if client in self._gone:
            return
        if client in self._clients:
            self._disconnect(client)
        self._clients[client] = self._socket(zmq.PUSH)
        self._clients[client].connect(address)

    def _disconnect(self, client: str) -> None:
        self._clients.pop(client).close(linger=0)
        for name in [name for name in self._in_flight if name.startswith(f"{client}-")]:
            self._end(name, self.engine.abort)
        for of, number in [*self._answers]:
            if of == client:
                self._forget(client, number)

    def _forget_client(self, client: str) -> None:
        self._gone.add(client)  # its messages can still arrive
        if client in self._clients:
            self._disconnect(client)

    def _add(self, client: str, request: Request, save: tuple[int, str] | None) -> None:
        if client in self._gone:
            self._in_flight.pop(request.request_id, None)
        if request.request_id not in self._in_flight:
            return  # aborted in the meantime
        if save is not None:
            assert request.prompt is not None, "checked by the client"
            number, name, pages = *save, request.prompt.shareable
            self._saves[request.request_id] = lambda: self._begin(
                client, number, lambda answer: self._saved_ones().save(name, pages, answer)
            )
        try:
            self.engine.add(request)
        except RequestError as error:  # the id is in use: only this request is refused
            self._send(client, messages.Refused(request.request_id, str(error), error.param))

    def _end(self, name: str, end: Callable[[str], None]) -> None:
        self._in_flight.pop(name, None)
        self._saves.pop(name, None)
        end(name)

    # -- questions, on the engine thread --------------------------------------------------------------------------

    def _begin(self, client: str, number: int, begin: Callable[[Future[Any]], None]) -> None:
        """Calls ``begin`` with a future. When the future is settled, the engine thread sends its outcome to the
        client."""
        self._expect(client, number, answer := Future[Any]())
        try:
            begin(answer)
        except SaveError as error:
            settle(answer, error)

    def _expect(self, client: str, number: int, answer: Future[Any]) -> None:
        self._answers[client, number] = answer
        answer.add_done_callback(lambda answer: self._commands.put(partial(self._reply, client, number, answer)))

    def _reply(self, client: str, number: int, answer: Future[Any]) -> None:
        if self._answers.pop((client, number), None) is None or answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._send(client, messages.reply(number, answer.result()))
        else:
            if not isinstance(error, (RequestError, SaveError)):
                logger.error("a question could not be answered", exc_info=error)
            param = getattr(error, "param", None)
            self._send(client, messages.Failure(number, type(error).__name__, str(error), param))

    def _forget(self, client: str, number: int) -> None:
        answer = self._answers.pop((client, number), None)
        if answer is not None:
            answer.cancel()

    def _saved_ones(self) -> Saves:
        if self.engine.saves is None:
            raise NotDone("the tiers below the device have failed; the server's log says why")
        return self.engine.saves


def _raise(error: Exception) -> None:
    raise error
