"""Concurrent short and long requests in an engine without a server: throughput, time to first token, and time per
token.

A case is written as number of requests x prompt tokens + answer tokens. All requests are submitted together, and their
greedy answers run to the last token. Each case has its own engine. It runs all requests of the case concurrently, or at
most ``--max-num-seqs``. With ``--gaps``, no cases are measured, but how a long prompt affects decoding requests and a
short prompt. Rows that the file already has are not measured again.

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
from typing import NamedTuple

import numpy as np

from benchmarks.sweeps import engines
from benchmarks.sweeps.engines import Cell
from benchmarks.sweeps.rows import GAPS, MIXED, Rows
from shadowkv.engine.engine import Engine

WARM_UP = 16384
"""Maximum number of prompt tokens, in at most 16 requests, of the warm-up before a case."""

SETTLED = 32
"""Number of tokens that every request has generated before the long prompt arrives. By then, the CUDA graphs of the
decode steps are captured. The graph of the batch with the long request is captured in the last gap, as in a server."""

LEFT = 8
"""Tokens of a long prompt's answer. They are so many that the request is still running after the step of its first
token."""


class Case(NamedTuple):
    """``requests`` requests of ``input`` tokens that are answered with ``output`` tokens each."""

    requests: int
    input: int
    output: int


class GapCase(NamedTuple):
    """Two measurements: ``decoding`` requests that decode while a prompt of ``behind`` tokens is computed, and a prompt
    of ``probe`` tokens that arrives while one of ``probe_behind`` tokens is computed."""

    decoding: int
    behind: int
    probe: int
    probe_behind: int
    prompt: int = 1024
    answer: int = 8192
    delay: float = 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.behind, self.probe_behind, self.prompt + self.answer) + 64


GAP_CASE = GapCase(16, 61440, 512, 124928)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = engines.sweep_parser(__doc__)
    cases = ["256x1024+256", "64x8192+128", "48x61184+512"]
    parser.add_argument("--cases", nargs="+", type=case, default=list(map(case, cases)), help=f"(default: {cases})")
    parser.add_argument("--gaps", action="store_true", help="gaps between tokens beside a prefill, instead of cases")
    parser.add_argument("--max-num-seqs", type=int, help="at once (default: all)")
    parser.add_argument("--max-model-len", type=int, help="(default: the longest of all cases)")
    args = parser.parse_args(argv)
    well, rows = True, Rows(args.out, GAPS if args.gaps else MIXED)
    args.max_model_len = args.max_model_len or max(one.input + one.output for one in args.cases)
    for cell in engines.combinations(args):
        for one in [GAP_CASE] if args.gaps else args.cases:
            for densities in args.replay if cell["prefill"] != "dense" else [{}]:
                longest = one.behind if isinstance(one, GapCase) else one.input
                cell["replayed_density"] = engines.replayed_density(densities, longest)
                if not rows.has(cell | one._asdict()):
                    well &= engines.in_fresh_process(sweep, args, cell, one)
    return 0 if well else 1


def case(text: str) -> Case:
    """Parses a case. Raises ArgumentTypeError for any other text."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not requests x prompt + answer tokens, as 64x8192+128")
    return Case(*map(int, match.groups()))


def sweep(args: argparse.Namespace, cell: Cell, case: Case | GapCase) -> None:
    """Measures and adds one row."""
    if isinstance(case, GapCase):
        at_once, longest = case.decoding + 2, case.longest
    else:
        at_once, longest = min(case.requests, args.max_num_seqs or case.requests), args.max_model_len
    engine = engines.engine_of(args, cell, max_num_seqs=at_once, max_model_len=longest)
    figures = measure_gaps(engine, case) if isinstance(case, GapCase) else measure(engine, case)
    Rows(args.out, GAPS if args.gaps else MIXED).add(cell | case._asdict() | figures | engines.about(engine))


