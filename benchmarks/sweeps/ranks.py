"""One model on several GPUs compared with one GPU, in an engine without a server: time to first token, and decode steps
of single sequences and of the largest batches.

Each combination of ``--gpus``, ``--quantization``, ``--prefill``, ``--kv``, ``--context`` and ``--batch`` has an engine
in a separate process, and two rows: one for single prompts, and one for decode steps of the batch. The batch's
sequences have random keys and values on every rank. A row's ``ratio`` is its speed relative to the same combination on
one GPU. If that was not measured, it is relative to ``full`` on the same number of GPUs. Rows that the file already has
are not measured again.

    python -m benchmarks.sweeps.ranks --model llama-3.1-8b --load-format dummy --gpus 1 2 --kv full turbo \\
        --context 124928 --batch auto 1 --replay 61440=0.06,124928=0.03 --out results/h200x2/summary.csv
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweeps import engines
from benchmarks.sweeps.engines import Cell
from benchmarks.sweeps.rows import RANKS, Rows, read
from benchmarks.sweeps.synthetic import begin, scatter
from shadowkv.engine.config import EngineConfig
from shadowkv.kvcache.policy.spec import FETCH_BUFFER
from shadowkv.models.loader import load_plan
from shadowkv.models.sharding import Shard
from shadowkv.plan.planner import Machine, Planner
from shadowkv.wording import GIB

UTILIZATION = 0.97
"""Share of a GPU's memory that an engine uses. The rest is left for activations, NCCL and captured CUDA graphs."""

FEWEST = 4
"""Minimum number of sequences that an engine is opened for. With fewer, the engine would not compress a prompt of
61,440 tokens, because it would not pay."""

WARM_STEPS = 16


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = engines.sweep_parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="ranks of a model (default: 1 2)")
    parser.add_argument("--context", type=int, nargs="+", default=[61440], help="tokens (default: 61440)")
    parser.add_argument("--batch", nargs="+", default=["auto"], help="sequences, or auto for as many as fit")
    parser.add_argument("--prompts", type=int, default=2, help="timed prompts after the first (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=3, help="timed windows (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a window (default: %(default)s)")
    args = parser.parse_args(argv)
    for batch in args.batch:
        if batch != "auto" and not (batch.isdecimal() and int(batch)):
            parser.error(f"--batch {batch} is neither auto nor a number of sequences")
    rows, well = Rows(args.out, RANKS), True
    asked = itertools.product(engines.combinations(args), args.replay, args.context, args.gpus, args.batch)
    for cell, densities, context, gpus, batch in asked:
        density = None if cell["prefill"] == "dense" else engines.replayed_density(densities, context)
        asked_cell = cell | {"context": context, "gpus": gpus, "asked": batch, "replayed_density": density}
        if not rows.has(row_of(args, asked_cell, of_batch(asked_cell))):
            well &= engines.in_fresh_process(measure, args, asked_cell)
    return 0 if well else 1


def row_of(args: argparse.Namespace, cell: Cell, what: str) -> Cell:
    """Returns the first columns of a cell's row. ``what`` is the name of one of its two rows."""
    weights = "" if cell["quantization"] == "none" else f" {cell['quantization']}"
    case = f"{Path(args.model).name}{weights}, {cell['prefill']} prefill, {what}"
    return {name: cell[name] for name in ("gpus", "kv", "context", "replayed_density")} | {"case": case}


def of_batch(cell: Cell) -> str:
    """Returns the name of a cell's second row."""
    return "largest batch" if cell["asked"] == "auto" else f"batch of {cell['asked']}"


def measure(args: argparse.Namespace, cell: Cell) -> None:
    """Measures and adds both rows of one engine."""
    rows, draw, context = Rows(args.out, RANKS), random.Random(0), cell["context"]
    room = WARM_STEPS + args.steps * args.windows + 64
    count = fitting(args, cell, context + room) if cell["asked"] == "auto" else int(cell["asked"])
    if not count:
        raise MemoryError(f"not one sequence of {context} tokens fits on {cell['gpus']} GPUs")
    engine = engines.opened(engine_config(args, cell, max(count, FEWEST), context + room))
    try:
        scatter(engine.cache)
        ours = row_of(args, cell, "prompt")
        engines.replay_blocks(engine, ours["replayed_density"])
        if not rows.has(ours):
            seconds = [
                engines.seconds_to_first_token(engine, engines.random_prompt(engine, context, draw))
                for _ in range(1 + args.prompts)
            ]
            first = statistics.median(seconds[1:])
            figures = {"batch": 1, "ttft_s": first, "tokens_per_s": context / first}
            rows.add(ours | figures | {"ratio": ratio(args.out, ours, figures)} | engines.about(engine))
        ours = row_of(args, cell, of_batch(cell))
        need = engine.cache.demand(context, context + room)
        count = min(count, *(engine.cache.total[tier] // need[tier] for tier in need if need[tier]))
        begin(engine, [engines.random_prompt(engine, context, draw) for _ in range(count)], room, synthetic=True)
        engines.window(engine, WARM_STEPS, count)
        step = statistics.median(engines.window(engine, args.steps, count).seconds for _ in range(args.windows))
        figures = {"batch": count, "step_ms": 1e3 * step, "tokens_per_s": count / step}
        rows.add(ours | figures | {"ratio": ratio(args.out, ours, figures)} | engines.about(engine))
    finally:
        engine.close()


def engine_config(args: argparse.Namespace, cell: Cell, batch: int, tokens: int) -> EngineConfig:
    """Returns the config of a cell's engine."""
    share = UTILIZATION if torch.cuda.is_available() else None
    many = {"max_num_seqs": batch, "tensor_parallel_size": cell["gpus"], "gpu_memory_utilization": share}
    return engines.config_of(args, cell, max_model_len=tokens, **many)


def fitting(args: argparse.Namespace, cell: Cell, tokens: int) -> int:
    """Returns how many sequences of ``tokens`` tokens fit on the GPUs, each of which has its part of the model, as the
    planner counts."""
    total = torch.cuda.get_device_properties(0).total_memory
    quantization = None if cell["quantization"] == "none" else cell["quantization"]
    config, forms = load_plan(args.model, quantization=quantization)
    shard = Shard(config, 0, cell["gpus"])
    machine = Machine(total / GIB, UTILIZATION, None, 1.0, 1.0)
    planner = Planner(shard, torch.bfloat16, tokens, machine, 0.0, FETCH_BUFFER, forms=forms)
    return planner.plan(EngineConfig(kv=cell["kv"])).largest_batch.both


def ratio(out: Path, ours: Cell, figures: dict[str, Any]) -> float | None:
    """Returns the speed relative to the same combination on one GPU, or else to ``full`` on the same number of GPUs.
    None if the file has neither."""
    if not out.exists():
        return None
    same = [row for row in read(out) if (row["case"], row["context"]) == (ours["case"], str(ours["context"]))]
    bases = [row for row in same if (row["gpus"], row["kv"]) == ("1", ours["kv"]) and ours["gpus"] > 1]
    bases += [row for row in same if (row["gpus"], row["kv"]) == (str(ours["gpus"]), "full") and ours["kv"] != "full"]
    return figures["tokens_per_s"] / float(bases[0]["tokens_per_s"]) if bases else None


if __name__ == "__main__":
    sys.exit(main())
