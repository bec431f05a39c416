"""What two runs of a suite over the same samples differ by, where they differ in more than the policy: weights, an
adapter, a server.

``python scripts/compare_runs.py RUN OTHER`` takes two folders of ``shadowkv eval``, made with one ``--seed``, and
prints for each length and policy the means of both, their paired difference with its 95 % interval, and how many
answers are equal to the letter.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from shadowkv.eval.records.predictions import Prediction, read_predictions
from shadowkv.eval.reports.statistics import mean_and_error, paired_interval

Pairs = dict[str, list[tuple[Prediction, Prediction]]]
"""By task."""


def paired(run: Path, other: Path) -> dict[tuple[int, str], Pairs]:
    """Predictions that both have, by length and policy; raises ValueError where there are none."""
    theirs = {(each.policy, each.sample): each for each in read_predictions(other)}
    pairs: dict[tuple[int, str], Pairs] = defaultdict(lambda: defaultdict(list))
    for one in read_predictions(run):
        if (answer := theirs.get((one.policy, one.sample))) is not None:
            pairs[one.length, one.policy][one.task].append((one, answer))
    if not pairs:
        raise ValueError(f"{run} and {other} have no sample and policy in common")
    return dict(sorted(pairs.items()))


def line(length: int, policy: str, pairs: Pairs) -> str:
    """A row of the table, in points of 100."""
    differences = [[100 * (one.score - other.score) for one, other in of_task] for of_task in pairs.values()]
    every = [pair for of_task in pairs.values() for pair in of_task]
    means = [100 * sum(pair[side].score for pair in every) / len(every) for side in (0, 1)]
    low, high = paired_interval(*differences)
    equal = sum(one.predictions == other.predictions for one, other in every)
    difference = f"{mean_and_error(*differences)[0]:+.2f} ({low:+.1f} to {high:+.1f})"
    return f"{length:7} {policy:24} {means[0]:6.1f} {means[1]:6.1f}  {difference:24} {equal} of {len(every)}"


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "other"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    args = parser.parse_args()
    try:
        pairs = paired(args.run, args.other)
    except (ValueError, OSError, EOFError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'length':>7} {'policy':24} {'run':>6} {'other':>6}  {'difference':24} equal answers")
    for (length, policy), of_cell in pairs.items():
        print(line(length, policy, of_cell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
