"""Measures several engines behind one port (``--data-parallel-size``): tokens per second of two engines and of one, and
times to the first token with routing by prefix and at random.

The requests are questions about documents, several for each. Documents arrive as a Poisson process, and further
questions about a document follow with pauses. One server with two engines (``routed_server.py``) answers
all of them, in four runs with documents of their own:

- ``one``, ``two``: more than the engines can answer, and twice as much for two engines. All requests of ``one`` go to
  the first engine.
- ``prefix``, ``random``: the same arrivals with both routings, at ``--load`` times the rate that ``two`` has reached.

    python -m benchmarks.serving.replicas --out results -- --model llama-3.1-8b --load-format dummy --max-num-seqs 32 \\
        --max-cached-seqs 64 --max-model-len 32768
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.rows import device, result_of
from shadowkv.bench.arrivals import Arrival
from shadowkv.bench.client import CompletionClient
from shadowkv.bench.replay import Replay
from shadowkv.bench.serve import SMALLEST_VOCABULARY, describe_server
from shadowkv.bench.server_process import running
from shadowkv.eval.provenance import command, commit

FIGURES = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "duration")
COUNTERS = {"queries": "shadowkv:prefix_cache_queries_total", "hits": "shadowkv:prefix_cache_hits_total"}
WARM_UP = 1 << 20
"""Seed of the warm-up's documents."""


@dataclass(frozen=True)
class Question(Arrival):
    """A request whose prompt is a document, drawn from ``document_seed``, and a question, drawn from ``seed``."""

    document_seed: int
    document_length: int

    def prompt(self, vocab_size: int) -> list[int]:
        """Draws the token ids [input_length], each below ``vocab_size``."""
        document = random.Random(self.document_seed).choices(range(vocab_size), k=self.document_length)
        question = random.Random(self.seed).choices(range(vocab_size), k=self.input_length - self.document_length)
        return [*document, *question]


def draw_questions(args: argparse.Namespace, documents: int, rate: float, seed: int, run: str = "") -> list[Question]:
    """Draws ``--questions`` questions about each of ``documents`` documents, in order of arrival, ``rate`` a second on
    average. Runs with the same ``seed`` have the same times, and documents of their own."""
    draw, tokens, begins, questions = random.Random(seed), random.Random(f"{seed} {run}"), 0.0, []
    length = args.document + args.question
    for _ in range(documents):
        begins += draw.expovariate(rate / args.questions)
        document, asked = tokens.getrandbits(32), begins
        for _ in range(args.questions):
            questions.append(Question(asked, length, args.answer, tokens.getrandbits(32), document, args.document))
            asked += draw.uniform(0.5, 1.5) * args.pause
    return sorted(questions, key=lambda question: question.timestamp)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    for name, number, text in (
        ("document", 8000, "tokens of a document"),
        ("question", 128, "tokens of a question"),
        ("answer", 128, "tokens of an answer"),
        ("questions", 3, "questions about a document"),
        ("documents", 32, "documents for each engine in a run"),
        ("rate", 16.0, "questions a second for each engine in the runs one and two"),
        ("load", 0.6, "share of the rate that two engines have reached, for the runs prefix and random"),
        ("pause", 1.0, "mean seconds between two questions about a document"),
        ("port", 8100, "port of the server"),
        ("vocab-size", SMALLEST_VOCABULARY, "token ids are below this number"),
    ):
        parser.add_argument(f"--{name}", type=type(number), default=number, help=f"{text} (default: %(default)s)")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the server, too
    args.out.mkdir(parents=True, exist_ok=True)
    url, routing = f"http://127.0.0.1:{args.port}/v1", args.out / "routing"
    started = [sys.executable, "-m", "benchmarks.serving.routed_server", str(routing), "--port", str(args.port)]
    started += ["--data-parallel-size", "2", *args.flags]
    routing.write_text("random", encoding="utf-8")
    begin = time.perf_counter()
    try:
        with running(started, url, args.out / "replicas.log", {}):
            server = describe_server(url)
            print(f"started in {time.perf_counter() - begin:.1f} s", flush=True)
            runs = measure(args, url, server["model_id"], routing)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tokens = runs["two"]["output_throughput"] / runs["one"]["output_throughput"]
    first = runs["random"]["median_ttft_ms"] / runs["prefix"]["median_ttft_ms"]
    print(f"two engines over one: {tokens:.2f} times the tokens/s")
    print(f"random over prefix: {first:.2f} times the median time to the first token")
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command(),
        "server_command": shlex.join(started),
        "server": server,
        "device": device(),
        "tokens_two_over_one": tokens,
        "ttft_random_over_prefix": first,
    }
    (args.out / "replicas.json").write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace, url: str, model: str, routing: Path) -> dict[str, dict[str, Any]]:
    """Makes the four runs, and returns their figures. Raises RuntimeError if a request fails."""

    def run(name: str, rule: str, questions: Sequence[Question]) -> dict[str, Any]:
        routing.write_text(rule, encoding="utf-8")
        before = counters(url)
        result = send(url, model, questions, args.vocab_size)
        if result["failed"]:
            errors = {one["error"] for one in result["requests"] if one["error"]}
            raise RuntimeError(f"{result['failed']} requests have failed: {', '.join(sorted(errors))}")
        hits, queries = (counters(url)[key] - before[key] for key in ("hits", "queries"))
        result["cached_share"] = hits / queries
        shown = {key: result[key] for key in (*FIGURES, "cached_share")}
        print(name, " ".join(f"{key}={value:.4g}" for key, value in shown.items()), flush=True)
        return result

    send(url, model, draw_questions(args, 4, 4 * args.rate, WARM_UP), args.vocab_size)
    count = args.documents
    runs = {"one": run("one", "one", draw_questions(args, count, args.rate, 1))}
    runs["two"] = run("two", "prefix", draw_questions(args, 2 * count, 2 * args.rate, 2))
    rate = args.load * runs["two"]["request_throughput"]
    for name in ("prefix", "random"):
        runs[name] = run(name, name, draw_questions(args, 2 * count, rate, 3, name))
        runs[name]["rate"] = rate
    return runs


def send(url: str, model: str, questions: Sequence[Question], vocab_size: int) -> dict[str, Any]:
    """Sends questions at their times, and returns the figures of the answers."""
    replay = Replay(CompletionClient(url), questions)
    asyncio.run(replay.run(model, vocab_size))
    end = max((record.chunks[-1] for record in replay.records if record.chunks), default=replay.start)
    return result_of(replay.records, len(questions), replay.start, end)


def counters(url: str) -> dict[str, float]:
    """Values of ``COUNTERS`` now."""
    page = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=60).text
    values = {one.name: one.value for family in text_string_to_metric_families(page) for one in family.samples}
    return {key: values[name] for key, name in COUNTERS.items()}


if __name__ == "__main__":
    sys.exit(main())
