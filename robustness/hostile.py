"""Sends a live server bodies that are costly by design, and measures how they affect other clients.

For each attack, several clients at a time send the same body, from a separate process. Meanwhile /health is requested
every few milliseconds, and a small chat is requested repeatedly. The figures: the time that /health takes, the
server's resident memory (its own, its engine's, and that of its processes for long bodies), and the time of a small
request.

It starts its own server, with a tiny model:

    python -m robustness.hostile --out benchmarks/results/cpu/hostile.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx

from robustness.live_server import resident_bytes, server_at
from robustness.tiny_model import SERVER, own_server
from shadowkv.eval.provenance import provenance
from shadowkv.serve.http.settings import ServerSettings

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
EVERY = 0.005
"""Seconds between two requests to /health."""
SECONDS = 600
"""Limit for an attack."""
SMALL = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


def body(**parameters: Any) -> bytes:
    return json.dumps(parameters).encode()


def schema(rules: dict[str, Any]) -> bytes:
    """A request for JSON that follows ``rules``."""
    return body(prompt="a", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": rules}})


def strings(count: int, longest: int) -> dict[str, Any]:
    """An object of strings, each with a different length."""
    properties = {f"p{i}": {"type": "string", "maxLength": longest + i} for i in range(count)}
    return {"type": "object", "properties": properties, "required": [*properties]}


def counted_properties(count: int, least: int, most: int) -> dict[str, Any]:
    """An object of some of many properties: compiling it takes longer than anybody waits."""
    properties: dict[str, Any] = {f"p{i}": {} for i in range(count)}
    return {"type": "object", "properties": properties, "minProperties": least, "maxProperties": most}


def references(count: int) -> dict[str, Any]:
    """A chain of references in random order, and a name that cannot have a value."""
    rules = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in Random(0).sample(range(count), count)}
    properties = {"a": {"$ref": "#/$defs/0"}, "b": False}
    return {"properties": properties, "required": ["a", "b"], "$defs": {**rules, str(count): {}}}


ATTACKS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "a small request": (CHAT, lambda size: body(**SMALL)),
    "doubled keys": (TEXT, lambda size: b'{"prompt":"a"' + b',"a":1' * ((size - 20) // 6) + b"}"),
    "many keys": (TEXT, lambda size: body(**dict.fromkeys(map(str, range(size // 14)), 1))),
    "messages of numbers": (CHAT, lambda size: b'{"messages":[' + b"1," * ((size - 20) // 2) + b"1]}"),
    "objects": (TEXT, lambda size: b'{"user":[' + b"{}," * ((size - 40) // 3) + b'1],"prompt":[]}'),
    "stop strings": (TEXT, lambda size: body(prompt="a", stop=["stop"] * (size // 9))),
    "biases": (TEXT, lambda size: body(prompt="a", logit_bias=dict.fromkeys(map(str, range(size // 16)), "x"))),
    "long text": (TEXT, lambda size: body(prompt="word " * (size // 20))),
    "text beyond the limit": (TEXT, lambda size: body(prompt="word " * ((size - 20) // 5))),
    "text of unknown letters": (TEXT, lambda size: '{{"prompt":"{}"}}'.format("💥" * (size // 16)).encode()),
    "long chat": (CHAT, lambda size: body(messages=[{"role": "user", "content": "word " * 200}] * (size // 4096))),
    "tokenize": (TOKENIZE, lambda size: body(prompt="word " * (size // 20))),
    "token ids": (TEXT, lambda size: body(prompt=[100] * (size // 16))),
    "nested": (TEXT, lambda size: b'{"prompt":' + b"[" * (size - 20)),
    "a pattern of many states": (TEXT, lambda size: schema({"type": "string", "pattern": "^([a-z]{1,200}x){1,200}$"})),
    "an ambiguous pattern": (TEXT, lambda size: schema({"type": "string", "pattern": "(.{0,3}a?){0,20}"})),
    "counted properties": (TEXT, lambda size: schema(counted_properties(200, 80, 150))),
    "strings of many lengths": (TEXT, lambda size: schema(strings(200, 100))),
    "strings of few lengths": (TEXT, lambda size: schema(strings(8, 900))),
    "a chain of references": (TEXT, lambda size: schema(references(3_000))),
}
"""By name, where to send which body, of about the given size in bytes."""


def attack(url: str, name: str, size: int, clients: int) -> dict[str, int]:
    """Sends an attack's body from ``clients`` clients at a time; returns how often each status came."""
    path, make = ATTACKS[name]
    content, headers = make(size), {"Content-Type": "application/json"}

    def send(_: int) -> str:
        try:
            return str(httpx.post(url + path, content=content, headers=headers, timeout=SECONDS).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(clients) as threads:
        return dict(Counter(threads.map(send, range(clients))))


class Watch:
    """Measures what other clients see while something is running.

    Args:
        url: the server's.
        under_way: what is running.
    """

    def __init__(self, url: str, under_way: Future[Any]) -> None:
        self._url, self._under_way = url, under_way
        self.health: list[float] = []
        self.small: list[float] = []
        self.memory = Counter[str]()

    def run(self) -> None:
        """Measures until it is over."""
        threads = [threading.Thread(target=measure) for measure in (self._ask_small, self._weigh)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=self._url, timeout=SECONDS) as client:
            while not self._under_way.done() or len(self.health) < 20:
                self.health.append(self._timed(lambda: client.get("/health")))
                time.sleep(EVERY)
        for thread in threads:
            thread.join()

    def _ask_small(self) -> None:
        with httpx.Client(base_url=self._url, timeout=SECONDS) as client:
            while not self._under_way.done() or not self.small:
                self.small.append(self._timed(lambda: client.post(CHAT, json=SMALL)))

    def _weigh(self) -> None:
        server = server_at(self._url)
        while not self.memory or not self._under_way.done():
            self.memory |= resident_bytes(server)
            time.sleep(0.02)

    @staticmethod
    def _timed(ask: Callable[[], httpx.Response]) -> float:
        start = time.perf_counter()
        ask().raise_for_status()
        return time.perf_counter() - start

    def figures(self) -> dict[str, Any]:
        """Milliseconds, MiB (of the server, of its engine, and of its processes for bodies together) and seconds."""
        ranks = statistics.quantiles(self.health, n=100)
        return {
            "health_p50_ms": round(1000 * ranks[49], 1),
            "health_p99_ms": round(1000 * ranks[98], 1),
            "rss_mib": self.memory["http"] >> 20,
            "rss_of_engine_mib": self.memory["engine"] >> 20,
            "rss_of_processes_mib": self.memory["bodies"] >> 20,
            "others_latency_s": round(max(self.small), 3),
        }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=31.9, help="length of the longest bodies (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=6, help="that attack at a time (default: %(default)s)")
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS], metavar="NAME")
    parser.add_argument(
        "--limit-ms", type=float, default=50, help="for /health, 99 of 100 times (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    return parser.parse_args(argv)


def main() -> int:
    """Command line; returns the exit status."""
    args, figures_of = parse(), {}
    memory = f"{'MiB':>7}{'engine':>7}{'bodies':>7}"
    print(f"{'attack':26}{'seconds':>9}{'p50 ms':>9}{'p99 ms':>9}{memory}{'others s':>10}  statuses")
    spawn = multiprocessing.get_context("spawn")
    with (
        own_server(SERVER["kv"], ServerSettings.max_body_mib) as url,
        ProcessPoolExecutor(1, mp_context=spawn) as attackers,
    ):
        attackers.submit(time.sleep, 0).result()
        for name in args.attacks:
            start = time.perf_counter()
            under_way = attackers.submit(attack, url, name, int(args.mib * 2**20), args.clients)
            watch = Watch(url, under_way)
            watch.run()
            seconds, statuses = round(time.perf_counter() - start, 1), under_way.result()
            figures_of[name] = {**watch.figures(), "seconds": seconds, "statuses": statuses}
            columns = "{health_p50_ms:9}{health_p99_ms:9}{rss_mib:7}{rss_of_engine_mib:7}{rss_of_processes_mib:7}"
            columns += "{others_latency_s:10}"
            print(f"{name:26}{seconds:9}{columns.format(**figures_of[name])}  {statuses}", flush=True)
    ok = all(figures["health_p99_ms"] <= args.limit_ms for figures in figures_of.values())
    if args.out:
        summary = {"ok": ok, "mib": args.mib, "clients": args.clients, "attacks": figures_of}
        args.out.write_text(json.dumps(provenance() | summary, indent=1) + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
