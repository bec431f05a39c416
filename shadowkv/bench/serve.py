"""Measures a running server from end to end, as ``vllm bench serve`` does: any with the OpenAI completions API.

Prompts are random token ids, answers are streamed and of a set length. Ctrl-C ends a run and shows what there is.

    shadowkv bench serve --base-url http://localhost:8000/v1 --num-prompts 48 \\
        --random-input-len 61184 --random-output-len 256 --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from shadowkv.bench.serving_stats import Record, figures
from shadowkv.eval.provenance import commit
from shadowkv.wording import counted

SMALLEST_VOCABULARY = 32000
"""Of the usual models."""

SHOWN = (
    ("completed", "Successful requests"),
    ("failed", "Failed requests"),
    ("interrupted", "Interrupted requests"),
    ("duration", "Benchmark duration (s)"),
    ("total_input_tokens", "Total input tokens"),
    ("total_output_tokens", "Total generated tokens"),
    ("request_throughput", "Request throughput (req/s)"),
    ("output_throughput", "Output token throughput (tok/s)"),
    ("total_token_throughput", "Total token throughput (tok/s)"),
    ("decode_only_throughput", "Decode-only throughput, all running (tok/s)"),
    ("decode_only_seconds", "  for (s)"),
    *(
        (f"{kind}_{name}_ms", f"{kind.capitalize()} {name.upper()} (ms)")
        for name in ("ttft", "tpot", "itl")
        for kind in ("mean", "median", "p99")
    ),
)


class Refused(Exception):
    """The server cannot be asked, or says no."""


class Bench:
    """One run against one server.

    Args:
        client: talks to the server; paths begin at its ``/v1``.
        args: the command line's.
    """

    def __init__(self, client: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self.client, self.args, self.records = client, args, list[Record]()
        self._random = random.Random(args.seed)
        self.clients = min(args.num_prompts, args.max_concurrency or args.num_prompts)
        self._free = asyncio.Semaphore(self.clients)

    async def server(self) -> dict[str, Any]:
        """What the server says of itself; raises Refused if it is away, or its model too short for the prompts."""
        try:
            response = await self.client.get("models")
            response.raise_for_status()
            model = response.json()["data"][0]
        except httpx.HTTPStatusError as error:
            raise Refused(f"{error.request.url} answers {error.response.status_code}: {_message(response)}") from error
        except httpx.HTTPError as error:
            raise Refused(f"no server at {self.client.base_url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise Refused(f"{self.client.base_url}models is not the OpenAI API's list of models") from error
        longest, asked = model.get("max_model_len"), self.args.random_input_len + self.args.random_output_len
        if longest is not None and asked > longest:
            raise Refused(f"{asked} tokens of prompt and output are more than the {longest} of {model['id']}")
        found = {"model_id": model["id"], "max_model_len": longest, "version": None, "kv": None}
        with suppress(httpx.HTTPError, ValueError, LookupError):
            found["version"] = (await self.client.get("../version")).json()["version"]
        with suppress(httpx.HTTPError):
            policy = re.search(r'cache_config_info\{.*?kv="(.*?)"', (await self.client.get("../metrics")).text)
            found["kv"] = policy and policy[1]
        return found

    async def run(self, model: str) -> dict[str, Any]:
        """The figures; SIGINT ends the run early. Raises Refused if a warm-up fails."""
        loop, args = asyncio.get_running_loop(), self.args
        requests = args.num_warmups + args.num_prompts
        self._bar = tqdm(total=requests * args.random_output_len, unit="tok", disable=None, mininterval=1.0)
        with self._bar:
            for _ in range(args.num_warmups):
                await self._stream(self._body(model), Record(0.0, 0))
            start = time.perf_counter()
            work = asyncio.ensure_future(self._all(model))
            loop.add_signal_handler(signal.SIGINT, work.cancel)
            with suppress(asyncio.CancelledError):
                await work
        return figures(self.records, self.clients, start, time.perf_counter())

    async def _all(self, model: str) -> None:
        tasks = []
        try:
            for _ in range(self.args.num_prompts):
                tasks.append(asyncio.create_task(self._one(self._body(model))))
                gap = 0.0 if math.isinf(self.args.request_rate) else self._random.expovariate(self.args.request_rate)
                await asyncio.sleep(gap)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _body(self, model: str) -> bytes:
        body = {
            "model": model,
            "prompt": [self._random.randrange(self.args.vocab_size) for _ in range(self.args.random_input_len)],
            "max_tokens": self.args.random_output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def _one(self, content: bytes) -> None:
        async with self._free:
            record = Record(time.perf_counter(), self.args.random_input_len)
            self.records.append(record)
            try:
                await self._stream(content, record)
            except Refused as error:
                record.error = str(error)
        self._bar.set_postfix_str(f"{sum(one.done for one in self.records)} of {self.args.num_prompts} requests done")

    async def _stream(self, content: bytes, record: Record) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            async with self.client.stream("POST", "completions", content=content, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise Refused(f"status {response.status_code}: {_message(response)}")
                async for line in response.aiter_lines():
                    if line.startswith("data: "):  # others are empty, or comments that keep the connection alive
                        self._take(line[len("data: ") :], record)
        except httpx.HTTPError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        if not record.done:
            raise Refused("the stream broke off")

    def _take(self, data: str, record: Record) -> None:
        if data == "[DONE]":
            record.done = True
            self._bar.update(record.tokens - len(record.chunks))
            return
        event = json.loads(data)
        if "error" in event:
            raise Refused(event["error"]["message"])
        if event["choices"]:
            record.chunks.append(time.perf_counter())
            self._bar.update()
        if event.get("usage"):
            record.output_tokens = event["usage"]["completion_tokens"]


def _message(response: httpx.Response) -> str:
    """An error's text, whether it came as the OpenAI API's or not."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]


