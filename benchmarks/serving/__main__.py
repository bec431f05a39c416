"""The table of serving: the same arrivals against a server that this starts, ours or vLLM's, or our engine alone.

Cases: ``poisson``, 12 requests a second of 1,024 + 256 tokens; ``limits``, the highest rate of them at which 99 % have
their first token within 200 ms and 20 ms for each after that; ``at-once``, 256 of them together; ``long``, one of
61,184 + 256 tokens every four seconds; ``mixed``, 8 short ones a second for a minute beside a prompt of 122,000 tokens
every 20 seconds, in a row each: ``mixed-short`` and ``mixed-long``. Rows that the file already has are not measured
again, and ``limits`` goes on where it was interrupted. Flags after ``--`` are the server's, or the engine's.

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
    """Requests came to no good end: there is no row."""


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
    """The names of a case's rows."""
    return ["mixed-short", "mixed-long"] if case == "mixed" else [case]


def about(args: argparse.Namespace, started: Sequence[str] | None, server: dict[str, Any]) -> dict[str, Any]:
    """Where a row comes from; ``started`` is the server's command, ``server`` what it says of itself."""
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
    """Rows of our engine without a server."""
    from benchmarks.serving.direct import drive  # with PyTorch, which clients of a server need not load
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
    """Rows of a server."""
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
    """Adds the rows of a case that a server answers."""
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
        last = max(record.chunks[-1] for record in some)  # each group's rates are of its own time
        table.add(args.label, name, rate, result_of(some, len(some), start, last), origin)


def send(url: str, model: str, arrivals: Sequence[Arrival], vocab_size: int) -> tuple[list[Record], int, float, float]:
    """Records of all these requests, their number, and when the run began and ended; raises Failed if one failed."""
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
