"""Time to first token of a single request by prompt length, in an engine without a server.

Each combination of ``--kv``, ``--prefill`` and ``--quantization`` has an engine in a separate process, and a row for
each prompt length. ``first_ttft_s`` is the time of the first prompt of a length; for the shortest length, this is also
the first prompt of the process. ``ttft_s`` is the median of ``--repeats`` further prompts. Rows that the file already
has are not measured again. A plot is written beside the file. ``--short`` compares the default policy with ``full`` on
short prompts, which alternate between two engines in one process.

    python -m benchmarks.sweeps.prefill --model llama-3.1-8b --load-format dummy --kv full turbo \\
        --contexts 61440,124928,249856 --out results/prefill/summary.csv
    python -m benchmarks.sweeps.prefill --model llama-3.1-8b --load-format dummy --short --out results/prefill/short.csv
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

from benchmarks.sweeps import engines
from benchmarks.sweeps.engines import Cell
from benchmarks.sweeps.plots import plot_prefill
from benchmarks.sweeps.rows import PREFILL, SHORT, Rows
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config

CONTEXTS, SHORT_CONTEXTS = [61440, 124928, 249856], [256, 512, 1024, 2048, 4096, 8192]
SHARE = 0.5
"""With ``--short``: share of the device's memory that weights and the first of the two engines take."""

BATCH = 4
"""Number of sequences that an engine is opened for. With fewer, the engine would not compress a prompt of 61,440
tokens, because it would not pay."""

BEHIND = 64
"""Tokens that a sequence has room for in addition to the longest prompt."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = engines.sweep_parser(__doc__)
    parser.add_argument("--contexts", type=lengths, help="tokens of prompts (default: 61440,124928,249856)")
    parser.add_argument("--max-num-seqs", type=int, default=BATCH, help="(default: %(default)s)")
    text = "prompts after the first of a length (default: 3, short ones 9)"
    parser.add_argument("--repeats", type=int, choices=range(1, 100), metavar="N", help=text)
    parser.add_argument("--short", action="store_true", help="short prompts, the default policy against full")
    args = parser.parse_args(argv)
    if args.short:
        compare(args, args.contexts or SHORT_CONTEXTS, args.repeats or 9, Rows(args.out, SHORT))
        return 0
    contexts, well = args.contexts or CONTEXTS, True
    args.longest = max(contexts)
    rows = Rows(args.out, PREFILL)
    for cell in engines.combinations(args):
        left = [
            (context, density)
            for densities in (args.replay if cell["prefill"] != "dense" else [{}])
            for context in contexts
            for density in [engines.replayed_density(densities, context)]
            if not rows.has(cell | {"context": context, "replayed_density": density})
        ]
        if left:
            well &= engines.in_fresh_process(sweep, args, cell, left)
    if args.out.exists():
        plot_prefill(args.out)
    return 0 if well else 1


def lengths(text: str) -> list[int]:
    """Parses numbers of tokens separated by commas. Returns them in ascending order. Raises ArgumentTypeError for any
    other text."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of tokens, as 61440,124928")
    return sorted({int(part) for part in parts})


def sweep(args: argparse.Namespace, cell: Cell, left: list[tuple[int, float | None]]) -> None:
    """Measures and adds all rows of one engine: ``left`` has their prompt lengths and densities."""
    rows, draw = Rows(args.out, PREFILL), random.Random(0)
    engine = engines.opened(
        engines.config_of(args, cell, max_num_seqs=args.max_num_seqs, max_model_len=args.longest + BEHIND)
    )
    for context, density in left:
        engines.replay_blocks(engine, density)
        prompts = (engines.random_prompt(engine, context, draw) for _ in range(1 + (args.repeats or 3)))
        engine.cache.take_attention_density()
        first, *others = (engines.seconds_to_first_token(engine, prompt) for prompt in prompts)
        figures = {
            "context": context,
            "ttft_s": statistics.median(others),
            "first_ttft_s": first,
            "attention_density": engine.cache.take_attention_density(),
            "replayed_density": density,
        }
        rows.add(cell | figures | engines.about(engine))


def compare(args: argparse.Namespace, contexts: list[int], repeats: int, rows: Rows) -> None:
    """Adds a row for each length. Both engines get the same prompts: one that is not timed, then ``repeats`` whose
    times' medians are reported.

    Both engines have default settings, so they allow sequences as long as the model's maximum.
    """
    cell = {"kv": EngineConfig.kv, "prefill": EngineConfig.prefill, "quantization": "none"}
    config, draw = engines.config_of(args, cell), random.Random(0)
    loaded = load_from_config(config)
    full = engines.opened(engines.config_of(args, cell | {"kv": "full"}, gpu_memory_utilization=SHARE), loaded)
    compared = {"ttft_s": engines.opened(config, loaded), "full_ttft_s": full}
    for context in contexts:
        row = {"engine": engines.ENGINE, "kv": EngineConfig.kv, "context": context}
        if rows.has(row):
            continue
        times: dict[str, list[float]] = {name: [] for name in compared}
        for _ in range(1 + repeats):
            prompt = engines.random_prompt(full, context, draw)
            for name, engine in compared.items():
                times[name].append(engines.seconds_to_first_token(engine, prompt))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        ratio = medians["ttft_s"] / medians["full_ttft_s"]
        rows.add(row | medians | {"ratio": ratio} | engines.about(compared["ttft_s"]))


if __name__ == "__main__":
    sys.exit(main())
