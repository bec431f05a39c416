"""Prompts on which selections are measured: pieces of texts, and samples of RULER's tasks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from shadowkv.eval.fidelity.prompts import NAMED, Prompt, read_prompts
from shadowkv.eval.suites import ruler
from shadowkv.models.loader import LoadedModel

KINDS = (*NAMED, *ruler.TASKS)
"""Kinds of texts, and tasks of RULER."""


def add_prompt_arguments(parser: argparse.ArgumentParser, length: int, prompts: int) -> None:
    """Adds the flags for prompts, with default values for their length and number, and for the file of results."""
    texts, default = ["essays", "code", "logs", "tables"], "(default: %(default)s)"
    parser.add_argument("--text", nargs="+", default=texts, choices=KINDS, metavar="KIND", help="of NAMED or RULER")
    parser.add_argument("--length", type=int, default=length, metavar="TOKENS", help=f"of prompts {default}")
    parser.add_argument("--prompts", type=int, default=prompts, help=f"of each kind {default}")
    parser.add_argument("--seed", type=int, default=71, help=f"of random numbers and of RULER's samples {default}")
    parser.add_argument("--new-tokens", type=int, default=96, help=f"to follow, at most {default}")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--summary", action="store_true", help="only prints what the file has")


def in_turn(args: argparse.Namespace, loaded: LoadedModel) -> Iterator[tuple[str, Prompt, int]]:
    """Yields each prompt that the flags ask for, with its kind before it and the maximum number of tokens to follow
    after it: the first prompt of every kind, then the second ones, and so on."""
    of_kinds = [
        list(prompts_of(kind, loaded, args.prompts, args.length, args.new_tokens, args.seed)) for kind in args.text
    ]
    for prompts in zip(*of_kinds, strict=True):
        yield from ((kind, *prompt) for kind, prompt in zip(args.text, prompts, strict=True))


def prompts_of(
    kind: str, loaded: LoadedModel, count: int, tokens: int, new: int, seed: int
) -> Iterator[tuple[Prompt, int]]:
    """Yields prompts of ``kind``, which is a kind of text or a task of RULER, each with the maximum number of tokens to
    follow. RULER's samples are made from ``seed``."""
    if kind in NAMED:
        for prompt in read_prompts([Path(kind)], loaded.tokenizer, count, tokens):
            yield prompt, new
        return
    for sample in ruler.samples(kind, loaded.tokenizer, tokens + new, count, seed, None):
        encoded = loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True)
        yield Prompt(f"{kind}:{sample.id}", encoded), min(new, sample.max_new_tokens)
