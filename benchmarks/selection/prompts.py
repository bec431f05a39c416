"""Prompts on which selections are measured: pieces of texts, and samples of RULER's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shadowkv.eval.fidelity.prompts import NAMED, Prompt, read_prompts
from shadowkv.eval.suites import ruler
from shadowkv.models.loader import LoadedModel

KINDS = (*NAMED, *ruler.TASKS)
"""Kinds of texts, and tasks of RULER."""


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
