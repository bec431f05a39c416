"""Compares our server with llama.cpp's on one machine, with the same GGUF file. Both servers run at the same time, and
are measured in turns.

llama.cpp comes from the wheel ``xllamacpp``, which is installed in a Python environment of its own:

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install xllamacpp
    python -m benchmarks.peer.llama_cpp --llama-python /tmp/llama/bin/python --out benchmarks/results/cpu/peer.json

Every case is measured ``--rounds`` times with each server; the order of the two alternates. Requests go over HTTP, and
answers are streamed, greedy, and not ended by end tokens. No prompt is sent twice, and no two prompts begin alike. The
threads of both engines spin while they wait for each other. So if other processes run, a token can wait for whole time
slices of the scheduler. The table therefore has each engine's best turn beside its median. With ``--threads 1`` nothing
spins, and a server's CPU time per token hardly depends on other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shadowkv.bench.client import CompletionClient
from shadowkv.bench.server_process import running
from shadowkv.bench.serving_stats import Record
from shadowkv.eval.provenance import provenance

ENGINES = ("shadowkv", "llama.cpp")
SERVED = "model"  # llama.cpp takes any name

WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
]  # fmt: skip
"""Words of prompts. After a space, each word is one token."""


@dataclass(frozen=True)
class Case:
    """``users`` concurrent requests, each with a prompt of ``words`` words and an answer of ``answer`` tokens."""

    name: str
    users: int
    words: int
    answer: int


CASES = (
    Case("one user, 60 words", 1, 60, 128),
    Case("one user, 825 words", 1, 825, 64),
    Case("one user, 2,048 words", 1, 2048, 64),
    Case("one user, 3,129 words", 1, 3129, 64),
    Case("one user, 6,240 words", 1, 6240, 64),
    Case("one user, 18,432 words", 1, 18432, 64),
    Case("eight users, 60 words", 8, 60, 128),
    Case("eight users, 825 words", 8, 825, 64),
)


def prompt(words: int, seed: int) -> str:
    """Returns a prompt of ``words`` random words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def cpu_seconds(port: int) -> float:
    """Returns the CPU time so far of the server on ``port``, including its child processes. This process must have
    started the server."""
    server = next(child for child in psutil.Process().children() if str(port) in child.cmdline())
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


