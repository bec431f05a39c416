"""Asks a live server as one client among many: what another client's flood of prompts, or grammars that take forever to
match, do to a short question.

``flood``: 200 prompts of one API key at once, of which 48 run, and questions of another key, one after another. A
question may have its first token after what it takes alone, two decode steps and a block of a prompt, by the 99th
percentile of each. Steps beside prompts are as long as a gap between tokens may be: 250 ms in a burst.

``grammars``: twelve requests at once whose grammars compile quickly and take seconds a token, again and again, and
chats of four tokens of another key. These may take 1.2 times as long as without, and the server ends within 12 seconds
of SIGTERM meanwhile. How long they take beside two processes that only count, at the lowest priority, is shown as well:
where cores are few, no work on grammars could cost less.

    python -m robustness.neighbours --out benchmarks/results/cpu/neighbours.json
    python -m robustness.neighbours --block-tokens 8192 -- --model llama-3.1-8b --load-format dummy
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx

from shadowkv.eval.provenance import provenance

SECONDS = 900
"""Limit for a request."""
PROMPTS, ANSWER_TOKENS = 200, 64
QUESTION_TOKENS = 12
GRAMMARS = 12
MAX_RATIO, MAX_TO_END = 1.2, 12.0
COUNT = "import os\nos.nice(19)\nwhile True: pass"
VOCABULARY = 250
"""Token ids of prompts: any model has these."""


def hostile_grammar(number: int) -> str:
    """A grammar that nobody has asked for, which takes seconds a token."""
    letter = f"[{chr(97 + number % 26)}-{chr(97 + (number + 7) % 26)}]" if number % 26 < 19 else '"a"'
    nested = f"{letter}{{0,{900 + number // 26}}}"
    for _ in range(4):
        nested = f"({nested}){{0,1000}}"
    return f"root ::= {nested}" if number % 2 else f'root ::= s\ns ::= s s | [^x] | "{number}"'


class Client:
    """One API key's requests.

    Args:
        url: the server's.
        key: its API key.
    """

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=SECONDS, limits=httpx.Limits())
        self._random = Random(key)

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no other prompt begins with."""
        return [self._random.randrange(VOCABULARY) for _ in range(tokens)]

    def first_token(self, tokens: int) -> float:
        """Seconds until the first token of an answer to a prompt."""
        body = {"prompt": self.prompt(tokens), "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
        began = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            seconds = time.perf_counter() - began
            for _ in lines:
                pass
        return seconds

    def step_seconds(self, tokens: int) -> list[float]:
        """Seconds of decode steps, by the times between an answer's tokens."""
        body = {"prompt": self.prompt(8), "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        times = []
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(times)]

    def complete(self, **more: Any) -> tuple[str, float]:
        """How a request has ended, and after how many seconds."""
        began = time.perf_counter()
        try:
            answer = self._http.post("/v1/completions", json={"temperature": 0, **more})
            how = str(answer.status_code)
        except httpx.HTTPError as error:
            how = type(error).__name__
        return how, time.perf_counter() - began

    def chat(self) -> float:
        """Seconds of a chat of four tokens."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        began = time.perf_counter()
        self._http.post("/v1/chat/completions", json=body).raise_for_status()
        return time.perf_counter() - began


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 1),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
    }


@contextmanager
def server(flags: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two API keys, and its URL."""
    command = [
        sys.executable,
        "-m",
        "shadowkv.serve",
        "--port=0",
        "--api-key",
        "a",
        "b",
        "--disable-uvicorn-access-log",
    ]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
            if ready is None:
                raise SystemExit("the server did not start")
            yield process, ready.split()[1].removesuffix("/v1")
        finally:
            process.kill()


@contextmanager
def counting() -> Iterator[None]:
    """Beside two processes that only count, as many as work on slow grammars at a time."""
    with (
        subprocess.Popen([sys.executable, "-c", COUNT]) as first,
        subprocess.Popen([sys.executable, "-c", COUNT]) as second,
    ):
        try:
            yield
        finally:
            first.kill()
            second.kill()


def flood(args: argparse.Namespace) -> dict[str, Any]:
    """A question of key b alone, and beside the flood of key a."""
    with ThreadPoolExecutor(PROMPTS) as threads, server(args.server) as (_, url):
        a, b = Client(url, "a"), Client(url, "b")
        for tokens in (QUESTION_TOKENS, args.prompt_tokens, args.block_tokens):
            b.first_token(tokens)
        alone = [b.first_token(QUESTION_TOKENS) for _ in range(args.samples)]
        block = [b.first_token(args.block_tokens) for _ in range(3)]
        stop, ended = threading.Event(), Counter[str]()

        def ask() -> None:
            while not stop.is_set():
                prompt = Random(time.perf_counter_ns()).choices(range(VOCABULARY), k=args.prompt_tokens)
                ended[a.complete(prompt=prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)[0]] += 1

        for _ in range(PROMPTS):
            threads.submit(ask)
        time.sleep(10)
        steps = b.step_seconds(64)
        beside = [b.first_token(QUESTION_TOKENS) for _ in range(args.samples)]
        stop.set()
        answers = dict(ended)
    limit = percentiles(alone)["p99_ms"] + 2 * percentiles(steps)["p99_ms"] + 1000 * sorted(block)[1]
    return {
        "alone": percentiles(alone),
        "beside": percentiles(beside),
        "steps": percentiles(steps),
        "block_ms": round(1000 * sorted(block)[1], 1),
        "limit_ms": round(limit, 1),
        "answers_of_the_flood": answers,
        "ok": percentiles(beside)["p99_ms"] <= limit,
    }


def grammars(args: argparse.Namespace) -> dict[str, Any]:
    """Chats of key b alone, and beside grammars of key a."""
    with ThreadPoolExecutor(GRAMMARS) as threads, server(args.server) as (process, url):
        a, b = Client(url, "a"), Client(url, "b")
        a.complete(prompt="a", max_tokens=4, structured_outputs={"regex": "[a-c]+"})
        b.chat()
        alone = [b.chat() for _ in range(args.samples)]
        with counting():
            beside_counting = [b.chat() for _ in range(args.samples)]
        stop, ended, numbers = threading.Event(), Counter[str](), count()

        def ask() -> None:
            while not stop.is_set():
                rules = {"grammar": hostile_grammar(next(numbers))}
                more = {"max_tokens": 200, "temperature": 1.0, "structured_outputs": rules}
                ended[a.complete(prompt="Go", **more)[0]] += 1

        for _ in range(GRAMMARS):
            threads.submit(ask)
        time.sleep(3)
        beside = [b.chat() for _ in range(args.samples)]
        answers = dict(ended)
        process.send_signal(signal.SIGTERM)
        stop.set()
        began = time.monotonic()
        process.wait(SECONDS)
        to_end = time.monotonic() - began
    ratio = percentiles(beside)["p99_ms"] / percentiles(alone)["p99_ms"]
    return {
        "alone": percentiles(alone),
        "beside_counting": percentiles(beside_counting),
        "beside": percentiles(beside),
        "ratio_of_p99": round(ratio, 2),
        "answers_of_the_attack": answers,
        "seconds_from_sigterm_to_the_end": round(to_end, 1),
        "ok": ratio <= MAX_RATIO and to_end <= MAX_TO_END,
    }


CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"flood": flood, "grammars": grammars}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--samples", type=int, default=200, help="questions, alone and beside (default: %(default)s)")
    text = "of the flood (default: %(default)s)"
    parser.add_argument("--prompt-tokens", type=int, default=1190, metavar="TOKENS", help=text)
    text = "of a prompt that is a block: 2,048 on a CPU, 8,192 on a GPU (default: %(default)s)"
    parser.add_argument("--block-tokens", type=int, default=2048, metavar="TOKENS", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    parser.add_argument("server", nargs="*", help="flags of the server, behind -- (default: smollm2-135m-instruct)")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for case in args.cases:
        found[case] = CASES[case](args)
        print(case, json.dumps(found[case], indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({**provenance(), **found}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figures["ok"] for figures in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
