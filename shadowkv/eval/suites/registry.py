"""The suites by name. A suite makes its samples from the command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import infinitebench, longbench, mrcr, niah, open_ended, ruler, stress
from shadowkv.models.tokenization.tokenizer import Tokenizer

Suite = Callable[[argparse.Namespace, Tokenizer], list[Sample]]


def niah_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """Returns the samples of the suite ``niah`` for every length and depth."""
    return [
        sample
        for length in args.length
        for sample in niah.samples(
            args.haystack,
            lambda text: len(tokenizer.encode(text)),
            length,
            args.samples,
            tasks=chosen(args.tasks, niah.TASKS),
            depths=args.depths,
            needles=args.needles,
            turns=args.turns,
            seed=args.seed,
        )
    ]


def _by_task(make: Callable[..., list[Sample]], tasks: Sequence[str], *options: str, needs_data: bool = False) -> Suite:
    """Returns a suite with the samples of every length and, for each length, of every task. The suite makes samples in
    several threads: most of the time is spent in the tokenizer, which does not hold the interpreter's lock.

    Args:
        make: function that makes the samples of a task from the task, tokenizer, length, number of samples, seed, and
            ``options``.
        options: names of command-line arguments that ``make`` takes as keyword arguments.
        needs_data: whether the suite needs ``--data``.
    """

    def samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
        wanted = chosen(args.tasks, tuple(tasks))
        if needs_data and args.data is None:
            raise ValueError(f"{args.suite} needs --data DIR, a folder with a file <task>.jsonl for each of its tasks")
        chosen_options = {name: getattr(args, name) for name in options}
        with ThreadPoolExecutor() as threads:
            futures = [
                threads.submit(make, task, tokenizer, length, args.samples, args.seed, **chosen_options)
                for length in args.length
                for task in wanted
            ]
            try:
                return [sample for samples in futures for sample in samples.result()]
            finally:
                threads.shutdown(cancel_futures=True)

    return samples


def chosen(tasks: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the requested tasks without duplicates, or all tasks if none are requested. Raises ValueError for unknown
    tasks."""
    unknown = [task for task in tasks or () if task not in known]
    if unknown:
        raise ValueError(f"--tasks {unknown[0]} is not one of {', '.join(known)}")
    return tuple(dict.fromkeys(tasks or known))


SUITES: dict[str, Suite] = {
    "ruler": _by_task(ruler.samples, ruler.TASKS, "data", "chat"),
    "niah": niah_samples,
    "longbench": _by_task(longbench.samples, longbench.TASKS, "data", "chat", needs_data=True),
    "infinitebench": _by_task(infinitebench.samples, infinitebench.TASKS, "data", "chat", needs_data=True),
    "mrcr": _by_task(mrcr.samples, mrcr.TASKS, "chat"),
    "stress": _by_task(stress.samples, tuple(stress.KINDS)),
    "open-ended": _by_task(open_ended.samples, open_ended.TASKS, "chat"),
}