async def turn(port: int, case: Case, seed: int) -> dict[str, float]:
    """Sends the requests of all users at once, and returns the figures of the case.

    Returns:
        Means over users: prompt_tokens; ttft, milliseconds to the first token; prompt_tokens_per_s, prompt tokens
        divided by this time; tpot, milliseconds per token after the first. For all users together: tokens_per_s, tokens
        of all answers divided by the time from the first request to the last token; cpu_ms_per_token, CPU time of the
        server's processes per token, counted after every user has a first token.
    """
    records = [Record(0.0, 0) for _ in range(case.users)]
    client = CompletionClient(f"http://127.0.0.1:{port}/v1")  # servers close idle connections, so it is new
    all_decode: list[tuple[float, int]] = []

    async def ask(user: int, record: Record) -> None:
        def see(event: dict[str, Any], when: float) -> None:
            record.input_tokens = (event.get("usage") or {}).get("prompt_tokens", record.input_tokens)
            if not all_decode and all(one.chunks for one in records):
                all_decode.append((cpu_seconds(port), sum(len(one.chunks) for one in records)))

        body = {
            "model": SERVED,
            "prompt": prompt(case.words, seed * case.users + user),
            "max_tokens": case.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await client.stream(json.dumps(body).encode(), record, see)

    await asyncio.gather(*(ask(user, record) for user, record in enumerate(records)))
    client.close()
    (before, tokens), after = all_decode[0], cpu_seconds(port)
    seconds = max(record.chunks[-1] for record in records) - min(record.sent for record in records)
    mean = statistics.fmean
    return {
        "prompt_tokens": mean(record.input_tokens for record in records),
        "ttft": 1e3 * mean(record.seconds("ttft") or 0.0 for record in records),
        "prompt_tokens_per_s": mean(record.input_tokens / (record.seconds("ttft") or 1.0) for record in records),
        "tpot": 1e3 * mean(record.seconds("tpot") or 0.0 for record in records),
        "tokens_per_s": sum(record.tokens for record in records) / seconds,
        "cpu_ms_per_token": 1e3 * (after - before) / (sum(record.tokens for record in records) - tokens),
    }


async def measure(
    ports: dict[str, int], cases: Sequence[Case], rounds: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Returns the figures of all turns by case and engine. Each engine first answers one warm-up turn, which is not
    returned."""
    turns: dict[str, dict[str, list[dict[str, float]]]] = {case.name: {} for case in cases}
    seed = 0
    for port in ports.values():
        await turn(port, cases[0], seed := seed + 1)
    for case in cases:
        for number in range(rounds):
            for engine in list(ports)[:: 1 if number % 2 == 0 else -1]:
                figures = await turn(ports[engine], case, seed := seed + 1)
                turns[case.name].setdefault(engine, []).append(figures)
                print(f"{case.name:24}{engine:12}", {k: round(v, 1) for k, v in figures.items()}, flush=True)
    return turns


def summary(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns, for each figure, the best and the median of each engine's turns, and the ratio of ours to llama.cpp's
    for both."""
    rows = {}
    for name in ("ttft", "prompt_tokens_per_s", "tpot", "tokens_per_s", "cpu_ms_per_token"):
        row, best = {}, max if name.endswith("per_s") else min
        for engine, figures in turns.items():
            values = [figure[name] for figure in figures]
            row |= {f"{engine} best": best(values), f"{engine} median": statistics.median(values)}
        if len(turns) == len(ENGINES):
            for which in ("best", "median"):
                row[f"ratio {which}"] = row[f"shadowkv {which}"] / row[f"llama.cpp {which}"]
        rows[name] = row
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=Path, required=True, help="a Python that has xllamacpp")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model's)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine a case (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="(default: all)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="(default: both)")
    parser.add_argument("--port", type=int, default=8100, help="of the first server (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON of every turn, with a summary")
    parser.add_argument("flags", nargs="*", help="of our server, after --")
    args = parser.parse_args(argv)
    args.cases = [case for case in CASES if args.cases is None or case.name in args.cases]
    return args


def main() -> int:
    """Command line; returns the exit status."""
    from shadowkv.engine.config import DEFAULT_MODEL
    from shadowkv.models.sources import fetch

    args = parse()
    file = os.fspath(args.model or fetch(DEFAULT_MODEL))
    longest = max(case.words + case.answer for case in args.cases) + 64
    users = max(case.users for case in args.cases)
    serve = [sys.executable, "-m", "shadowkv.serve", "--model", file, "--device", "cpu"]
    serve += ["--served-model-name", SERVED, *args.flags]
    peer = Path(__file__).with_name("llama_server.py")
    sizes = ("--threads", str(args.threads), "--slots", str(users), "--context", str(longest))
    commands = {
        "shadowkv": serve,
        "llama.cpp": [os.fspath(args.llama_python), os.fspath(peer), "--model", file, *sizes],
    }
    with ExitStack() as servers:
        ports = {engine: port for port, engine in enumerate(args.engines, args.port)}
        for engine, port in ports.items():
            url, log = f"http://127.0.0.1:{port}/v1", Path("build/peer", f"{engine}.log")
            threads = {"OMP_NUM_THREADS": str(args.threads)}
            servers.enter_context(running([*commands[engine], "--port", str(port)], url, log, threads))
        turns = asyncio.run(measure(ports, args.cases, args.rounds))
    rows = {case: summary(of_case) for case, of_case in turns.items()}
    for case, figures in rows.items():
        print(case)
        for name, row in figures.items():
            print(f"  {name:22}", "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    if args.out:
        versions = "import importlib.metadata as m; print(m.version('xllamacpp'))"
        done = subprocess.run([args.llama_python, "-c", versions], capture_output=True, text=True, check=True)
        about = {**provenance(), "xllamacpp": done.stdout.strip(), "cpu": processor(), "threads": args.threads}
        about["load"] = os.getloadavg()
        args.out.write_text(json.dumps({"about": about, "summary": rows, "turns": turns}, indent=1) + "\n")
    return 0


def processor() -> str:
    """Returns the CPU's name and number of cores."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