def report(result: dict[str, Any]) -> str:
    """The table that people read."""
    lines = [f"{' Serving Benchmark Result ':=^60}"]
    for name, text in SHOWN:
        value = result[name]
        shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{text + ':':<46} {shown:>13}")
    return "\n".join([*lines, "=" * 60])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag."""
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="(default: %(default)s)")
    parser.add_argument("--model", help="(default: the server's first)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--num-prompts", type=int, default=48, help="requests (default: %(default)s)")
    parser.add_argument("--random-input-len", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--random-output-len", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--request-rate", type=float, default=math.inf, help="a second, Poisson (default: all at once)")
    parser.add_argument("--num-warmups", type=int, default=0, help="requests before those that count (default: 0)")
    parser.add_argument("--max-concurrency", type=int, help="requests in flight at the most (default: all)")
    parser.add_argument(
        "--vocab-size", type=int, default=SMALLEST_VOCABULARY, help="prompts' ids are below (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers that cannot be."""
    for name in ("num_prompts", "random_input_len", "random_output_len", "vocab_size", "request_rate"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be positive")
    if args.max_concurrency is not None and args.max_concurrency <= 0:
        raise ValueError(f"--max-concurrency {args.max_concurrency} must be positive")


async def bench(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What goes into the file, and what went wrong; raises Refused where nothing could be measured."""
    headers, limits = {"Authorization": f"Bearer {args.api_key}"}, httpx.Limits(max_connections=None)
    url = args.base_url.rstrip("/")
    # No timeouts: a prompt at the end of a queue waits for minutes.
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as client:
        run = Bench(client, args)
        about = await run.server()
        measured = await run.run(args.model or about["model_id"])
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        **about,
        "num_prompts": args.num_prompts,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "request_rate": None if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        **measured,
    }
    return result, [one.error for one in run.records if one.error is not None]


def run(args: argparse.Namespace) -> int:
    """Measures; returns the exit status: 1 where some requests came to no good end, 2 where none could be sent."""
    try:
        check(args)
        result, errors = asyncio.run(bench(args))
    except (ValueError, Refused, KeyboardInterrupt) as error:
        print(f"error: {error or 'interrupted before anything was measured'}", file=sys.stderr)
        return 2
    print(report(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if errors:
        print(f"error: {counted(len(errors), 'request')} failed; the first: {errors[0]}", file=sys.stderr)
    return 0 if result["completed"] == args.num_prompts else 1
