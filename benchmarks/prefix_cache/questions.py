"""Scores of RULER's ``niah_multiquery`` with and without a cached document. The keys are asked for one after the other.

With reuse, the first question computes the document, and the other questions hit it. Without reuse, each prompt is
computed from scratch. The first question is computed in both cases, so it is asked only once. A score is the share of
questions whose answer has the right value.

    python -m benchmarks.prefix_cache.questions --kv full turbo:dense_below=0 --length 4096 --out results/questions.csv
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.prefix_cache.hits import write_rows
from benchmarks.sweeps.engines import about, add_model_arguments, model_of, step
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.suites.ruler import samples
from shadowkv.eval.suites.ruler.needles import ONE

ANSWER = 16
"""Maximum number of tokens of an answer. The expected value has fewer tokens."""
COLUMNS = ("kv", "length", "samples", "questions", "score_reuse", "score_fresh", "difference", "difference_stderr")
COLUMNS += ("same_answers", "hit_rate", "ttft_reuse_s", "ttft_fresh_s")


def questions(prompt: str) -> list[tuple[str, str]]:
    """Returns a prompt for each key of a sample, with the expected value."""
    document = prompt.rpartition("\nWhat are all")[0]
    behind = "".join(ONE).partition("{context}")[2]
    needles = re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", document)
    return [(document + behind.format(kind="number", query=key), value) for key, value in needles]


def ask(engine: Engine, prompt: str, cache: bool) -> tuple[str, float, float]:
    """Returns the answer to a prompt, the seconds to its first token, and the share of the prompt that was cached."""
    tokens, start = engine.tokenizer.encode(prompt), time.monotonic()
    engine.add_request("alone", tokens, SamplingParams(max_tokens=ANSWER, temperature=0.0, cache_prompt=cache))
    answer, first, cached = list[int](), 0.0, 0
    while engine.has_work:
        for output in step(engine):
            first, cached = first or time.monotonic() - start, output.cached_tokens
            answer += output.token_ids
    return engine.tokenizer.decode(answer), first, cached / len(tokens)


def measure(args: argparse.Namespace, kv: str) -> Iterator[dict[str, Any]]:
    """Yields a policy's row after each sample. The row is over all samples so far."""
    engine = Engine(EngineConfig(kv=kv, max_num_seqs=2, max_model_len=args.length, dtype=args.dtype, **model_of(args)))
    scores, rows, same = list[tuple[float, float]](), list[tuple[float, float, float]](), list[bool]()
    for sample in samples("niah_multiquery", engine.tokenizer, args.length, args.samples, args.seed):
        first, *others = questions(sample.turns[0])
        first_found = first[1] in ask(engine, first[0], cache=True)[0]
        right = [[first_found, first_found]]
        for prompt, value in others:
            (reused, seconds, share), (computed, fresh, _) = ask(engine, prompt, True), ask(engine, prompt, False)
            right.append([value in reused, value in computed])
            same.append(reused == computed)
            rows.append((share, seconds, fresh))
        scores.append(tuple(sum(column) / len(right) for column in zip(*right)))
        reuse, fresh = (mean_and_error(list(column))[0] for column in zip(*scores))
        difference, error = mean_and_error([reused - computed for reused, computed in scores])
        rate, with_reuse, without = (mean_and_error(list(column))[0] for column in zip(*rows))
        figures = (kv, args.length, len(scores), len(rows) + len(scores), reuse, fresh, difference, error)
        figures += (sum(same) / len(same), rate, with_reuse, without)
        yield dict(zip(COLUMNS, figures, strict=True)) | about(engine)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    parser.add_argument("--kv", nargs="+", default=["full", "turbo:dense_below=0"], help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=20, help="documents (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    done = list[dict[str, Any]]()
    for kv in args.kv:
        row: dict[str, Any] = {}
        for row in measure(args, kv):
            write_rows(args.out, COLUMNS, [*done, row])
            print(" ".join(f"{name}={row[name]}" for name in COLUMNS), file=sys.stderr, flush=True)
        done.append(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