def measure(engine: Engine, case: Case) -> dict[str, float | None]:
    """Runs a few of a case's requests as warm-up. Returns the figures of the case."""
    few = max(1, min(case.requests, 16, WARM_UP // case.input))
    serve(engine, case._replace(requests=few, output=min(8, case.output)), seed=1)
    return serve(engine, case, seed=0)


def serve(engine: Engine, case: Case, seed: int) -> dict[str, float | None]:
    """Runs all requests, and returns the figures. Times count from just before the first request is submitted."""
    draw, ends = random.Random(seed), []
    prompts = [engines.random_prompt(engine, case.input, draw) for _ in range(case.requests)]
    start = time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, engines.greedy(case.output))
    while engine.has_work:
        ends += [output.times for output in engines.step(engine) if output.finish_reason]
    wall = time.monotonic() - start
    spans = [(times.first_token, times.last_token) for times in ends]
    per_token = [(last - first) / (case.output - 1) for first, last in spans] if case.output > 1 else None
    return {
        "wall_s": wall,
        "output_tokens_per_s": case.requests * case.output / wall,
        "ttft_mean_s": statistics.mean(first - start for first, _ in spans),
        "tpot_ms": 1e3 * statistics.mean(per_token) if per_token else None,
    }


def measure_gaps(engine: Engine, case: GapCase) -> dict[str, float]:
    """Returns the figures of both measurements. Afterwards the engine has no requests."""
    draw = random.Random(0)
    engines.seconds_to_first_token(
        engine, engines.random_prompt(engine, case.behind, draw)
    )  # warm-up for the shapes of a long prompt
    gaps = gaps_beside(engine, case, draw)
    print("gaps of a request, ms:", *(f"{1e3 * gap:.1f}" for gap in gaps[0]), flush=True)
    p50, p99 = np.percentile(1e3 * np.concatenate(gaps), (50, 99)).tolist()
    return {"gap_p50_ms": p50, "gap_p99_ms": p99, "probe_ttft_s": wait_behind(engine, case, draw)}


def gaps_beside(engine: Engine, case: GapCase, draw: random.Random) -> list[list[float]]:
    """Returns the seconds between the tokens of each decoding request, in order, from the last token before a long
    prompt is submitted to the long prompt's first token. Raises RuntimeError if answers end earlier, or if the long
    prompt has no room beside them."""
    times: dict[str, list[float]] = {str(number): [] for number in range(case.decoding)}
    for name in times:
        engine.add_request(name, engines.random_prompt(engine, case.prompt, draw), engines.greedy(case.answer))
    prompt = engines.random_prompt(engine, case.behind, draw)  # made in advance: it takes as long as a step or two
    while min(map(len, times.values())) < SETTLED:
        _take(engine, times)
    times = {name: [seen[-1]] for name, seen in times.items()}
    engine.add_request("long", prompt, engines.greedy(LEFT))
    answered = False
    while not answered:
        answered = "long" in _take(engine, times)
        if engine.num_running <= case.decoding:
            raise RuntimeError(f"answers of {case.answer} tokens left no room for a prefill of {case.behind}, or ended")
    for name in (*times, "long"):
        engine.abort(name)
    return [np.diff(seen).tolist() for seen in times.values()]


def _take(engine: Engine, times: dict[str, list[float]]) -> set[str]:
    """Makes a step, and records the time of each request's token. Returns the names of the requests that got tokens."""
    names, now = {output.request_id for output in engines.step(engine)}, time.perf_counter()
    for name in names & times.keys():
        times[name].append(now)
    return names


def wait_behind(engine: Engine, case: GapCase, draw: random.Random) -> float:
    """Returns the seconds to the first token of a short prompt that arrives while only a long prompt is computed."""
    prompt, probe = (engines.random_prompt(engine, tokens, draw) for tokens in (case.probe_behind, case.probe))
    start = time.perf_counter()
    engine.add_request("long", prompt, engines.greedy(LEFT))
    while time.perf_counter() - start < case.delay:
        engines.step(engine)
    start = time.perf_counter()
    engine.add_request("probe", probe, engines.greedy(1))
    while "probe" not in _take(engine, {}):
        pass
    seconds = time.perf_counter() - start
    engine.abort("long")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
