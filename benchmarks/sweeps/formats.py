"""One table of all formats and policies: bytes, distortion, fidelity, RULER and decode throughput, by one command.

Stages are measured one after the other, each into ``<stage>.csv`` of ``--out``; existing rows are not measured again,
so that the command continues where it stopped, and parts of it may run on other machines (``--stages``, ``--kv``).
``table`` joins what there is: ``summary.csv``, the table in ``--docs``, and plots. What was not measured stays empty.

    python -m benchmarks.sweeps.formats --adapter DIR --rope-theta 4e6 --out benchmarks/results/h200/formats
    python -m benchmarks.sweeps.formats --adapter DIR --rope-theta 4e6 --out benchmarks/results/h200/formats \\
        --stages bytes distortion fidelity table --device cpu
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.sweeps.format_stages import CONTEXTS, LENGTHS, STAGES, open_rows
from benchmarks.sweeps.format_summary import summarise
from shadowkv.engine.config import DEFAULT_MODEL, policy_name
from shadowkv.kvcache.presets import POLICY_HELP, PRESETS
from shadowkv.load_settings import LOAD_FORMATS, OVERRIDES_HELP, parse_overrides

TABLE = "table"
SAMPLES = 25
LONG_KV = ["full", "shadowkv", "turbo", "turbo-host", "turboquant-4"]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = parser().parse_args(arguments)
    args.samples = {None: SAMPLES, **dict(args.samples)}
    args.out.mkdir(parents=True, exist_ok=True)
    well = True
    for name, (_, measure) in STAGES.items():
        if name not in args.stages:
            continue
        try:
            measure(args, open_rows(args.out, name))
        except (RuntimeError, MemoryError) as error:  # the other stages do not need this one
            print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            well = False
    if TABLE in args.stages:
        summarise(args.out, args.docs)
    return 0 if well else 1


def samples(text: str) -> tuple[str | None, int]:
    """A number of samples, after a policy's name or for all others; raises ArgumentTypeError for anything else."""
    kv, named, count = text.rpartition("=")
    if not count.isdecimal() or not int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples, as 25, or of a policy, as turbo=50")
    return (policy_name(kv) if named else None), int(count)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    stages = (*STAGES, TABLE)
    add("--stages", nargs="+", choices=stages, default=stages, help="(default: all)")
    add("--kv", nargs="+", type=policy_name, default=list(PRESETS), help=f"{POLICY_HELP} (default: all)")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--docs", type=Path, default=Path("docs/formats.md"), help="file that has the table (default: %(default)s)")
    quality = parser.add_argument_group("distortion, fidelity and RULER")
    add = quality.add_argument
    add("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    add("--adapter", metavar="DIR", help="PEFT LoRA directory, merged at load")
    add("--rope-theta", type=float, help="overrides the model's own")
    add("--hf-overrides", type=parse_overrides, metavar="JSON", help=OVERRIDES_HELP)
    add("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--text", type=Path, nargs="+", metavar="FILE", help="natural text (default: RULER's essays)")
    add("--prompts", type=int, default=4, help="cut from the text (default: %(default)s)")
    add("--prompt-tokens", type=int, default=2048, help="(default: %(default)s)")
    add("--new-tokens", type=int, default=16, help="that full generates after each (default: %(default)s)")
    add("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="of RULER (default: both)")
    add("--tasks", nargs="+", metavar="TASK", help="of RULER (default: all)")
    add(
        "--samples",
        nargs="+",
        type=samples,
        default=[(None, SAMPLES), ("turbo", 2 * SAMPLES)],
        metavar="[POLICY=]N",
        help=f"of each of RULER's tasks and lengths (default: {SAMPLES} turbo={2 * SAMPLES})",
    )
    speed = parser.add_argument_group("bytes and throughput")
    add = speed.add_argument
    add("--speed-model", default="llama-3.1-8b", help="its weights are random (default: %(default)s)")
    add("--contexts", type=int, nargs="+", choices=CONTEXTS, default=CONTEXTS, help="of throughput (default: both)")
    add(
        "--long-kv",
        nargs="+",
        type=policy_name,
        default=LONG_KV,
        help=f"policies at {CONTEXTS[1]} tokens (default: {' '.join(LONG_KV)})",
    )
    add(
        "--hit-rate",
        type=float,
        metavar="SHARE",
        help="as for throughput_sweep.py (default: %(default)s)",
        default=0.72,
    )
    add("--windows", type=int, help="as for throughput_sweep.py")
    add("--steps", type=int, help="as for throughput_sweep.py")
    add("--host-memory-gib", type=float, help="as for throughput_sweep.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
