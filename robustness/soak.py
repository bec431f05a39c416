"""Mixed load on a live server on this machine: nothing lost, nothing wrong, nothing left over; stops by itself.

Good requests (whole and streamed, 1 token to the limit, chats of several turns), clients that hang up, and hostile ones
(bad and giant bodies, half requests, silence, streams that are not read), in random order; the load comes and goes, so
that queues fill up and cached sequences survive. /health is requested meanwhile, and the summary says how long it took.
Greedy answers must be those that the same requests get alone with the same number of cached tokens (prompts before the
load, turns of chats after it): log-probabilities within ``--tolerance``. Where two tokens were that close, rounding may
choose the other one, which is counted as a near-tie.

    python -m robustness.soak                # starts its own server, with a tiny model
    python -m robustness.soak --base-url http://127.0.0.1:8000 --tolerance 0.1 --requests 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from robustness.live_server import Answer, Lost, SoakClient, Turn, compare, resident_bytes, server_at
from robustness.tiny_model import SERVER, SLOTS, own_server
from shadowkv.eval.provenance import provenance

WEIGHTS = {"whole": 33, "stream": 28, "hang up": 10, "bad": 9, "chat": 8}
WEIGHTS |= {"slow reader": 3, "silent": 2, "half header": 2, "half body": 2, "giant body": 3}
TURNS = 3
FILLING_ANSWER = 200
"""Answer length when every slot is filled: longer ones would need more fitted states than there are."""
FILLING_SECONDS = 120
"""In which every slot must have been filled at once."""
TIDE = 250
"""Requests between high tide, when every client works, and low tide, when every fourth one does."""
MAX_FAULTS = 100
"""Reported faults: the first ones are informative enough."""
WORDS = ("the", "of", "rain", "stone", "key", "seven", "river", "old", "paper", "green", "music", "window", "glass")

RETRY_SECONDS = 2
HEALTH_SECONDS = 0.05
"""Between two requests of /health."""

HOLD_SECONDS = 3.0
"""The longest that a connection is held without sending; half as long again without reading."""

RECEIVE_BUFFER = 4096
"""Bytes that the system buffers for a client that does not read."""

BAD_PARAMETERS: tuple[tuple[str, Any], ...] = (
    *(("temperature", "hot"), ("max_tokens", -1), ("max_tokens", 10**9), ("n", 0), ("stop", 5), ("top_p", 2)),
    *(("logit_bias", {"x": 1}), ("logprobs", 1000), ("prompt", {}), ("grammar", "x")),
)


class HostileClients(SoakClient):
    """Clients that are hostile or broken, a behaviour per method: bad and giant bodies, half requests, no reading.

    Each is over in seconds, whatever the server does. It is a fault if a server answers one of them as if it were a
    good one.
    """

    async def do_bad(self) -> None:
        good = json.dumps(self.body([1, 2, 3]))
        bodies: list[tuple[str | bytes, tuple[int, ...]]] = [
            (good[: self.random.randrange(len(good))], (400,)),
            (self.random.randbytes(self.random.randrange(200)), (400,)),
            ("[" * self.random.randrange(1, 10_000), (400,)),
            (json.dumps({**self.body([1]), "model": "no such model"}), (404,)),
            *((json.dumps({**self.body([1]), name: value}), (400,)) for name, value in BAD_PARAMETERS),
            (json.dumps(self.body([1] * (self.limit + self.random.randrange(1, 50)))), (400,)),
            (json.dumps(self.body([2**31])), (400,)),
        ]
        content, status = self.random.choice(bodies)
        path = self.random.choice(["/v1/completions", "/v1/chat/completions"])
        response = await self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        if response.status_code not in (*status, 400) or not set(error) >= {"message", "type", "param", "code"}:
            raise Lost(f"{response.status_code} for {content[:80]!r}: {error}")

    async def do_giant_body(self) -> None:
        limit = int(self.args.max_body_mib * 2**20)
        too_long = self.random.random() < 0.5
        content = json.dumps(self.body([1], max_tokens=1)).encode().ljust(limit + too_long)
        headers = {"Content-Type": "application/json"}
        response = await self.client.post("/v1/completions", content=content, headers=headers)
        busy = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code != (413 if too_long else 200) and not busy:
            raise Lost(f"{response.status_code} for a body of {len(content)} bytes: {response.text[:200]}")

    async def do_silent(self) -> None:
        await self.hold(b"")

    async def do_half_header(self) -> None:
        request = self.raw_request(self.body([1]))
        await self.hold(request[: self.random.randrange(1, request.index(b"\r\n\r\n"))])

    async def do_half_body(self) -> None:
        request = self.raw_request(self.body([1]))
        await self.hold(request[: self.random.randrange(request.index(b"\r\n\r\n") + 4, len(request))])

    async def do_slow_reader(self) -> None:
        """A long stream that is never read."""
        body = self.body(self.prompt(self.random.random(), 1), ignore_eos=True, stream=True)
        body["max_tokens"] = self.limit - len(body["prompt"])
        async with self.connection(self.raw_request(body)) as connection:
            await asyncio.sleep(self.random.uniform(HOLD_SECONDS / 2, 1.5 * HOLD_SECONDS))
            try:
                while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 2**16), 0.1):
                    pass
            except ConnectionResetError:
                self.counts["slow readers cut off"] += 1
            except asyncio.TimeoutError:
                pass

    async def hold(self, request: bytes) -> None:
        """Sends part of a request and waits; if the server answers meanwhile, it must not be a good answer."""
        async with self.connection(request) as connection:
            receive = asyncio.get_running_loop().sock_recv(connection, 2**16)
            try:
                answer = await asyncio.wait_for(receive, self.random.uniform(0, HOLD_SECONDS))
            except (asyncio.TimeoutError, ConnectionResetError):
                return
        self.counts["half requests cut off"] += 1
        if answer and answer.split()[1] not in (b"408", b"503"):
            raise Lost(f"half a request got {answer[:200]!r}")

    def raw_request(self, body: dict[str, Any]) -> bytes:
        """A request for a completion, as raw bytes."""
        content = json.dumps(body).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.client.base_url.host}\r\n"
            f"Authorization: Bearer {self.args.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content

    @asynccontextmanager
    async def connection(self, request: bytes) -> AsyncIterator[socket.socket]:
        """A new connection that has sent the request, and reads nothing by itself."""
        loop, url = asyncio.get_running_loop(), self.client.base_url
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            connection.setblocking(False)
            await loop.sock_connect(connection, (url.host, url.port))
            await loop.sock_sendall(connection, request)
            yield connection


class HealthProbe:
    """Requests /health repeatedly, on its own thread and connection, while its context is open.

    Args:
        url: the server's.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._seconds: list[float] = []
        self.faults: list[str] = []

    def summary(self) -> dict[str, float]:
        """Latencies in milliseconds."""
        ordered = sorted(self._seconds) or [float("nan")]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            f"health {name} ms": round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1)
            for name, share in shares.items()
        }

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.wait(HEALTH_SECONDS):
                start = time.monotonic()
                try:
                    response = client.get("/health")
                except httpx.HTTPError as error:
                    self.faults.append(f"health: {type(error).__name__}: {error}")
                else:
                    self._seconds.append(time.monotonic() - start)
                    if response.status_code != 200:
                        self.faults.append(f"health: {response.status_code}: {response.text[:200]}")

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Soak(HostileClients):
    """One run."""

    faults: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    chats: list[list[Turn]] = field(default_factory=list)
    largest_difference: float = 0.0
    begun: int = 0
    stopped: bool = False

    async def run(self) -> dict[str, Any]:
        """The summary."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        self.random = random.Random(self.args.seed)
        model = (await self.client.get("/v1/models")).json()["data"][0]
        self.limit = model["max_model_len"]
        text = " ".join(self.random.choice(WORDS) for _ in range(self.limit))
        self.tokens = (await self.post("/tokenize", {"prompt": text}))["tokens"]
        self.asked = [self.greedy(share / (self.args.prompts - 1)) for share in range(self.args.prompts)]
        # The second time, the first one's tokens are cached; what is compressed is then answered from its codes.
        self.alone = [dict([await self.whole(body), await self.whole(body)]) for body in self.asked]
        self.start, self.server = time.monotonic(), server_at(str(self.client.base_url))
        await self.sample()
        with HealthProbe(str(self.client.base_url)) as probe:
            await asyncio.gather(*(self.work(number) for number in range(self.args.concurrency)))
        self.faults += probe.faults
        seconds = time.monotonic() - self.start
        left = await self.left_over()
        for chat in self.chats:
            await self.replay(chat)
        pools = {} if self.args.base_url else await self.fill_and_empty()
        await self.sample()
        return self.summary(seconds, left, pools) | probe.summary()

    def stop(self, number: int) -> None:
        """Lets running requests finish; a second signal does not."""
        asyncio.get_running_loop().remove_signal_handler(number)
        self.stopped = True

    # -- clients ---------------------------------------------------------------------------------------------------

    async def work(self, number: int) -> None:
        """One client: requests one after another until there have been enough, or time is up."""
        while self.begun < self.args.requests and not self.stopped:
            if time.monotonic() > self.start + self.args.seconds or len(self.faults) >= MAX_FAULTS:
                break
            if number % 4 and self.begun // TIDE % 2:
                await asyncio.sleep(0.1)
                continue
            self.begun += 1
            if self.begun % max(1, self.args.requests // 40) == 0:
                self.progress(self.begun)
                await self.sample()
            (kind,) = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])
            self.counts[kind] += 1
            try:
                await getattr(self, f"do_{kind.replace(' ', '_')}")()
            except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
                self.faults.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    async def do_whole(self) -> None:
        which = self.random.randrange(len(self.asked))
        self.compare_as_cached(self.alone[which], *await self.whole(self.asked[which]))

    async def do_stream(self) -> None:
        which = self.random.randrange(len(self.asked))
        while (answer := await self.streamed(self.asked[which])) is None:
            self.counts["queue full in a stream"] += 1
            await asyncio.sleep(RETRY_SECONDS)
        self.compare_as_cached(self.alone[which], *answer)

    async def do_hang_up(self) -> None:
        body = self.body(self.prompt(self.random.random(), 1), ignore_eos=True, stream=self.random.random() < 0.5)
        body["max_tokens"] = self.limit - len(body["prompt"])
        try:
            await asyncio.wait_for(self.client.post("/v1/completions", json=body), self.random.random() ** 2)
        except asyncio.TimeoutError:
            self.counts["hung up"] += 1

    async def do_chat(self) -> None:
        turns: list[Turn] = []
        messages: list[dict[str, str]] = []
        for number in range(TURNS):
            said = " ".join(self.random.choices(WORDS, k=self.random.randrange(1, 40)))
            messages = [*messages, {"role": "user", "content": f"Turn {number} {self.random.random()}: {said}"}]
            turns.append(await self.turn(messages))
            self.counts["cached tokens"] += turns[-1].cached
            messages = [*messages, {"role": "assistant", "content": "".join(turns[-1].answer.tokens)}]
        self.chats.append(turns)

    async def replay(self, chat: list[Turn]) -> None:
        """Repeats a chat alone; turns that were computed fresh are again, and the others follow their earlier turn."""
        for turn in chat:
            try:
                again = await (self.turn if turn.cached else self.fresh_turn)(turn.messages)
                self.compare_as_cached({again.cached: again.answer}, turn.cached, turn.answer)
            except (Lost, httpx.HTTPError, ValueError, KeyError) as error:
                self.faults.append(f"replayed chat: {type(error).__name__}: {error}"[:300])

    # -- judgement -------------------------------------------------------------------------------------------------

    def compare_as_cached(self, alone: dict[int, Answer], cached: int, answer: Answer) -> None:
        """Compares an answer with the one that had the same number of cached tokens."""
        if cached in alone:
            self.compare(alone[cached], answer)
        else:
            self.counts["cached otherwise"] += 1

    def compare(self, expected: Answer, answer: Answer) -> None:
        """Counts an answer as the same as expected, as a near-tie, or as wrong."""
        if answer.finish_reason is None or len(answer.tokens) != len(answer.logprobs):
            raise Lost("the answer is not whole")
        verdict, difference = compare(expected, answer, self.args.tolerance)
        self.largest_difference = max(self.largest_difference, difference)
        self.counts[verdict] += 1
        if verdict == "wrong":
            texts = "".join(answer.tokens), "".join(expected.tokens)
            self.faults.append("wrong by {:.4f}: {!r} for {!r}".format(difference, *texts)[:300])

    async def sample(self) -> None:
        """Records the server's resident memory, without the processes for long bodies."""
        of = resident_bytes(self.server)
        mib = (of["http"] + of["engine"]) / 2**20
        self.memory.append((round(time.monotonic() - self.start), round(mib)))

    async def left_over(self) -> int:
        """Requests that the server still has, after a rest."""
        for _ in range(60):
            left = await self.gauge("shadowkv:num_requests_running") + await self.gauge("shadowkv:num_requests_waiting")
            if not left:
                break
            await asyncio.sleep(0.5)
        return int(left)

    async def fill_and_empty(self) -> dict[str, int]:
        """Sequences that run when every slot is wanted at once, and bytes of the KV cache in use when they are gone.

        They leave no room for finished sequences and are not kept themselves, so whatever is left then has leaked. On a
        slow machine the first answer may be over before the last one has begun: as many clients ask again until all are
        seen to run.
        """
        body = self.body([1], max_tokens=FILLING_ANSWER, ignore_eos=True, stream=True, cache_prompt=False)
        running, end = 0, time.monotonic() + FILLING_SECONDS

        async def ask() -> None:
            while running < SLOTS and time.monotonic() < end:
                async with self.open("/v1/completions", body) as response:
                    lines = response.aiter_lines()
                    while running < SLOTS and await anext(lines, None) is not None:
                        pass

        clients = asyncio.gather(*(ask() for _ in range(SLOTS)))
        while not clients.done() and running < SLOTS:
            running = max(running, int(await self.gauge("shadowkv:num_requests_running")))
        await clients
        await self.left_over()
        return {"sequences at once": running, "bytes left": int(await self.gauge("shadowkv:kv_cache_used_bytes"))}

    # -- report ----------------------------------------------------------------------------------------------------

    def progress(self, begun: int) -> None:
        passed = time.monotonic() - self.start
        left = passed / begun * (self.args.requests - begun)
        done = f"{begun} of {self.args.requests} requests, {len(self.faults)} faults"
        print(f"{done}, {passed:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)

    def summary(self, seconds: float, left: int, pools: dict[str, int]) -> dict[str, Any]:
        """All figures, and whether the run passed."""
        mib = [size for _, size in self.memory]
        early, late = max(mib[: len(mib) // 2 + 1]), mib[-1]
        flat = late <= 1.03 * early + 16
        empty = pools in ({}, {"sequences at once": SLOTS, "bytes left": 0})
        wrong, enough = self.counts["wrong"], self.begun >= self.args.requests
        return {
            "ok": not self.faults and not left and flat and empty and enough,
            "requests": self.begun,
            "seconds": round(seconds, 1),
            "kinds": {kind: self.counts[kind] for kind in WEIGHTS},
            "hung up before the answer": self.counts["hung up"],
            **{name: self.counts[name] for name in ("half requests cut off", "slow readers cut off")},
            "lost": len(self.faults) - wrong,
            "wrong": wrong,
            "same": self.counts["same"],
            "near-ties": self.counts["near-ties"],
            "largest difference in log-probability": self.largest_difference,
            "tolerance": self.args.tolerance,
            "queue full": self.counts["queue full"],
            "queue full in a stream": self.counts["queue full in a stream"],
            "chat tokens cached": self.counts["cached tokens"],
            "cached otherwise, not compared": self.counts["cached otherwise"],
            "requests left over": left,
            "KV cache": pools,
            "memory": {"first MiB": mib[0], "half-way MiB": early, "last MiB": late, "flat": flat},
            "memory over time, s and MiB": self.memory,
            "server": self.args.base_url or {**SERVER, "kv": self.args.kv, "max_body_mib": self.args.max_body_mib},
        }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="server on 127.0.0.1 (default: starts its own)")
    parser.add_argument("--kv", default=SERVER["kv"], help="policy of its own server (default: %(default)s)")
    text = "longest body that the server takes (default: %(default)s)"
    parser.add_argument("--max-body-mib", type=float, default=1.0, help=text)
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="clients (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="different greedy requests (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities (default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary there, as JSON")
    args = parser.parse_args(argv)
    if args.base_url and urlsplit(args.base_url).hostname != "127.0.0.1":
        parser.error("--base-url must be on 127.0.0.1: this is a load test")
    if min(args.requests, args.concurrency, args.prompts - 1, args.seconds, args.tolerance) <= 0:
        parser.error("numbers must be positive, and --prompts at least 2")
    return args


def main() -> int:
    """Command line; returns the exit status."""
    args = parse()

    async def run(url: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {args.api_key}"}
        limits = httpx.Limits(max_connections=args.concurrency + SLOTS)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
            soak = Soak(client, args)
            summary = await soak.run()
        for fault in soak.faults[:20]:
            print(fault)
        return summary

    with nullcontext(args.base_url) if args.base_url else own_server(args.kv, args.max_body_mib) as url:
        summary = asyncio.run(run(url))
    for name, value in summary.items():
        print(f"{name:38} {value}")
    if args.out:
        args.out.write_text(json.dumps(provenance() | summary, indent=1) + "\n", encoding="utf-8")
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
