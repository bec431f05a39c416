"""A mock engine's process. It has no model and makes tokens at a set rate. The HTTP process is connected to it as to a
real engine.

A step adds a token to every request in flight. The newest request's ``seed`` sets the number of steps per second, so
that one server can be measured at several rates. An answer's text is a clock: every ``DIGITS`` characters tell when the
first of them was made, in ticks of ``time.monotonic`` modulo ``WRAP``. A client on the same machine can thus tell how
long a token was on its way.

The process is started as ``python -m shadowkv.bench.mock_engine FD``. ``FD`` means the same as for
``shadowkv.engine.process.main``.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import zmq

from shadowkv.bench.mock_clock import ALPHABET, DIGITS, clock_digits
from shadowkv.engine.engine import EngineStats
from shadowkv.engine.outputs import RequestTimes, TokenOutput
from shadowkv.engine.process import messages
from shadowkv.engine.process.facts import EngineFacts, Launch
from shadowkv.engine.process.main import main
from shadowkv.engine.request import RequestLimits
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.kvcache.decode.fetching import FetchCounts

STEPS = 50
"""Number of steps per second, unless a request sets another number."""

MAX_MODEL_LEN = 2**17

POLL_MS = 50
"""Maximum time, in milliseconds, until an idle engine notices that it should stop."""


@dataclass
class _Stream:
    """A request in flight: its output so far (changed in place), its maximum number of tokens, and the number of the
    step that makes its first token."""

    output: TokenOutput
    max_tokens: int
    first_step: int


class MockEngine:
    """Serves all clients of its socket, on a separate thread.

    Attributes:
        facts: the facts that a real engine sends when it has started.
    """

    def __init__(self, launch: Launch) -> None:
        config = launch.config
        tokenizer = tokenizer_from_config(config)
        ids = [token for c in ALPHABET if (token := tokenizer.backend.token_to_id(c)) is not None]
        if len(ids) < len(ALPHABET):
            raise ValueError(f"--model {config.model}: a mock engine needs a token for each of {ALPHABET}")
        self._tokens: list[list[int]] = [[token] for token in ids]
        limits = RequestLimits(tokenizer.vocab_size, config.max_model_len or MAX_MODEL_LEN, config.default_max_tokens)
        notes = [f"a mock engine without a model, with the tokenizer of {config.model}"]
        self.facts = EngineFacts("mock", notes, "mock", limits, {}, config, "mock", float(config.max_num_seqs))
        self._limits, self._steps, self._number = limits, float(STEPS), 0
        self._made = [time.monotonic()] * DIGITS
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(messages.socket_address(launch.folder, self.facts.socket))
        self._clients: dict[bytes, zmq.Socket[bytes]] = {}
        self._streams: defaultdict[bytes, dict[str, _Stream]] = defaultdict(dict)
        self._left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadowkv-mock-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._thread.is_alive()

    def has_left(self, client: str) -> None:
        """Aborts all requests of a client whose process is gone."""
        self._left.put(client)

    def shutdown(self) -> None:
        """Stops the engine after the current step."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while not self._stopping.is_set():
            if not any(self._streams.values()):
                self._router.poll(POLL_MS)
                due = time.monotonic()
            elif (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            self._receive()
            if any(self._streams.values()):
                self._step()
                due += 1 / self._steps
        for socket in self._clients.values():
            socket.send(messages.encode(messages.Ended()))
        for socket in (self._router, *self._clients.values()):
            socket.close(linger=0)

    def _step(self) -> None:
        now = time.monotonic()
        self._number += 1
        self._made[self._number % DIGITS] = now
        # A group of ``DIGITS`` tokens encodes the time of the step at which the group began, and groups of different
        # streams begin at different steps. A stream whose current group began p steps ago gets entry p of ``tokens``.
        # The entry is digit p of the time of that group's first step.
        tokens = [
            self._tokens[clock_digits(self._made[(self._number - place) % DIGITS])[place]] for place in range(DIGITS)
        ]
        for client, streams in self._streams.items():
            ended = []
            for name, stream in streams.items():
                output, count = stream.output, self._number - stream.first_step
                output.token_ids, output.completion_tokens = tokens[count % DIGITS], count + 1
                output.times.last_token = now
                if count == 0:
                    output.times.first_token = now
                if count + 1 == stream.max_tokens:
                    output.finish_reason = "length"
                    ended.append(name)
            self._clients[client].send(messages.encode(messages.Step([stream.output for stream in streams.values()])))
            for name in ended:
                del streams[name]

    def _receive(self) -> None:
        while not self._left.empty():
            self._streams.pop(self._left.get().encode(), None)
        while True:
            try:
                client, message = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(client, messages.decode_command(message))

    def _take(self, client: bytes, command: messages.Command) -> None:
        answer: messages.Event | None = None
        if isinstance(command, messages.Add):
            self._add(client, command)
        elif isinstance(command, messages.Abort | messages.Stop):
            self._streams[client].pop(command.request_id, None)
        elif isinstance(command, messages.Greeting):
            self._clients[client] = zmq.Context.instance().socket(zmq.PUSH)
            self._clients[client].set(zmq.SNDHWM, 0)
            self._clients[client].connect(command.address)
        elif isinstance(command, messages.Statistics):
            running = sum(map(len, self._streams.values()))
            answer = messages.reply(command.number, EngineStats(running, 0, {}, FetchCounts(), {}))
        elif isinstance(command, messages.Compile):
            answer = messages.reply(command.number, None)
        elif not isinstance(command, messages.Forget):
            answer = messages.Failure(command.number, "NotDone", "a mock engine keeps nothing")
        if answer is not None:
            self._router.send_multipart([client, messages.encode(answer)])

    def _add(self, client: bytes, add: messages.Add) -> None:
        if add.params.seed is not None:
            self._steps = float(max(1, add.params.seed))
        prompt = len(add.prompt) // messages.ID_BYTES
        output: Any = TokenOutput(add.request_id, [], None, prompt, 0, 0, RequestTimes(add.arrival, time.monotonic()))
        self._streams[client][add.request_id] = _Stream(
            output, self._limits.max_tokens(prompt, add.params), self._number + 1
        )


def load_mock(launch: Launch) -> list[MockEngine]:
    """Makes the mock engine of a process, as ``load_cores`` makes real ones."""
    return [MockEngine(launch)]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), load_mock))
