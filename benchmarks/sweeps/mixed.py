"""Concurrent requests, short and long: throughput, times to first token and per token, through ``Engine.step``.

A case is requests x prompt + answer tokens, all submitted together, greedy, to the last token. Each has its own engine,
for as many concurrent sequences as the case has requests, or as ``--max-num-seqs`` says. With ``--gaps`` there are no
cases; it measures how a long prompt affects decoding requests and a short prompt. Rows that the file already has are
not measured again.

    python -m benchmarks.sweeps.mixed --model llama-3.1-8b --load-format dummy --kv full turbo --out results/mixed.csv
    python -m benchmarks.sweeps.mixed --model llama-3.1-8b --load-format dummy --gaps --out results/gaps.csv
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.sweeps.engines import (
    Cell,
    about,
    add_arguments,
    combinations,
    engine_of,
    greedy,
    in_fresh_process,
    random_prompt,
    replayed_density,
    step,
)
from benchmarks.sweeps.mixed_gaps import GAP_CASE, GapCase, measure_gaps
from benchmarks.sweeps.rows import GAPS, MIXED, Rows
from shadowkv.engine.engine import Engine

WARM_UP = 16384
"""Prompt tokens, from at most 16 requests, that an engine is given before those that count."""


class Case(NamedTuple):
    """``requests`` requests of ``input`` tokens that are answered with ``output`` tokens each."""

    requests: int
    input: int
    output: int


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    cases = ["256x1024+256", "64x8192+128", "48x61184+512"]
    parser.add_argument("--cases", nargs="+", type=case, default=list(map(case, cases)), help=f"(default: {cases})")
    parser.add_argument("--gaps", action="store_true", help="gaps between tokens beside a prefill, instead of cases")
    parser.add_argument("--max-num-seqs", type=int, help="at once (default: all)")
    parser.add_argument("--max-model-len", type=int, help="(default: the longest of all cases)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    well, rows = True, Rows(args.out, GAPS if args.gaps else MIXED)
    args.max_model_len = args.max_model_len or max(one.input + one.output for one in args.cases)
    for cell in combinations(args):
        for one in [GAP_CASE] if args.gaps else args.cases:
            for densities in args.replay if cell["prefill"] != "dense" else [{}]:
                longest = one.behind if isinstance(one, GapCase) else one.input
                cell["replayed_density"] = replayed_density(densities, longest)
                if not rows.has(cell | one._asdict()):
                    well &= in_fresh_process(sweep, args, cell, one)
    return 0 if well else 1


def case(text: str) -> Case:
    """Parses a case; raises ArgumentTypeError for anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not requests x prompt + answer tokens, as 64x8192+128")
    return Case(*map(int, found.groups()))


def sweep(args: argparse.Namespace, cell: Cell, one: Case | GapCase) -> None:
    """One row."""
    if isinstance(one, GapCase):
        at_once, longest = one.decoding + 2, one.longest
    else:
        at_once, longest = min(one.requests, args.max_num_seqs or one.requests), args.max_model_len
    engine = engine_of(args, cell, max_num_seqs=at_once, max_model_len=longest)
    figures = measure_gaps(engine, one) if isinstance(one, GapCase) else measure(engine, one)
    Rows(args.out, GAPS if args.gaps else MIXED).add(cell | one._asdict() | figures | about(engine))


def measure(engine: Engine, one: Case) -> dict[str, float | None]:
    """Figures of a case, after a few of its requests as warm-up."""
    few = max(1, min(one.requests, 16, WARM_UP // one.input))
    serve(engine, one._replace(requests=few, output=min(8, one.output)), seed=1)
    return serve(engine, one, seed=0)


def serve(engine: Engine, one: Case, seed: int) -> dict[str, float | None]:
    """Runs all requests; seconds count from just before the first was submitted."""
    draw, ends = random.Random(seed), []
    prompts = [random_prompt(engine, one.input, draw) for _ in range(one.requests)]
    start = time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(one.output))
    while engine.has_work:
        ends += [output.times for output in step(engine) if output.finish_reason]
    wall = time.monotonic() - start
    spans = [(times.first_token, times.last_token) for times in ends]
    per_token = [(last - first) / (one.output - 1) for first, last in spans] if one.output > 1 else None
    return {
        "wall_s": wall,
        "output_tokens_per_s": one.requests * one.output / wall,
        "ttft_mean_s": statistics.mean(first - start for first, _ in spans),
        "tpot_ms": 1e3 * statistics.mean(per_token) if per_token else None,
    }


if __name__ == "__main__":
    sys.exit(main())
