"""Sends a live server long texts that are made to cost in tokenising, and measures what others notice.

A dozen clients with one API key send the same text of 7.9 MB at once, from a separate process. Meanwhile another key
asks for the tokens of 75 KB of English, over and over, /health is requested, and the memory of all of the server's
processes is added up. The same, while nobody attacks, comes first; then the server is told to end under attack. It
starts its own servers.

    python -m robustness.hostile_texts --out benchmarks/results/cpu/hostile_texts.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from robustness.live_server import start_server
from shadowkv.eval.provenance import provenance
from shadowkv.serve.bodies.reader import IDLE_SECONDS

AT_ONCE, CHARS = 12, 7_900_000
OTHERS_CHARS = 75_000
MAX_SECONDS, MAX_HEALTH_SECONDS, MAX_MIB, MAX_TO_END = 0.3, 0.3, 100, 12.0
"""What must hold: of the other key's answers and of /health at the 99th percentile, of memory beyond that before and
the bodies themselves, of what is kept of it, and from SIGTERM to the end."""
BODIES_MIB = AT_ONCE * CHARS >> 20
PAUSE = 0.05
"""Seconds between two requests of others."""
SECONDS = 600
"""Limit for a request."""

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
ENGLISH = "The lighthouse stood on the rock. "


def letters() -> str:
    """No blanks, and no two beginnings alike."""
    return "".join(random.Random(0).choices("abcdefgh", k=CHARS))


TEXTS: dict[str, Callable[[], str]] = {
    "spaces": lambda: " " * CHARS,
    "one letter": lambda: "a" * CHARS,
    "letters": letters,
    "emoji": lambda: "\U0001f389" * (CHARS // 4),
    "words": lambda: (ENGLISH * (CHARS // len(ENGLISH) + 1))[:CHARS],
}
ATTACKS = [(COMPLETIONS, name) for name in TEXTS] + [(CHAT, "spaces"), (TOKENIZE, "spaces"), (TOKENIZE, "words")]
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m-instruct": {"max_model_len": 8192},
    "smollm2-135m-64k-chat": {},
}


def attack(url: str, path: str, name: str) -> dict[str, int]:
    """Sends a text from a dozen clients at once; returns how often each status, and type of answer, came."""
    text = TEXTS[name]()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer a"}

    def send(_: int) -> str:
        try:
            answer = httpx.post(url + path, content=content, headers=headers, timeout=SECONDS)
        except httpx.HTTPError as error:
            return type(error).__name__
        return f"{answer.status_code} {answer.headers.get('content-type', '')}"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return dict(Counter(threads.map(send, range(AT_ONCE))))


def resident_mib(server: psutil.Process) -> int:
    """Of the server and all processes that it has started; one that is about to become another program still has the
    server's own memory."""
    total, command = server.memory_info().rss, server.cmdline()
    for process in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss if process.cmdline() != command else 0
    return total >> 20


class Watch:
    """Measures what others notice while something is under way.

    Attributes:
        tokens, health: seconds of each request.
        mib: most memory of all processes together.
    """

    def __init__(self, url: str, server: psutil.Process) -> None:
        self._url, self._server = url, server
        self.tokens: list[float] = []
        self.health: list[float] = []
        self.mib = 0

    def run(self, under_way: Future[Any], least: int) -> None:
        """Measures until it is over, and each ``least`` times."""
        body = {"prompt": (ENGLISH * OTHERS_CHARS)[:OTHERS_CHARS]}
        keys = {"Authorization": "Bearer b"}

        def weigh() -> None:
            while not under_way.done() or not self.mib:
                self.mib = max(self.mib, resident_mib(self._server))
                time.sleep(0.02)

        def ask(seconds: list[float], request: Callable[[httpx.Client], httpx.Response]) -> None:
            with httpx.Client(base_url=self._url, headers=keys, timeout=SECONDS) as client:
                while not under_way.done() or len(seconds) < least:
                    began = time.monotonic()
                    request(client).raise_for_status()
                    seconds.append(time.monotonic() - began)
                    time.sleep(PAUSE)

        threads = [
            threading.Thread(target=weigh),
            threading.Thread(target=ask, args=(self.tokens, lambda client: client.post(TOKENIZE, json=body))),
            threading.Thread(target=ask, args=(self.health, lambda client: client.get("/health"))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def figures(self) -> dict[str, Any]:
        return {
            "other_key_p99_s": round(_p99(self.tokens), 3),
            "health_p99_s": round(_p99(self.health), 3),
            "requests_of_other_key": len(self.tokens),
            "most_mib": self.mib,
        }


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def measure(model: str, flags: dict[str, Any], attackers: ProcessPoolExecutor) -> Iterator[tuple[str, Any]]:
    """Figures of one model and their names, as they come."""
    os.environ["SHADOWKV_API_KEY"] = "a\nb"
    process, url = start_server({"model": model, **flags, "disable_uvicorn_access_log": True})
    with process:
        server = psutil.Process(process.pid)
        try:
            quiet = Watch(url, server)
            quiet.run(attackers.submit(time.sleep, 0), 20)
            before = resident_mib(server)
            yield "without", quiet.figures()
            for path, name in ATTACKS:
                under_way, began = attackers.submit(attack, url, path, name), time.monotonic()
                watch = Watch(url, server)
                watch.run(under_way, 20)
                seconds = round(time.monotonic() - began, 1)
                more = {"more_mib": watch.mib - before, "seconds": seconds, "answers": under_way.result()}
                yield f"{path} {name}", watch.figures() | more
            time.sleep(IDLE_SECONDS + 5)
            yield "mib kept", resident_mib(server) - before
            yield "the end", _end(url, process, attackers)
        finally:
            process.kill()


def _end(url: str, process: subprocess.Popen[str], attackers: ProcessPoolExecutor) -> dict[str, Any]:
    """What those get who are attacking as the server is told to end, and how long that takes."""
    under_way = attackers.submit(attack, url, TOKENIZE, "words")
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.wait(120)
    return {"seconds": round(time.monotonic() - began, 1), "answers": under_way.result()}


def wrong(name: str, figures: Any) -> list[str]:
    """What is not as it must be."""
    if name == "mib kept":
        return [f"{figures} MiB are kept"] if figures > MAX_MIB else []
    found = []
    if name == "the end":
        found += ["it ends late"] if figures["seconds"] > MAX_TO_END else []
    else:
        found += ["the other key waits"] if figures["other_key_p99_s"] > MAX_SECONDS else []
        found += ["/health waits"] if figures["health_p99_s"] > MAX_HEALTH_SECONDS else []
        found += ["memory"] if figures.get("more_mib", 0) > MAX_MIB + BODIES_MIB else []
    for answer in figures.get("answers", {}):
        if "application/json" not in answer or answer.startswith("500"):
            found.append(answer)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="(default: both)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    bad = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as attackers:
        attackers.submit(time.sleep, 0).result()
        for model in args.models:
            figures[model] = {}
            for name, figure in measure(model, MODELS[model], attackers):
                figures[model][name] = figure
                found = wrong(name, figure)
                bad += [f"{model}, {name}: {what}" for what in found]
                print(f"{model:24}{name:34}{json.dumps(figure)}  {', '.join(found)}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({**provenance(), "wrong": bad, **figures}, indent=1) + "\n", encoding="utf-8")
    print("wrong:\n" + "\n".join(bad) if bad else "as it must be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
