"""The suites by name. A suite makes its samples from the command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shadowkv.eval.prompts.texts import haystack
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import infinitebench, longbench, mrcr, niah, open_ended, ruler, stress
from shadowkv.models.tokenization.tokenizer import Tokenizer

Suite = Callable[[argparse.Namespace, Tokenizer], list[Sample]]


def niah_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """Needles at every length and depth."""
    hay = haystack(args.data)
    return [
        sample
        for length in args.length
        for sample in niah.samples(
            hay,
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


def ruler_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """RULER's tasks at every length."""

    def make(length: int, task: str) -> list[Sample]:
        return ruler.samples(task, tokenizer, length, args.samples, args.seed, args.data, args.chat)

    return _together(make, args.length, chosen(args.tasks, ruler.TASKS))


def longbench_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """LongBench's data sets, cut to every length."""

    def make(length: int, task: str) -> list[Sample]:
        return longbench.samples(task, tokenizer, length, args.samples, args.seed, folder(args), args.chat)

    return _together(make, args.length, chosen(args.tasks, longbench.TASKS))


def infinitebench_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """InfiniteBench's tasks, cut to every length."""

    def make(length: int, task: str) -> list[Sample]:
        return infinitebench.samples(task, tokenizer, length, args.samples, args.seed, folder(args), args.chat)

    return _together(make, args.length, chosen(args.tasks, infinitebench.TASKS))


def mrcr_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """MRCR's tasks at every length."""

    def make(length: int, task: str) -> list[Sample]:
        return mrcr.samples(task, tokenizer, length, args.samples, args.seed, args.chat)

    return _together(make, args.length, chosen(args.tasks, mrcr.TASKS))


def stress_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """Every kind of stress test at every length."""

    def make(length: int, kind: str) -> list[Sample]:
        return stress.samples(kind, tokenizer, length, args.samples, args.seed)

    return _together(make, args.length, chosen(args.tasks, tuple(stress.KINDS)))


def open_ended_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """Every open-ended task at every length."""

    def make(length: int, task: str) -> list[Sample]:
        return open_ended.samples(task, tokenizer, length, args.samples, args.seed, args.chat)

    return _together(make, args.length, chosen(args.tasks, open_ended.TASKS))


def _together(make: Callable[[int, str], list[Sample]], lengths: Sequence[int], tasks: Sequence[str]) -> list[Sample]:
    """Returns the samples of every length and task, in this order. It makes them in threads, because most of the time
    is spent in the tokenizer."""
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(make, length, task) for length in lengths for task in tasks]
        try:
            return [sample for samples in futures for sample in samples.result()]
        finally:
            threads.shutdown(cancel_futures=True)


def folder(args: argparse.Namespace) -> Path:
    """The ``--data`` folder of a suite that needs one; raises ValueError without it."""
    if args.data is None:
        raise ValueError(f"{args.suite} needs --data DIR, a folder with a file <task>.jsonl for each of its tasks")
    assert isinstance(args.data, Path)
    return args.data


def chosen(tasks: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the requested tasks without repetition; all if none are given. Raises ValueError for unknown tasks."""
    unknown = [task for task in tasks or () if task not in known]
    if unknown:
        raise ValueError(f"--tasks {unknown[0]} is not one of {', '.join(known)}")
    return tuple(dict.fromkeys(tasks or known))


SUITES: dict[str, Suite] = {
    "ruler": ruler_samples,
    "niah": niah_samples,
    "longbench": longbench_samples,
    "infinitebench": infinitebench_samples,
    "mrcr": mrcr_samples,
    "stress": stress_samples,
    "open-ended": open_ended_samples,
}
