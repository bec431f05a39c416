"""Writes the table of serving. It sends the same arrivals to a server that it starts (ours or vLLM's), or to our engine
without a server.

A short request has a prompt of 1,024 tokens and an answer of 256. Cases: ``poisson``, 12 short requests a second;
``limits``, the highest rate of short requests at which 99 % have their first token within 200 ms and take at most 20 ms
for each later token; ``at-once``, 256 short requests together; ``long``, a request of 61,184 + 256 tokens every four
seconds; ``mixed``, 8 short requests a second for a minute, and beside them a prompt of 122,000 tokens every 20 seconds.
``mixed`` has two rows: ``mixed-short`` and ``mixed-long``. Rows that the file already has are not measured again, and
an interrupted search for ``limits`` continues. Flags after ``--`` are passed to the server, or to the engine.

    python -m benchmarks.serving --engine shadowkv --out results -- --model llama-3.1-8b --load-format dummy --kv full
    python -m benchmarks.serving --engine shadowkv-direct --out results -- --model llama-3.1-8b --load-format dummy
    python -m benchmarks.serving --engine vllm --peer-site /tmp/site --out results
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.serving.cases import (
    CASES,
    DIRECT,
    LIMITS,
    SEARCH_SEED,
    Shape,
    arrivals_of,
    parse_change,
    rate_of,
    warm_up_of,
)
from benchmarks.serving.guidellm import replay_with_guidellm
from benchmarks.serving.rows import Table, device, result_of
from shadowkv.bench.arrivals import Arrival, draw_arrivals, write_trace
from shadowkv.bench.client import CompletionClient
from shadowkv.bench.find_rate import find_rate
from shadowkv.bench.replay import Replay
from shadowkv.bench.serve import SMALLEST_VOCABULARY, describe_server
from shadowkv.bench.server_process import running
from shadowkv.bench.serving_stats import Record
from shadowkv.eval.provenance import command, commit

ENGINES = ("shadowkv", "shadowkv-direct", "vllm")
VERSIONS = ("torch", "triton", "numpy", "uvicorn", "pyzmq")


class Failed(Exception):
    """Raised if requests fail or answers are too short. The case then gets no row."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--label", help="the engine's name in the table, as 'shadowkv turbo' (default: --engine)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(default: all it can)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--set", nargs="+", type=parse_change, default=[], metavar="NAME=NUMBER", help=Shape.__doc__)
    parser.add_argument("--vocab-size", type=int, default=SMALLEST_VOCABULARY, help="ids below (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="of the server (default: %(default)s)")
    parser.add_argument("--peer-site", type=Path, help="folder with vLLM's packages (default: where Python finds them)")
    parser.add_argument("--guidellm", metavar="COMMAND", help="which replays poisson instead, as a second witness")
    parser.add_argument("--tokenizer", type=Path, help="folder, for guidellm's prompts: the server's own")
    parser.add_argument("flags", nargs="*", help="of the server or the engine, after --")
    args = parser.parse_args(argv)
    args.label, args.shape = args.label or args.engine, Shape(**dict(args.set))
    if args.guidellm:
        if args.engine == "shadowkv-direct" or args.tokenizer is None:
            parser.error("--guidellm needs a server, and --tokenizer")
        args.cases, args.label = ["poisson"], f"{args.label} by guidellm"
    if args.engine == "shadowkv-direct":
        args.cases = [case for case in args.cases if case in DIRECT]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = parse(argv)
    table = Table(args.out)
    cases = [case for case in args.cases if not all(table.has(args.label, row) for row in rows_of(case))]
    if not cases:
        return 0
    try:
        (run_direct if args.engine == "shadowkv-direct" else run_server)(args, table, cases)
    except (Failed, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def rows_of(case: str) -> list[str]:
    """Returns the names of a case's rows."""
    return ["mixed-short", "mixed-long"] if case == "mixed" else [case]


def about(args: argparse.Namespace, started: Sequence[str] | None, server: dict[str, Any]) -> dict[str, Any]:
    """Returns the origin of a row. ``started`` is the server's command, and ``server`` the server's description of
    itself."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "engine": args.label,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command(),
        "server_command": shlex.join(started) if started else None,
        "server": server,
        "client_versions": versions,
        "device": device(),
        "shape": asdict(args.shape),
    }


def run_direct(args: argparse.Namespace, table: Table, cases: Sequence[str]) -> None:
    """Adds the rows of our engine without a server."""
    from benchmarks.serving.direct import drive  # it loads PyTorch, which clients do not need
    from benchmarks.sweeps.engines import opened
    from shadowkv.engine.config import EngineConfig

    flags = argparse.ArgumentParser(prog="flags of the engine")
    EngineConfig.add_arguments(flags)
    engine = opened(EngineConfig.from_args(flags.parse_args(args.flags)))
    described = {"flags": shlex.join(args.flags), "kv": str(engine.cache.spec)}
    for case in cases:
        drive(engine, warm_up_of(case, args.shape), args.vocab_size)
        arrivals = arrivals_of(case, args.shape)
        records, start, end = drive(engine, arrivals, args.vocab_size)
        result = result_of(records, len(arrivals), start, end)
        table.add(args.label, case, rate_of(case, args.shape), result, about(args, None, described))


def run_server(args: argparse.Namespace, table: Table, cases: Sequence[str]) -> None:
    """Starts a server, and adds its rows."""
    url = f"http://127.0.0.1:{args.port}/v1"
    module, environment = "shadowkv.serve", {}
    if args.engine == "vllm":
        module = "benchmarks.peer.vllm_server"
        if args.peer_site:
            environment["PYTHONPATH"] = str(args.peer_site)
    started = [sys.executable, "-m", module, "--port", str(args.port), *args.flags]
    with running(started, url, args.out / f"{args.label.replace(' ', '-')}.log", environment):
        server = describe_server(url)
        for case in cases:
            trace = args.out / f"{case}.trace.jsonl"
            write_trace(trace, arrivals_of(case, args.shape))
            send(url, server["model_id"], warm_up_of(case, args.shape), args.vocab_size)
            origin = about(args, started, server)
            if args.guidellm:
                result = replay_with_guidellm(args.guidellm, url, trace, args.tokenizer, args.out, args.label)
                table.add(args.label, case, rate_of(case, args.shape), result, origin)
            else:
                measure(args, table, case, url, origin)


def measure(args: argparse.Namespace, table: Table, case: str, url: str, origin: dict[str, Any]) -> None:
    """Sends the requests of a case to the server, and adds the case's rows."""
    model, shape = origin["server"]["model_id"], args.shape
    if case == "limits":
        path = args.out / f"{args.label.replace(' ', '-')}-rates.json"

        def one(rate: float, earlier: int) -> dict[str, Any]:
            seed = SEARCH_SEED + earlier
            arrivals = draw_arrivals(shape.requests, rate, shape.prompt, shape.answer, seed)
            return result_of(*send(url, model, arrivals, args.vocab_size))

        settings = {"engine": args.label, "shape": asdict(shape), "limits": LIMITS, "command": origin["server_command"]}
        found = find_rate(path, settings, shape.rate, shape.requests, one)
        best = [run for run in found["runs"] if run["request_rate"] == found["highest_rate"]]
        if not best:
            raise Failed(f"no rate is low enough: {path}")
        table.add(args.label, case, found["highest_rate"], best[0], origin)
        return
    arrivals = arrivals_of(case, shape)
    records, asked, start, end = send(url, model, arrivals, args.vocab_size)
    if case != "mixed":
        table.add(args.label, case, rate_of(case, shape), result_of(records, asked, start, end), origin)
        return
    rates = shape.mixed_rate, 1 / shape.mixed_every
    for name, length, rate in zip(rows_of(case), (shape.prompt, shape.mixed_prompt), rates, strict=True):
        some = [record for record in records if record.input_tokens == length]
        last = max(record.chunks[-1] for record in some)  # rates of each group are over the group's own time
        table.add(args.label, name, rate, result_of(some, len(some), start, last), origin)


def send(url: str, model: str, arrivals: Sequence[Arrival], vocab_size: int) -> tuple[list[Record], int, float, float]:
    """Sends the requests. Returns their records, their number, and the times at which the run began and ended. Raises
    Failed if a request failed, or if an answer is too short."""
    run = Replay(CompletionClient(url), arrivals)
    asyncio.run(run.run(model, vocab_size))
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise Failed(f"{len(failed)} of {len(arrivals)} requests failed; the first: {failed[0]}")
    short = [record for record, arrival in zip(run.records, arrivals) if record.tokens != arrival.output_length]
    if short:
        raise Failed(f"{len(short)} answers are not as long as they should be: the server ends them early")
    return run.records, len(arrivals), run.start, max(record.chunks[-1] for record in run.records)


if __name__ == "__main__":
    sys.exit(main())
