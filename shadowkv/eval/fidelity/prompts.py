"""Cuts prompts from texts. Prompts are far apart and do not overlap, so that results on them are independent
samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.prompts.texts import (
    CHARACTERS_PER_TOKEN,
    ESSAYS,
    NAMED,
    TEXTS_OF_LINES,
    essays,
    read_own_texts,
)
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.wording import counted

FILES = "files"
"""The kind of the user's own files. Other kinds are in ``NAMED``."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens. ``name`` is ``TEXT:PLACE``: the text's name, and the index in the text of the prompt's first
    token."""

    name: str
    tokens: list[int]


def read_prompts(
    sources: Sequence[Path] | None,
    tokenizer: Tokenizer,
    count: int,
    tokens: int,
    own: Mapping[Path, str] | None = None,
) -> list[Prompt]:
    """Returns ``count`` prompts of ``tokens`` tokens each, for every kind of text in ``sources``.

    Args:
        sources: files, or kinds of ``NAMED``; None means ``ESSAYS``.
        own: the texts of these files if they have been read before (``read_own_texts``).

    Raises ValueError if texts are missing or too short, or if a file cannot be read.
    """
    sources = sources or [Path(ESSAYS)]
    own = read_own_texts(sources) if own is None else own
    kinds: dict[str, dict[str, str]] = {}
    for source in sources:
        kind = str(source)
        if kind == ESSAYS:
            kinds[kind] = {kind: " ".join(essays().sentences)}
        elif kind in TEXTS_OF_LINES:
            kinds[kind] = {kind: TEXTS_OF_LINES[kind](kind, CHARACTERS_PER_TOKEN * count * tokens)}
        else:
            kinds.setdefault(FILES, {})[source.name] = own[source]
    return [prompt for texts in kinds.values() for prompt in cut_prompts(texts, tokenizer, count, tokens)]


def kind_of(prompt: str) -> str:
    """Returns the kind of text that the prompt with the name ``prompt`` was cut from."""
    text = prompt.rpartition(":")[0]
    return text if text in NAMED else FILES


def sha256_by_kind(prompts: Sequence[Prompt]) -> dict[str, str]:
    """SHA-256 of the tokens of all prompts of each kind, in hexadecimal."""
    tokens: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        tokens.setdefault(kind_of(prompt.name), []).append(prompt.tokens)
    return {kind: hashlib.sha256(repr(lists).encode()).hexdigest() for kind, lists in tokens.items()}


def cut_prompts(texts: Mapping[str, str], tokenizer: Tokenizer, count: int, tokens: int) -> list[Prompt]:
    """Cuts all texts into prompts of ``tokens`` tokens. Returns ``count`` of these prompts, evenly spread over the
    texts.

    Raises ValueError if the texts are too short.
    """
    start = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    length = tokens - len(start)
    if length < 1:
        raise ValueError(f"--prompt-tokens {tokens} leaves no room for the text")
    pieces: list[Prompt] = []
    held = 0
    for name, text in texts.items():
        encoded = tokenizer.encode(text, add_special_tokens=False)
        held += len(encoded)
        places = range(0, len(encoded) - length + 1, length)
        pieces += [Prompt(f"{name}:{place}", start + encoded[place : place + length]) for place in places]
    if len(pieces) < count:
        enough = f"enough for {counted(len(pieces), 'prompt')} of --prompt-tokens {tokens}, not for {count}"
        raise ValueError(f"{', '.join(texts)} has {counted(held, 'token')}, {enough}")
    return [pieces[number * len(pieces) // count] for number in range(count)]
