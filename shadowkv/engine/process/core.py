"""The engine in its own process: it steps on one thread, and another takes in what its clients send.

What can be done beside a step is done on the second thread: decoding a message, checking a request and naming its
pages. A refusal goes back from there at once. The first thread does what was asked between two steps, and sends what a
step made in one message to each serving process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
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
"""Requests that may wait in all, as a multiple of a tenant's limit; twice that for a tenant with none waiting."""

HELD_SECONDS = 0.002
"""How long nothing is done, unless a command comes, where all sequences wait for their grammars."""

LINGER_MS = 1000
"""How long the last messages may take to leave."""


class EngineCore:
    """Serves an engine to the processes that connect to its socket.

    Args:
        engine: not used by anyone else from now on.
        folder: private to this installation's processes, for the socket.
        name: of the socket in it.
    """

    def __init__(self, engine: Engine, folder: str, name: str) -> None:
        self.engine, self.name, self._limit = engine, name, engine.config.max_queued_seqs
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: dict[str, str] = {}  # by id, the tenant
        self._gone: set[str] = set()
        self._saves: dict[str, Callable[[], None]] = {}
        self._answers: dict[tuple[str, int], Future[Any]] = {}
        self._error: BaseException | None = None
        self._warm, self._stopping = threading.Event(), threading.Event()
        self._grid: GraphGrid | None = None
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
        """Starts to serve, and returns once the engine has warmed up; raises EngineDead where that failed."""
        try:
            self._stepper.start()
            self._warm.wait()
        except BaseException:  # Ctrl-C, for example: the thread must not go on working on a device that is about to go
            self.shutdown()
            raise
        if self._error is not None:
            raise EngineDead(f"the engine has died: {self._error}") from self._error
        self._receiver.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops after the current step; requests in flight get EngineDead."""
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
        """Whether the engine steps."""
        return self._stepper.is_alive()

    @property
    def facts(self) -> EngineFacts:
        """What its clients need to know."""
        engine = self.engine
        return EngineFacts(
            self.name,
            engine.notes,
            engine.model_name,
            engine.requests.limits,
            engine.requests.stop_ids,
            engine.sampling_defaults,
            engine.config,
            engine.model_path,
            engine.scheduler.max_concurrency,
            advice(engine.config.model),
        )

    def has_left(self, client: str) -> None:
        """Aborts everything that a client has asked for, whose process is gone; may be called from any thread."""
        self._commands.put(partial(self._forget_client, client))

    # -- the thread that takes in messages ------------------------------------------------------------------------

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
        except msgspec.DecodeError:  # of another version, which has been refused
            logger.exception("a message from %s could not be read", client)
        except Exception as error:  # ends the engine: whoever sent this would wait for an answer forever
            self._commands.put(partial(_raise, error))

    def _take(self, client: bytes, command: messages.Command) -> None:
        if isinstance(command, messages.Add):
            self._take_request(client, command)
        elif isinstance(command, messages.Stop):
            self._commands.put(partial(self._end, command.request_id, self.engine.stop))
        elif isinstance(command, messages.Abort):
            self._commands.put(partial(self._end, command.request_id, self.engine.abort))
        elif isinstance(command, messages.Statistics):
            reply = messages.reply(command.number, self.engine.stats(command.usage))
            self._router.send_multipart([client, encode(reply)])
        elif isinstance(command, messages.Greeting):
            if command.version == messages.VERSION:
                self._commands.put(partial(self._connect, client.decode(), command.address))
            else:
                versions = f"{command.version}, and the engine's are of {messages.VERSION}"
                ended = messages.Ended(f"this process sends messages of version {versions}: restart the server")
                self._router.send_multipart([client, encode(ended)])
        elif isinstance(command, messages.Forget):
            self._commands.put(partial(self._forget, client.decode(), command.number))
        elif isinstance(command, messages.Compile):
            what = command.rules, command.one_line, command.effort, command.tenant
            compiled = self.engine.requests.grammars.compile(*what)
            self._commands.put(partial(self._expect, client.decode(), command.number, compiled))
        else:
            self._commands.put(partial(self._begin, client.decode(), command.number, self._question(command)))

    def _question(self, question: messages.Question) -> Callable[[Future[Any]], None]:
        """What the engine's thread is to do for a question; it settles the future that it is given."""
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
            if engine.saves is None:  # the tiers have failed
                settle(answer, False)
            else:
                engine.saves.expect(names, tokens, answer)

        return expect

    def _take_request(self, client: bytes, add: messages.Add) -> None:
        waiting = len(self._in_flight) - self.engine.num_running
        own = [*self._in_flight.values()].count(add.tenant) - self.engine.num_running_of(add.tenant)
        if own >= self._limit or waiting >= (TENANTS if own else 2 * TENANTS) * self._limit:
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
        except Exception as error:  # of one request: the others are served
            logger.exception("a request could not be made")
            what = f"internal error ({type(error).__name__}); the log has the details"
            counts = len(add.prompt) // messages.ID_BYTES, 0, 0
            output = TokenOutput(add.request_id, [], "error", *counts, RequestTimes(add.arrival), error=what)
            self._commands.put(partial(self._send_outputs, [output]))
        else:
            request.times.arrival, request.looked_up = add.arrival, add.looked_up
            self._commands.put(partial(self._add, client.decode(), request, add.save))

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._grid = warm_up(self.engine, self._stopping.is_set, SERVER_SECONDS)
            self._warm.set()
            while self._run_commands():
                self._send_outputs(self.engine.step(wait=False))
        except BaseException as error:
            self._error = error
            # The reason of a rank's failure is in the log already.
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
        """Carries out what was requested since the last step, or waits for something to do; False to stop."""
        ran_command = False
        while True:
            try:
                if self.engine.waits_for_rules and not ran_command:
                    command = self._commands.get(timeout=HELD_SECONDS)
                elif self.engine.settling or self._has_spare_time:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(block=not self.engine.has_work)
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

    @property
    def _has_spare_time(self) -> bool:
        """Whether there are graphs to capture, and nothing else to do."""
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
        self._gone.add(client)  # something that it has sent may still come
        if client in self._clients:
            self._disconnect(client)

    def _add(self, client: str, request: Request, save: tuple[int, str] | None) -> None:
        if client in self._gone:
            self._in_flight.pop(request.request_id, None)
        if request.request_id not in self._in_flight:
            return  # aborted by now
        if save is not None:
            assert request.prompt is not None, "checked by the client"
            number, name, pages = *save, request.prompt.shareable
            self._saves[request.request_id] = lambda: self._begin(
                client, number, lambda answer: self._saved_ones().save(name, pages, answer)
            )
        try:
            self.engine.add(request)
        except RequestError as error:  # its id is in use: the engine goes on for all others
            self._send(client, messages.Refused(request.request_id, str(error), error.param))

    def _end(self, name: str, end: Callable[[str], None]) -> None:
        self._in_flight.pop(name, None)
        self._saves.pop(name, None)
        end(name)

    # -- questions, on the engine's thread ------------------------------------------------------------------------

    def _begin(self, client: str, number: int, begin: Callable[[Future[Any]], None]) -> None:
        """Begins what settles a future, whose outcome is sent to the client, from this thread."""
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
