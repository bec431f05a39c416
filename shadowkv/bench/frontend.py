"""Measures the HTTP process alone, between a client and a mock engine.

The HTTP process is the real one, with its connection to the engine's process. The mock engine makes tokens at a set
rate, one per stream and step. On two or more cores, client and engine share one core, and the HTTP process has another.
Without ``--rate`` two rates are measured. The first is the highest rate at which nearly every token has its own event.
The second is the rate at which tokens are delivered under overload, when tokens that wait to be sent share an event.

    shadowkv bench frontend --out frontend.json
    shadowkv bench frontend --streams 256 --rate 5000 --api chat
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from shadowkv.bench.client import CompletionClient, Refused
from shadowkv.bench.find_rate import GOOD_SHARE, highest_rate, next_rate
from shadowkv.bench.mock_clock import DIGITS, seconds_since
from shadowkv.bench.server_process import running
from shadowkv.bench.serving_stats import Record, spread
from shadowkv.engine.config import EngineConfig
from shadowkv.eval.provenance import command, commit
from shadowkv.eval.records.predictions import write_json
from shadowkv.settings import POSITIVE, add_flag

PATHS = {"completions": "completions", "chat": "chat/completions"}

ONE_EACH = 1.05
"""Limit on the average number of tokens per event. Up to this limit nearly every token has its own event."""

FIRST_RATE, HIGHEST_RATE, OVERLOAD_RATE = 10_000.0, 80_000.0, 200_000.0
"""Rates in tokens per second: the search's first rate, the highest rate that it tries, and the overload run's rate."""

TRIES = 2

VERSIONS = ("uvicorn", "uvloop", "h11", "msgspec", "tokenizers", "fastapi")

START_SECONDS = 120.0

SHOWN = (
    ("offered", "Offered (tokens/s)", ".0f"),
    ("delivered", "Delivered (tokens/s)", ".0f"),
    ("events", "Events (1/s)", ".0f"),
    ("tokens_per_event", "Tokens per event", ".2f"),
    ("server_cpu", "CPU share of the HTTP process", ".2f"),
    ("us_per_event", "HTTP process CPU time/event (µs)", ".1f"),
    ("us_per_token", "HTTP process CPU time/token (µs)", ".2f"),
    ("median_delay_ms", "Median time from token to client (ms)", ".2f"),
    ("p99_delay_ms", "P99 time from token to client (ms)", ".2f"),
    ("median_ttft_ms", "Median TTFT (ms)", ".2f"),
    ("p99_ttft_ms", "P99 TTFT (ms)", ".2f"),
)


@dataclass
class Window:
    """The measurement window. It begins when all streams have received a token, and ends when the first stream ends.

    Args:
        streams: number of streams.
        server: the HTTP process. Its processor time is read at the window's beginning and end.
    """

    streams: int
    server: psutil.Process
    begin: float = 0.0
    end: float = 0.0
    tokens: int = 0
    events: int = 0
    cpu: float = 0.0
    delays: list[float] = field(default_factory=list)
    _begun: int = 0

    def begin_stream(self) -> None:
        """Counts a stream that has received its first token."""
        self._begun += 1
        if self._begun == self.streams:
            self.begin, self.cpu = time.perf_counter(), _cpu(self.server)

    def end_stream(self) -> None:
        """Ends the window when a stream has received its last token."""
        if not self.end:
            self.end, self.cpu = time.perf_counter(), _cpu(self.server) - self.cpu

    def take(self, tokens: int, delays: list[float]) -> None:
        """Counts an event, with its number of tokens and its ``delays`` in seconds, if it arrives within the window."""
        if self.begin and not self.end:
            self.tokens += tokens
            self.events += 1
            self.delays += delays


class Stream:
    """Reads the events of one answer of a stream. Each character is a token. Every group of ``DIGITS`` characters
    encodes the time at which the group's first character was made.

    Args:
        window: the measurement window.
        first: whether the answer is the stream's first.
        last: whether the answer is the stream's last.
    """

    def __init__(self, window: Window, first: bool, last: bool) -> None:
        self._window, self._first, self._last = window, first, last
        self._partial, self._came = "", 0.0

    def take(self, event: dict[str, Any], when: float) -> None:
        """Reads an event that arrived at ``when``."""
        for choice in event["choices"]:
            text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if choice["finish_reason"] is not None and self._last:
                self._window.end_stream()
            if text:
                if self._first:
                    self._first = False
                    self._window.begin_stream()
                self._window.take(len(text), self._delays(text, when))

    def _delays(self, text: str, when: float) -> list[float]:
        delays = []
        while text:
            if not self._partial:
                self._came = when
            missing = DIGITS - len(self._partial)
            self._partial, text = self._partial + text[:missing], text[missing:]
            if len(self._partial) == DIGITS:
                delays.append(seconds_since(self._partial, self._came))
                self._partial = ""
        return delays


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def body(args: argparse.Namespace, tokens: int, steps: int) -> bytes:
    """Returns the JSON of a request for ``tokens`` tokens, of which the engine makes ``steps`` per second."""
    text = {"messages": [{"role": "user", "content": "x" * args.input_len}]}
    ids = {"prompt": [97] * args.input_len}
    about = {"max_tokens": tokens, "ignore_eos": True, "seed": steps, "stream": True, "temperature": 0.0}
    usage = {"stream_options": {"include_usage": True}}
    return json.dumps({**(text if args.api == "chat" else ids), **about, **usage}, separators=(",", ":")).encode()


async def run_once(client: CompletionClient, args: argparse.Namespace, rate: float, server: int) -> dict[str, Any]:
    """Measures ``--streams`` streams, which together get ``rate`` tokens per second. ``server`` is the id of the HTTP
    process."""
    steps = max(1, round(rate / args.streams))
    each = max(DIGITS, round(steps * args.seconds))
    tokens = min(each, args.tokens or each)
    answers, window = -(-each // tokens), Window(args.streams, psutil.Process(server))
    records: list[Record] = []

    async def ask(stream: int) -> None:
        for answer, request in enumerate(requests[stream]):
            record = Record(0.0, args.input_len)
            records.append(record)
            reader = Stream(window, answer == 0, answer == len(requests[stream]) - 1)
            await client.stream(request, record, reader.take)

    lengths = [[tokens] * answers for _ in range(args.streams)]
    if answers > 1:  # first answers differ in length, so that streams do not send later requests at the same time
        for stream, answer_lengths in enumerate(lengths):
            answer_lengths[0] = max(1, tokens * (stream + 1) // args.streams)
    requests = [[body(args, length, steps) for length in answer_lengths] for answer_lengths in lengths]
    gc.collect()
    gc.freeze()
    await asyncio.gather(*map(ask, range(args.streams)))
    gc.unfreeze()
    seconds = window.end - window.begin
    if not window.begin or seconds <= 0 or not window.delays:
        raise Refused("the first stream ended before the last one began: use a larger --seconds")
    if sum(record.output_tokens for record in records) != sum(map(sum, lengths)):
        raise Refused("tokens are missing")
    return {
        "rate": rate,
        "answers": len(records),
        "seconds": seconds,
        "offered": steps * args.streams,
        "delivered": window.tokens / seconds,
        "events": window.events / seconds,
        "tokens_per_event": window.tokens / window.events,
        "server_cpu": window.cpu / seconds,
        "us_per_event": 1e6 * window.cpu / window.events,
        "us_per_token": 1e6 * window.cpu / window.tokens,
        **spread("delay", window.delays),
        **spread("ttft", [record.chunks[0] - record.sent for record in records]),
    }


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A context with the HTTP process and a mock engine. Yields the URL of the API and the id of the HTTP process.
    Raises Refused if the process does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = ["--model", args.model, "--load-format", args.load_format, "--port", str(port)]
    limits = ["--max-queued-seqs", str(2 * args.streams), "--disable-uvicorn-access-log"]
    started, url = [sys.executable, "-m", "shadowkv.bench.mock_server", *given, *limits], f"http://127.0.0.1:{port}/v1"
    with TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            process = stack.enter_context(running(started, url, Path(folder) / "server.log", {}, START_SECONDS))
        except RuntimeError as error:
            raise Refused(str(error)) from None
        yield url, process.pid


@contextmanager
def pinned(http: int) -> Iterator[list[int]]:
    """A context in which the HTTP process has one core, and its engine and this process share another. Yields the
    numbers of the two cores. If there is only one core, or processes cannot be pinned, the list is empty."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        yield []
        return
    server, own = psutil.Process(http), psutil.Process()
    for process, core in ((server, cores[0]), (own, cores[1]), *((engine, cores[1]) for engine in server.children())):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    try:
        yield cores[:2]
    finally:
        for thread in own.threads():
            os.sched_setaffinity(thread.id, cores)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark and returns the content of the result file. Raises Refused if nothing could be measured,
    ValueError for wrong flags."""
    for name in ("streams", "rate", "tokens", "seconds", "input_len"):
        if (value := getattr(args, name)) is not None and not POSITIVE.holds(value):
            raise ValueError(f"--{name.replace('_', '-')} {value} {POSITIVE.rule}")
    with server(args) as (url, http), pinned(http) as cores:

        def once(rate: float) -> dict[str, Any]:
            async def run() -> dict[str, Any]:
                client = CompletionClient(url, path=PATHS[args.api])
                try:
                    return await run_once(client, args, rate, http)
                finally:
                    client.close()

            measured = asyncio.run(run())
            print(
                f"{rate:g} tokens/s: {measured['delivered']:.0f} delivered, "
                f"{measured['tokens_per_event']:.3f} per event",
                file=sys.stderr,
                flush=True,
            )
            return measured

        once(FIRST_RATE)  # warm-up
        runs = {"at_rate": once(args.rate)} if args.rate else {"paced": search(once), "overload": once(OVERLOAD_RATE)}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS if find_spec(name)},
        "cores": cores,
        **{name: getattr(args, name) for name in ("model", "api", "streams", "input_len", "tokens", "seconds")},
        **runs,
    }


def search(once: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """Searches for the highest rate at which nearly every token has its own event. Returns the run at that rate. Raises
    Refused if there is no such rate.

    A rate counts as too high only after two tries, since something else may have used the core for a moment.
    """
    runs: dict[float, dict[str, Any]] = {}
    shares: dict[float, float] = {}
    while (rate := next_rate(shares, FIRST_RATE, HIGHEST_RATE)) is not None:
        for _ in range(TRIES):
            runs[rate] = once(rate)
            if runs[rate]["tokens_per_event"] <= ONE_EACH:
                break
        shares[rate] = GOOD_SHARE * (runs[rate]["tokens_per_event"] <= ONE_EACH)
    best = highest_rate(shares)
    if best is None:
        raise Refused("tokens share events at every rate")
    return runs[best]


def report(result: dict[str, Any]) -> str:
    """Returns the result as a table."""
    runs = {name: result[name] for name in ("at_rate", "paced", "overload") if name in result}
    lines = [f"{'':36}" + "".join(f"{name:>12}" for name in runs)]
    lines += [f"{text:36}" + "".join(f"{run[name]:>12{form}}" for run in runs.values()) for name, text, form in SHOWN]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag."""
    add = parser.add_argument
    add("--streams", type=int, default=256, help="number of concurrent streams (default: %(default)s)")
    add(
        "--rate",
        type=float,
        help="tokens per second of all streams (default: search for the highest rate with one event per token, then "
        "measure overload)",
    )
    text = "length of an answer in tokens; after it a stream sends its next request (default: one answer fills the run)"
    add("--tokens", type=int, help=text)
    add("--seconds", type=float, default=5.0, help="duration of a run (default: %(default)s)")
    add("--input-len", type=int, default=16, help="length of a prompt in tokens (default: %(default)s)")
    add("--api", choices=PATHS, default="completions", help="endpoint that streams use (default: %(default)s)")
    add_flag(parser, EngineConfig, "model", default="llama-3.1-8b", help="model whose tokenizer is used")
    text = "format of the model; with dummy, each byte is a token"
    add_flag(parser, EngineConfig, "load_format", default="dummy", help=text)
    add("--out", type=Path, metavar="FILE", help="file to write the figures to, as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit status."""
    try:
        result = measure(args)
    except (OSError, ValueError, Refused, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted'}", file=sys.stderr)
        return 2
    print(report(result))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, result)
    return 0
