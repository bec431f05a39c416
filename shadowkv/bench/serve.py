"""Measures a running server through OpenAI's completions API, as ``vllm bench serve`` does.

Prompts are random token ids. Answers are streamed and have a set length. Ctrl-C ends a run and prints the results so
far. With ``--find-rate``, Ctrl-C prints no results; the same command, run again, continues the search.

    shadowkv bench serve --base-url http://localhost:8000/v1 --num-prompts 48 \\
        --random-input-len 61184 --random-output-len 256 --out result.json
    shadowkv bench serve --num-prompts 400 --request-rate 12 --goodput ttft:200 tpot:20 --trace-out trace.jsonl
    shadowkv bench serve --base-url http://another:8000/v1 --trace-in trace.jsonl --goodput ttft:200 tpot:20
    shadowkv bench serve --num-prompts 400 --goodput ttft:200 tpot:20 --find-rate --out rates.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from shadowkv.bench.arrivals import Arrival, draw_arrivals, read_trace, write_trace
from shadowkv.bench.client import CompletionClient, Refused, error_text
from shadowkv.bench.find_rate import find_rate
from shadowkv.bench.replay import Replay, completion_body
from shadowkv.bench.serving_stats import LIMITED, METRICS, Record, details, figures, goodput
from shadowkv.eval.provenance import commit
from shadowkv.eval.records.predictions import write_json
from shadowkv.wording import counted

SMALLEST_VOCABULARY = 32000
"""Default vocabulary size. No common model has fewer tokens."""

SHOWN = (
    ("completed", "Successful requests"),
    ("failed", "Failed requests"),
    ("interrupted", "Interrupted requests"),
    ("duration", "Benchmark duration (s)"),
    ("total_input_tokens", "Total input tokens"),
    ("total_output_tokens", "Total generated tokens"),
    ("request_throughput", "Request throughput (req/s)"),
    ("request_goodput", "Request goodput (req/s)"),
    ("good_share", "  share of all requests"),
    ("output_throughput", "Output token throughput (tok/s)"),
    ("total_token_throughput", "Total token throughput (tok/s)"),
    ("decode_only_throughput", "Decode-only throughput, all running (tok/s)"),
    ("decode_only_seconds", "  for (s)"),
    ("p99_send_lag_ms", "P99 lateness of the client (ms)"),
)


def describe_server(base_url: str, api_key: str = "none") -> dict[str, Any]:
    """Asks a server for its ``model_id``, ``max_model_len`` and ``version``, and a shadowkv server also for its policy
    ``kv``. What the server does not tell is None.

    Raises Refused if the server cannot be reached or has no list of models.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=60) as client:
        try:
            response = client.get("models")
            response.raise_for_status()
            model = response.json()["data"][0]
            about = {"model_id": model["id"], "max_model_len": model.get("max_model_len"), "version": None, "kv": None}
        except httpx.HTTPStatusError as error:
            text = error_text(response.content)
            raise Refused(f"{error.request.url} answers {error.response.status_code}: {text}") from error
        except httpx.HTTPError as error:
            raise Refused(f"no server at {base_url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise Refused(f"{base_url}/models is not the OpenAI API's list of models") from error
        with suppress(httpx.HTTPError, ValueError, LookupError):
            about["version"] = client.get("../version").json()["version"]
        with suppress(httpx.HTTPError):
            policy = re.search(r'cache_config_info\{.*?kv="(.*?)"', client.get("../metrics").text)
            about["kv"] = policy and policy[1]
    return about


async def measure(
    client: CompletionClient, model: str, arrivals: Sequence[Arrival], args: argparse.Namespace
) -> tuple[dict[str, Any], list[Record]]:
    """Sends the requests. Returns the results and the records. SIGINT ends the run early. Raises Refused if a warm-up
    fails."""
    loop, run = asyncio.get_running_loop(), Replay(client, arrivals, args.max_concurrency)
    for number in range(args.num_warmups):
        warm_up = replace(arrivals[0], seed=arrivals[0].seed + 1 + number)
        await client.stream(completion_body(model, warm_up, args.vocab_size, args.ignore_eos), Record(0.0, 0))
    work = asyncio.ensure_future(run.run(model, args.vocab_size, args.ignore_eos))
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    with suppress(asyncio.CancelledError):
        await work
    loop.remove_signal_handler(signal.SIGINT)
    end = time.perf_counter()
    result = figures(run.records, run.clients, run.start, end)
    if args.goodput:
        result |= goodput(run.records, len(arrivals), end - run.start, args.goodput)
    result["p99_send_lag_ms"] = 1e3 * float(np.percentile(run.lags, 99)) if run.lags else None
    result["requests"] = [details(record, run.start) for record in run.records]
    return result, run.records


def report(result: dict[str, Any]) -> str:
    """Returns the result as a table."""
    shown = [(name, text) for name, text in SHOWN if name in result]
    for metric in METRICS:
        for kind in ("mean", "median", "std", "p99"):
            shown.append((f"{kind}_{metric}_ms", f"{kind.capitalize()} {metric.upper()} (ms)"))
    lines = [f"{' Serving Benchmark Result ':=^60}"]
    for name, text in shown:
        value = result[name]
        figure = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{text + ':':<46} {figure:>13}")
    return "\n".join([*lines, "=" * 60])


def parse_goodput(text: str) -> tuple[str, float]:
    """Parses a limit such as ``ttft:200``; raises ArgumentTypeError for anything else."""
    name, _, limit = text.partition(":")
    with suppress(ValueError):
        if name in LIMITED and float(limit) > 0:
            return name, float(limit)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MILLISECONDS, with a name of {', '.join(LIMITED)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag. A flag that vLLM has too keeps vLLM's name and meaning."""
    add = parser.add_argument
    add("--base-url", default="http://localhost:8000/v1", help="server, with or without /v1 (default: %(default)s)")
    add("--model", help="name of the model (default: the first that the server lists)")
    add("--api-key", default="none", help="API key of the server")
    add("--num-prompts", type=int, default=48, help="number of requests (default: %(default)s)")
    add("--random-input-len", type=int, default=1024, help="length of a prompt in tokens (default: %(default)s)")
    add("--random-output-len", type=int, default=128, help="length of an answer in tokens (default: %(default)s)")
    text = (
        "requests per second, at random intervals; --find-rate starts at this rate "
        "(default: all at once; with --find-rate: 1)"
    )
    add("--request-rate", type=float, default=math.inf, help=text)
    text = "shape of the gaps between requests: 1 is a Poisson process, less is more bursty, inf is even (default: 1)"
    add("--burstiness", type=float, default=1.0, help=text)
    add("--num-warmups", type=int, default=0, help="number of requests before the measured ones (default: 0)")
    add("--max-concurrency", type=int, help="maximum number of concurrent requests (default: no limit)")
    text = "vocabulary size; prompts are random ids below it (default: %(default)s)"
    add("--vocab-size", type=int, default=SMALLEST_VOCABULARY, help=text)
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")
    text = "ignore the end-of-sequence token, so that answers have their full length (default: True)"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--trace-out", type=Path, metavar="FILE", help="write the arrivals to this file, one JSON object per line")
    add("--trace-in", type=Path, metavar="FILE", help="replay the arrivals of this file instead of random ones")
    text = f"limits in ms, of {', '.join(LIMITED)}; goodput counts the requests per second that meet all of them"
    add("--goodput", nargs="+", type=parse_goodput, default=[], metavar="NAME:MS", help=text)
    text = (
        "find the highest rate at which 99 %% of the requests meet --goodput; rates that the --out file already has "
        "are not measured again"
    )
    add("--find-rate", action="store_true", help=text)
    add("--out", type=Path, metavar="FILE", help="write the result and the times of every request to this JSON file")


def check(args: argparse.Namespace) -> None:
    """Checks the flags, completes ``--base-url`` and makes a dict of ``--goodput``. Raises ValueError for impossible
    numbers and for flags that contradict one another."""
    for name in ("num_prompts", "random_input_len", "random_output_len", "vocab_size", "request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be positive")
    if args.max_concurrency is not None and args.max_concurrency <= 0:
        raise ValueError(f"--max-concurrency {args.max_concurrency} must be positive")
    if args.find_rate and (not args.goodput or args.out is None):
        raise ValueError("--find-rate needs --goodput for the limits, and --out for the measured rates")
    if args.find_rate and (args.trace_in or args.trace_out):
        raise ValueError("--find-rate draws arrivals for each rate: do not pass --trace-in or --trace-out")
    args.goodput = dict(args.goodput)
    args.base_url = args.base_url.rstrip("/")
    if not urlsplit(args.base_url).path:
        args.base_url += "/v1"


def load_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Collects the settings of the requests, for result files."""
    names = ("num_prompts", "random_input_len", "random_output_len", "burstiness", "max_concurrency", "seed")
    return {name: getattr(args, name) for name in (*names, "vocab_size", "ignore_eos")}


def bench(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Runs the benchmark. Returns the content of the result file and the errors of requests. Raises Refused if nothing
    could be measured."""
    client = CompletionClient(args.base_url, args.api_key)
    if args.trace_in:
        arrivals = read_trace(args.trace_in)
        args.num_prompts = len(arrivals)
    else:
        arrivals = _draw(args, args.request_rate, args.seed)
    about = describe_server(args.base_url, args.api_key)
    longest, asked = about["max_model_len"], max(one.input_length + one.output_length for one in arrivals)
    if longest is not None and asked > longest:
        raise Refused(f"{asked} tokens of prompt and output are more than {about['model_id']}'s maximum, {longest}")
    if args.trace_out:
        write_trace(args.trace_out, arrivals)
    model = args.model or about["model_id"]
    origin = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        **about,
    }
    if args.find_rate:
        return _search(client, model, args, origin), []
    measured, records = asyncio.run(measure(client, model, arrivals, args))
    load = load_settings(args)
    if args.trace_in:
        drawn = ("random_input_len", "random_output_len", "burstiness", "seed")
        load = {"trace": str(args.trace_in), **{name: load[name] for name in load if name not in drawn}}
    rate = None if math.isinf(args.request_rate) or args.trace_in else args.request_rate
    result = {**origin, **load, "request_rate": rate, **measured}
    return result, [record.error for record in records if record.error is not None]


def _draw(args: argparse.Namespace, rate: float, seed: int) -> list[Arrival]:
    lengths = args.random_input_len, args.random_output_len
    return draw_arrivals(args.num_prompts, rate, *lengths, seed, args.burstiness)


def _search(client: CompletionClient, model: str, args: argparse.Namespace, origin: dict[str, Any]) -> dict[str, Any]:
    def one(rate: float, earlier: int) -> dict[str, Any]:
        arrivals = _draw(args, rate, args.seed + earlier)
        measured, records = asyncio.run(measure(client, model, arrivals, args))
        if len(records) < len(arrivals) or measured["interrupted"]:
            raise Refused("interrupted: the same command continues with the next rate")
        if measured["failed"]:
            raise Refused(next(record.error for record in records if record.error is not None))
        return {**origin, **measured}

    first = 1.0 if math.isinf(args.request_rate) else args.request_rate
    settings = {"model": model, "goodput": args.goodput, **load_settings(args)}
    return find_rate(args.out, settings, first, args.num_prompts, one)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and returns the exit status.

    The status is 1 if some requests failed or were interrupted, or if ``--find-rate`` finds no rate. It is 2 for
    invalid flags, if nothing could be measured, or if a search failed or was interrupted.
    """
    try:
        check(args)
        result, errors = bench(args)
    except (ValueError, OSError, Refused, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted before anything was measured'}", file=sys.stderr)
        return 2
    if args.find_rate:
        rate = result["highest_rate"]
        print("no rate meets the limits" if rate is None else f"highest rate within the limits: {rate:g} requests/s")
        return 0 if rate is not None else 1
    print(report(result))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, result)
    if errors:
        print(f"error: {counted(len(errors), 'request')} failed; the first: {errors[0]}", file=sys.stderr)
    return 0 if result["completed"] == args.num_prompts else 1
