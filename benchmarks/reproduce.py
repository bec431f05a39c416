"""Reproduces README's RULER table from a fresh clone: runs the evaluations of one seed of each column, and shows each
new figure beside the recorded one, both on the same samples.

    make reproduce                                   # SmolLM2's columns, in results/reproduce
    python -m benchmarks.reproduce --out DIR --length 16384 --samples 2 --kv full

It needs the extra ``eval``, which ``make reproduce`` installs. Qwen's columns need its GGUF file (``--qwen``). A run
that was stopped continues from its last answer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.figures.answers import BEFORE, DEFAULT
from shadowkv.eval.records.predictions import Prediction, PredictionFile, read_predictions, write_text
from shadowkv.eval.reports.statistics import mean_and_error

RECORDED = Path(__file__).parent / "results" / "h200" / "ruler_four_seeds"
POLICIES = ("full", "full:prefill=sparse", DEFAULT, f"{DEFAULT},{BEFORE}")
"""The table's rows with sparse prefill; the last is the default before. Not every column has all of them."""

Sample = tuple[str, str]
"""A sample's task and id."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        model: the model's name in the table.
        folder: name of the folder of the recorded answers, and of the folder of the new ones.
        seed: the evaluation in that folder, and the seed of its samples.
        length: tokens of the samples.
        flags: flags of ``shadowkv eval`` that choose the model.
    """

    model: str
    folder: str
    seed: int
    length: int
    flags: tuple[str, ...]

    def predictions(self) -> list[Prediction]:
        """Returns the recorded answers."""
        return read_predictions(RECORDED / self.folder / str(self.seed))

    def seconds(self) -> float:
        """Returns the seconds that the recorded run took: the prefills, which the policies of a run share, and each
        policy's own time."""
        answers = self.predictions()
        prefills = {(one.task, one.id, one.prefill_seconds or 0.0) for one in answers}
        return sum(seconds for _, _, seconds in prefills) + sum(one.seconds for one in answers)


def columns(qwen: Path | None) -> list[Column]:
    """Returns README's columns. Qwen's are included only if its file is given."""
    model = ("--model", "smollm2-135m-64k")
    found = [
        Column("SmolLM2-135M", "smollm2_16k", 201, 16384, model),
        Column("SmolLM2-135M", "smollm2_32k", 101, 32768, model),
    ]
    if qwen is not None:
        model = ("--model", str(qwen), "--quantization", "none")
        found.append(Column("Qwen2.5-Coder-1.5B", "qwen_16k", 201, 16384, model))
        found.append(Column("Qwen2.5-Coder-1.5B", "qwen_32k", 201, 32768, model))
    return found


def scores(predictions: Iterable[Prediction]) -> dict[str, dict[Sample, float]]:
    """Returns the scores by policy and by sample."""
    found: dict[str, dict[Sample, float]] = defaultdict(dict)
    for one in predictions:
        found[one.policy][one.task, one.id] = one.score
    return found


def command(column: Column, policies: Sequence[str], samples: int | None, out: Path) -> list[str]:
    """Returns the command that answers a column's samples with those of the policies that were recorded."""
    recorded = scores(column.predictions())
    most = number_of_samples(recorded[POLICIES[0]])
    wanted = ["--seed", str(column.seed), "--length", str(column.length), "--samples", str(min(samples or most, most))]
    kvs = [policy for policy in policies if policy in recorded]
    return [sys.executable, "-m", "shadowkv.eval", "ruler", *column.flags, *wanted, "--kv", *kvs, "--out", str(out)]


def number_of_samples(asked: Iterable[Sample]) -> int:
    """Returns the number of samples of the task that has the most."""
    counts: dict[str, int] = defaultdict(int)
    for task, _ in asked:
        counts[task] += 1
    return max(counts.values(), default=0)


def cell(policy: str, new: dict[str, dict[Sample, float]], recorded: dict[str, dict[Sample, float]]) -> str:
    """Returns a policy's score (for ``full``) or difference to ``full``, in points, with the recorded figure in
    brackets. Both are over the samples that have new and recorded answers of the policy and of ``full``. Then follows
    the mean change of a sample's score since the record, with its standard error."""
    base = POLICIES[0]
    shared = sorted(set(new[policy]) & set(new[base]) & set(recorded[policy]) & set(recorded[base]))
    if not shared:
        return "–"
    by_task: dict[str, list[float]] = defaultdict(list)
    figures = []
    for source in (new, recorded):
        values = [source[policy][one] - (0 if policy == base else source[base][one]) for one in shared]
        figures.append(100 * sum(values) / len(values))
    for one in shared:
        by_task[one[0]].append(100 * (new[policy][one] - recorded[policy][one]))
    mean, error = mean_and_error(*by_task.values())
    shown = "{:.1f} ({:.1f})" if policy == base else "{:+.1f} ({:+.1f})"
    return f"{shown.format(*figures)}; {mean:+.1f} ± {error:.1f}, n = {len(shared)}"


def table(chosen: Sequence[Column], out: Path) -> str:
    """Returns the table in Markdown."""
    lines = [
        "RULER: scores of `full` and differences to it in points, in brackets the recorded ones, over the same samples."
        " Then the mean change of a sample's score since the record ± its standard error.\n",
        "| | " + " | ".join(f"{column.model}, {column.length // 1024}K" for column in chosen) + " |",
        "| --- |" + " ---: |" * len(chosen),
    ]
    pairs = []
    for column in chosen:
        new = scores(PredictionFile(out / column.folder / "predictions.jsonl").predictions)
        pairs.append((new, scores(column.predictions())))
    lines += [f"| `{policy}` | {' | '.join(cell(policy, *pair) for pair in pairs)} |" for policy in POLICIES]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduce", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="answers; what is there is not run again"
    )
    parser.add_argument("--length", type=int, nargs="+", choices=(16384, 32768), help="columns (default: all)")
    parser.add_argument("--samples", type=int, metavar="N", help="of every task, at most (default: as recorded)")
    parser.add_argument("--kv", nargs="+", choices=POLICIES, default=POLICIES, help="rows (default: all)")
    parser.add_argument("--qwen", type=Path, metavar="FILE", help="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    args = parser.parse_args()
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples {args.samples} must be at least 1")
    if POLICIES[0] not in args.kv:
        parser.error(f"--kv needs {POLICIES[0]}, to which the others are compared")
    if args.qwen is not None and not args.qwen.is_file():
        parser.error(f"--qwen {args.qwen} is not a file")
    chosen = [column for column in columns(args.qwen) if not args.length or column.length in args.length]
    if not torch.cuda.is_available():
        print(
            "Without a GPU a prompt of 16,384 tokens takes minutes, and sparse prefill runs in PyTorch: take --length"
            " 16384 --samples 1 --kv full, and let it run. All else needs a GPU.",
            file=sys.stderr,
        )
    for column in chosen:
        print(
            f"{column.model}, {column.length} tokens: {column.seconds() / 60:.0f} minutes on an H200", file=sys.stderr
        )
        run = command(column, args.kv, args.samples, args.out / column.folder)
        done = subprocess.run(run, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return done.returncode
        write_text(args.out / "table.md", table(chosen, args.out))
    print((args.out / "table.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
