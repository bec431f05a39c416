"""Speed and memory with weights in every format, on one GPU: loading, a prompt, and steps of one sequence and of many.

There is a row for each format, policy, context and batch. Rows that the file already has are not measured again. With
``plain``, weights are in 16 bits, or in the format of the files of ``--model``. Other names are formats of random
weights (``--load-format dummy``), or ``fp8``. Every format is loaded in a process of its own, so that the time to load
is that of a server's start. If a command runs for the second time, kernels that the first run compiled are reused.
``ttft_s`` is the time to first token of the prompt after ``--warm-prompts`` others.

    python -m benchmarks.sweeps.weights --model llama-3.1-8b --load-format dummy --formats plain fp8 gptq nvfp4 \\
        --kv full turbo --cells 1x1024 1x8192 autox61440 autox124928 --replay 61440=0.1738,124928=0.1058 \\
        --out weights.csv
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.sweeps import throughput
from benchmarks.sweeps.engines import ENGINE, about_spec, in_fresh_process
from benchmarks.sweeps.rows import WEIGHTS, Rows
from shadowkv.engine.config import add_policies
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.provenance import provenance
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.load_settings import QUANTIZATIONS
from shadowkv.wording import GIB

PLAIN = "plain"


def measure(args: argparse.Namespace, form: str) -> None:
    """Measures and adds the rows of one format."""
    args.quantization = None if form == PLAIN else form
    rows = Rows(args.out, WEIGHTS, replayed=())
    start = time.perf_counter()
    loaded = load_from_config(throughput.config_of(args, args.kv[0], 1, max(context for _, context in args.cells)))
    torch.cuda.synchronize()
    seconds, nbytes = time.perf_counter() - start, loaded.model.num_bytes
    print(*loaded.notes, sep="\n")
    name = "+".join(loaded.model.forms) or loaded.config.quantization or str(loaded.model.dtype).removeprefix("torch.")
    for batch, context in args.cells:
        for kv in args.kv:
            count = batch or throughput.fitting(args, loaded, kv, context)
            row = {"model": Path(args.model).name, "format": name, "kv": kv, "gpus": loaded.shard.size}
            row |= {"context": context, "batch": count}
            if rows.has(row):
                continue
            cell = throughput.measure(args, loaded, kv, context, str(count))
            if cell["status"] != "ok":
                print(f"{name} {kv} {context} x {count}: {cell['status']}", file=sys.stderr, flush=True)
                continue
            figures = {
                "ttft_s": cell["ttft_s"],
                "step_ms": cell["step_ms"],
                "tokens_per_s": cell["decode_tokens_per_s"],
                "weights_gib": nbytes / GIB,
                "kv_gib_per_sequence": cell["device_gib_per_sequence"],
                "load_s": seconds,
                "engine": ENGINE,
                "replayed_density": cell["replayed_density"],
            }
            rows.add(row | figures | about_spec(KVSpec().changed(**cell["spec"]), provenance()["gpu"] or "cpu"))
            gc.collect()
            torch.cuda.empty_cache()


def batch_and_context(text: str) -> tuple[int | None, int]:
    """Parses a number of sequences (``auto``, for as many as fit, becomes None) and the tokens of each. Raises
    ArgumentTypeError for any other text."""
    match = re.fullmatch(r"(auto|[1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not sequences x tokens, as 1x1024, or autox61440")
    batch, context = match.groups()
    return None if batch == "auto" else int(batch), int(context)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. The result also has the flags of the throughput sweep, which measures a cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="(default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=[PLAIN], choices=(PLAIN, *QUANTIZATIONS))
    text = "sequences x tokens, or auto for as many as fit (default: 1x1024 autox61440)"
    parser.add_argument("--cells", nargs="+", default=[(1, 1024), (None, 61440)], type=batch_and_context, help=text)
    add_policies(parser, "full", "turbo")
    throughput.add_timing_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(given)
    others = throughput.command().parse_args(["--synthetic-prefill", "--out", str(args.out)])
    return argparse.Namespace(**vars(others) | vars(args))


def main() -> int:
    """Runs the command; returns the exit status."""
    args = arguments()
    return 0 if all([in_fresh_process(measure, args, form) for form in args.formats]) else 1


if __name__ == "__main__":
    sys.exit(main())
