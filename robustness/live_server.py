"""A live server in a process that must end when told to, and clients whose greedy requests must get their answers.

Answers come whole, streamed and as a chat's turns, and are compared with those that are expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import psutil

LONGEST_ANSWER, TURN_TOKENS = 128, 16
STOP_SECONDS = 60


def start_server(
    values: dict[str, Any], temporary: Path | None = None, log: IO[str] | None = None
) -> tuple[subprocess.Popen[str], str]:
    """A server with these flags (True: one without a value) that is ready, and its URL; raises SystemExit if it does
    not start. Its temporary files are in ``temporary`` if that is given, and its log goes to ``log`` or stderr."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in values.items()]
    command = [sys.executable, "-m", "shadowkv.serve", "--port=0", *flags]
    # Tiny tensors gain nothing from a second thread. In a separate session: Ctrl-C is for this process.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"TMPDIR": str(temporary)} if temporary else {})}
    options: dict[str, Any] = {"env": environment, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, **options)
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
    except BaseException:
        process.kill()
        raise
    if ready is None:
        process.wait()
        raise SystemExit("the server did not start")
    return process, ready.split()[1].removesuffix("/v1")


def stop_server(process: subprocess.Popen[str]) -> None:
    """Tells a server to end; raises SystemExit if it does not end properly."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"the server ended with {process.returncode}")


def kill_server(process: subprocess.Popen[str]) -> None:
    """Kills all of a server's processes at once, the engine's first: that one would end properly if it were left."""
    for one in (*psutil.Process(process.pid).children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def server_at(url: str) -> psutil.Process:
    """The process that clients of this machine's server talk to; raises SystemExit if there is none."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    raise SystemExit(f"no process of this user listens at {url}")


def resident_bytes(server: psutil.Process) -> dict[str, int]:
    """Resident memory of a server: of the process that clients talk to (``http``), of its ``engine``'s, those of
    grammars among them, and of those for long ``bodies``. What processes share counts once."""
    found = {"http": _own_share(server), "engine": 0, "bodies": 0}
    for child in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it was replaced
            bodies = "shadowkv.serve.bodies.reader_process" in child.cmdline()
            found["bodies" if bodies else "engine"] += _own_share(child)
    return found


def _own_share(process: psutil.Process) -> int:
    """What no other process has, and its share of the rest, where the platform tells that; else all it has."""
    memory = process.memory_full_info()
    return getattr(memory, "pss", memory.rss)


@dataclass
class Answer:
    """The answer to one greedy request."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any], skip: int = 0) -> None:
        """Adds a choice, or a part of it, without its first ``skip`` tokens."""
        part = choice.get("logprobs") or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        self.tokens += part["tokens"][skip:]
        self.logprobs += part["token_logprobs"][skip:]
        self.top += part["top_logprobs"][skip:]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    @classmethod
    def of_chat(cls, choice: dict[str, Any]) -> Answer:
        """The answer in a chat completion's choice."""
        steps = choice["logprobs"]["content"]
        top = [{other["token"]: other["logprob"] for other in step["top_logprobs"]} for step in steps]
        return cls([step["token"] for step in steps], [step["logprob"] for step in steps], top, choice["finish_reason"])


def compare(expected: Answer, answer: Answer, tolerance: float) -> tuple[str, float]:
    """Whether an answer is the "same" as expected, one of two "near-ties", or "wrong"; and by how much
    log-probabilities differ before the first different token.

    Equal ones are within ``tolerance``; where two tokens were that close, rounding may have chosen the other one.
    """
    difference, verdict = 0.0, "same" if len(answer.tokens) == len(expected.tokens) else "wrong"
    for token, expected_token, top, logprob, expected_logprob in zip(
        answer.tokens, expected.tokens, expected.top, answer.logprobs, expected.logprobs, strict=False
    ):
        if token != expected_token:
            # Both may be off by the tolerance, so tokens that swap places may be twice that apart.
            close = expected_logprob - top.get(token, float("-inf")) < 2 * tolerance
            verdict = "near-ties" if close else "wrong"
            break
        difference = max(difference, abs(logprob - expected_logprob))
    return "wrong" if difference > tolerance else verdict, difference


@dataclass
class Turn:
    """What a chat has said so far, how many of its tokens the server had cached, and the answer."""

    messages: list[dict[str, str]]
    cached: int
    answer: Answer


class Lost(Exception):
    """A good request without a good answer, or a bad one with one."""


@dataclass
class SoakClient:
    """One run's connection to the server; ``limit`` and ``tokens`` are the server's longest context and some tokens.

    Args:
        client: talks to the server.
        args: the command line's.
    """

    client: httpx.AsyncClient
    args: argparse.Namespace
    counts: Counter[str] = field(default_factory=Counter)
    random: random.Random = field(default_factory=random.Random)
    limit: int = 0
    tokens: list[int] = field(default_factory=list)

    def prompt(self, share: float, answer: int) -> list[int]:
        """Token ids of a prompt, from 1 token (0) to the most that the context has room for beside the answer (1)."""
        longest = min(self.limit - answer, len(self.tokens))
        length = max(1, round(longest**share))
        begin = self.random.randrange(len(self.tokens) - length + 1)
        return self.tokens[begin : begin + length]

    def greedy(self, share: float) -> dict[str, Any]:
        """A request with a prompt from ``prompt`` and an answer of any length."""
        answer = round(LONGEST_ANSWER ** self.random.random())
        return self.body(self.prompt(share, answer), max_tokens=answer)

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """A greedy request."""
        return {"prompt": prompt, "temperature": 0, "logprobs": 5, **more}

    async def whole(self, body: dict[str, Any]) -> tuple[int, Answer]:
        """How many of its tokens were cached, and the answer to one request, in one piece."""
        answer, reply = Answer(), await self.post("/v1/completions", body)
        answer.add(reply["choices"][0])
        return cached_tokens(reply), answer

    async def turn(self, messages: list[dict[str, str]], **more: Any) -> Turn:
        """A chat's next turn."""
        options = {"max_tokens": TURN_TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": 5, **more}
        reply = await self.post("/v1/chat/completions", {"messages": messages, **options})
        return Turn(messages, cached_tokens(reply), Answer.of_chat(reply["choices"][0]))

    async def fresh_turn(self, messages: list[dict[str, str]]) -> Turn:
        """The same with nothing cached: with echo, the prompt's own tokens are scored, so all of it is computed."""
        prompt = (await self.post("/tokenize", {"messages": messages}))["tokens"]
        body, answer = self.body(prompt, echo=True, max_tokens=TURN_TOKENS), Answer()
        answer.add((await self.post("/v1/completions", body))["choices"][0], skip=len(prompt))
        return Turn(messages, 0, answer)

    async def streamed(self, body: dict[str, Any]) -> tuple[int, Answer] | None:
        """The same, piece by piece; None if the queue was full, which a stream may notice late."""
        cached, answer = 0, Answer()
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.open("/v1/completions", body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return cached, answer
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" not in event and event["usage"]:
                        cached = cached_tokens(event)
                    elif "error" not in event:
                        answer.add(event["choices"][0])
                    elif event["error"]["code"] == "queue_full" and not answer.tokens:
                        return None
                    else:
                        raise Lost(event["error"]["message"])
        raise Lost("the stream ended without [DONE]")

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """An answer's body."""
        async with self.open(path, body) as response:
            await response.aread()
            return response.json()

    @asynccontextmanager
    async def open(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """A good answer, still to be read; retries while the queue is full."""
        while True:
            async with self.client.stream("POST", path, json=body) as response:
                if response.status_code == 200:
                    yield response
                    return
                text = (await response.aread()).decode()
            if response.status_code != 503 or "retry-after" not in response.headers:
                raise Lost(f"{response.status_code}: {text[:200]}")
            self.counts["queue full"] += 1
            await asyncio.sleep(float(response.headers["retry-after"]))

    async def gauge(self, name: str) -> float:
        """A number from /metrics, summed over its labels."""
        page = (await self.client.get("/metrics")).text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        if not values:
            raise SystemExit(f"/metrics has no {name}")
        return sum(map(float, values))


def cached_tokens(reply: dict[str, Any]) -> int:
    """How many of a prompt's tokens were cached."""
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
